"""Shape checks of the recurrent rules, at trace time, so that a mistake reads as one sentence.

Shapes: B batch, T tokens, H query/key heads, G value heads, K key dim, V value dim.
"""

import jax
import jax.numpy as jnp

from fastweights.errors import UserError, check

IMPLEMENTATIONS = ("auto", "reference", "scan", "chunked")
CHUNK_SIZES = (16, 32, 64, 128, 256)


def check_rule(
    name: str,
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    g: jax.Array | None,
    beta_BTG: jax.Array | None,
    segment_ids: jax.Array | None,
    chunk_size: int,
    implementation: str,
    *,
    channels: bool = False,
) -> None:
    """Raises UserError, naming the rule and the argument, unless all shapes fit together.

    `channels` asks for a g per key channel.
    """
    for label, x in (("q", q_BTHK), ("k", k_BTHK), ("v", v_BTGV)):
        check(
            x.ndim == 4 and jnp.issubdtype(x.dtype, jnp.floating),
            f"{name}: {label} must be a floating-point array [B, T, heads, dim], "
            f"got {x.dtype} of shape {x.shape}",
        )
    batch, length, heads, _ = q_BTHK.shape
    check(
        k_BTHK.shape == q_BTHK.shape,
        f"{name}: k must have q's shape [B, T, H, K] = {q_BTHK.shape}, got {k_BTHK.shape}",
    )
    value_heads = v_BTGV.shape[2]
    check(
        v_BTGV.shape[:2] == (batch, length),
        f"{name}: v must be [B, T, G, V] with [B, T] = {(batch, length)} as in q, "
        f"got {v_BTGV.shape}",
    )
    check(
        heads > 0 and value_heads > 0 and value_heads % heads == 0,
        f"{name}: {value_heads} value heads are no multiple of {heads} query/key heads",
    )
    per_head = ("[B, T, G]", v_BTGV.shape[:3])
    per_channel = ("[B, T, G, K]", (*v_BTGV.shape[:3], q_BTHK.shape[3]))
    gates = (("g", g, per_channel if channels else per_head), ("beta", beta_BTG, per_head))
    for label, x, (axes, shape) in gates:
        if x is not None:
            check(
                x.shape == shape and jnp.issubdtype(x.dtype, jnp.floating),
                f"{name}: {label} must be a floating-point array {axes} = {shape}, "
                f"got {x.dtype} of shape {x.shape}",
            )
    check_options(name, segment_ids, (batch, length), chunk_size, implementation)


def check_options(
    name: str,
    segment_ids: jax.Array | None,
    rows: tuple[int, ...],
    chunk_size: int,
    implementation: str,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
) -> None:
    """The part of `check_rule` that does not depend on the inputs; `rows` is (B, T)."""
    if segment_ids is not None:
        check(
            segment_ids.shape == rows and jnp.issubdtype(segment_ids.dtype, jnp.integer),
            f"{name}: segment_ids must be integers [B, T] = {rows}, "
            f"got {segment_ids.dtype} of shape {segment_ids.shape}",
        )
    check(
        chunk_size in CHUNK_SIZES,
        f"{name}: chunk_size must be one of {', '.join(map(str, CHUNK_SIZES))}, got {chunk_size}",
    )
    check(
        implementation in implementations,
        f"{name}: unknown implementation {implementation!r}; "
        f"choose one of {', '.join(implementations)}",
    )


def check_state(name: str, label: str, state: jax.Array | None, shape: tuple[int, ...]) -> None:
    """Raises UserError unless an initial state is absent or has the given shape."""
    check(
        state is None or state.shape == shape,
        f"{name}: {label} must have shape {shape}, got {None if state is None else state.shape}",
    )


def single_state(name: str, state: jax.Array | tuple | list | None) -> jax.Array | None:
    """The state of a rule without a normaliser; UserError where the pair (S, z) was given."""
    if isinstance(state, tuple | list):
        raise UserError(
            f"{name}: initial_state is a pair, which only normalize=True takes; pass S alone"
        )
    return state


def split_normalised_state(
    name: str, state: object, q_BTHK: jax.Array, v_BTGV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The pair (S, z) of normalised linear attention, or UserError."""
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise UserError(f"{name}: with normalize=True initial_state must be the pair (S, z)")
    S_BGKV, z_BGK = state
    shape = (q_BTHK.shape[0], v_BTGV.shape[2], q_BTHK.shape[3], v_BTGV.shape[3])
    check_state(name, "initial_state[0]", S_BGKV, shape)
    check_state(name, "initial_state[1]", z_BGK, shape[:3])
    return S_BGKV, z_BGK

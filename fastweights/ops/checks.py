"""Checks of the rules' inputs, so that a mistake reads as one sentence.

Shapes and dtypes are checked at trace time. Values are checked where somebody asks for it:

    error, out = checkify.checkify(f)(...)      # jax.experimental.checkify; f may be jitted
    error.throw()

names the first rule in f whose gate, write strength or segment ids leave their range. Without
`checkify` these checks are dropped when the program is compiled and cost nothing.

Shapes: B batch, T tokens, H query/key heads, G value heads, K key dim, V value dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from fastweights.errors import UserError, check

IMPLEMENTATIONS = ("auto", "reference", "scan", "chunked", "pallas")
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
    labels = ("q", "k", "v", "g", "beta", "segment_ids")
    for label, x in zip(labels, (q_BTHK, k_BTHK, v_BTGV, g, beta_BTG, segment_ids), strict=True):
        check(
            x is None or isinstance(x, jax.Array | np.ndarray),
            f"{name}: {label} must be an array, got {type(x).__name__}",
        )
    for label, x in (("q", q_BTHK), ("k", k_BTHK), ("v", v_BTGV)):
        check(
            x.ndim == 4 and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1,
            f"{name}: {label} must be an array [B, T, heads, dim] of floats of 16 bits or more, "
            f"got {x.dtype} of shape {x.shape}",
        )
    batch, length, heads, key_dim = q_BTHK.shape
    check(key_dim > 0, f"{name}: q must be [B, T, H, K] with K >= 1, got {q_BTHK.shape}")
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
    per_channel = ("[B, T, G, K]", (*v_BTGV.shape[:3], key_dim))
    gates = (("g", g, per_channel if channels else per_head), ("beta", beta_BTG, per_head))
    for label, x, (axes, shape) in gates:
        if x is not None:
            check(
                x.shape == shape and jnp.issubdtype(x.dtype, jnp.floating),
                f"{name}: {label} must be a floating-point array {axes} = {shape}, "
                f"got {x.dtype} of shape {x.shape}",
            )
    check_options(name, segment_ids, (batch, length), chunk_size, implementation)


def check_given(name: str, **arrays: jax.Array | None) -> None:
    """Raises UserError for the first None: without its gates a rule would be another rule."""
    for label, x in arrays.items():
        check(
            x is not None, f"{name}: {label} is None; give an array, or call a rule that has none"
        )


def known_number(name: str, label: str, x: object) -> float:
    """x as a number that is known while tracing, or UserError."""
    try:
        return float(x)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name}: {label} must be a number that is known while tracing, got {x!r}"
        ) from error


def check_options(
    name: str,
    segment_ids: jax.Array | None,
    rows: tuple[int, ...],
    chunk_size: int,
    implementation: str,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
) -> None:
    """The part of `check_rule` that does not depend on the inputs; `rows` is (B, T)."""
    check_segments(name, segment_ids, rows)
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
    """Raises UserError unless an initial state is absent or real numbers of the given shape."""
    if state is None:
        return
    found = getattr(state, "shape", type(state).__name__)
    check(
        found == shape,
        f"{name}: {label} must have shape {shape}, one state a row (not a document), got {found}",
    )
    check(
        jnp.issubdtype(state.dtype, jnp.floating),
        f"{name}: {label} must be floating-point, got {state.dtype}",
    )


def check_segments(
    name: str,
    ids: jax.Array | np.ndarray | None,
    rows: tuple[int, ...],
    label: str = "segment_ids",
    axes: str = "[B, T]",
) -> None:
    """Raises UserError unless ids are absent or non-negative integers of the given shape.

    The sign of traced ids is only seen under `checkify`.
    """
    if ids is None:
        return
    check(
        ids.shape == rows and jnp.issubdtype(ids.dtype, jnp.integer),
        f"{name}: {label} must be integers {axes} = {rows}, got {ids.dtype} of shape {ids.shape}",
    )
    expected = f"{name}: {label} must not be negative (0 is padding, documents are above)"
    traced = isinstance(ids, Tracer)
    if ids.size and not traced and getattr(ids, "is_fully_addressable", True):
        least = int(np.min(np.asarray(ids)))
        check(least >= 0, f"{expected}, got {least}")
    check_range(expected, jnp.asarray(ids), low=0)


def check_range(
    expected: str, x: jax.Array | None, *, low: float = -np.inf, high: float = np.inf
) -> None:
    """Under `checkify`, an error unless all of x lies in [low, high]; NaN does not.

    `expected` is the sentence up to the values seen. Otherwise nothing happens.
    """
    if x is None or not x.size:
        return
    x = jax.lax.stop_gradient(x)
    least, greatest = jnp.min(x), jnp.max(x)
    checkify.debug_check(
        (least >= low) & (greatest <= high),
        expected + ", got values from {least} to {greatest}",
        least=least,
        greatest=greatest,
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
    check_given(name, **{"initial_state[0]": S_BGKV, "initial_state[1]": z_BGK})
    check_state(name, "initial_state[0]", S_BGKV, shape)
    check_state(name, "initial_state[1]", z_BGK, shape[:3])
    return S_BGKV, z_BGK

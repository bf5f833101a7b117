"""Rules and convolutions whose tokens are cut over a mesh axis: for use inside `jax.shard_map`.

Each device holds a slice of T tokens of every row, in the order of the mesh axis. Over a slice any
of the rules is an affine map of the state, S -> M S + U (symbols as in `reference.py`): U is the
state that the slice makes from nothing, M what it makes of the identity where v = 0. Both come from
one call of the rule itself. The pairs are exchanged once and composed in order; then every device
runs the rule on its slice from the state that reaches it.

Shapes: as in `rules.py`, with T the tokens of one slice; N slices, W taps.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fastweights.errors import check
from fastweights.ops import rules
from fastweights.ops.convolution import short_convolution
from fastweights.ops.varying import vary_alike

# Rules whose M is a full matrix. The others only decay the rows of the state, so that a vector of
# K factors says all of M.
MIXING = (rules.delta_rule, rules.gated_delta_rule, rules.kimi_delta_rule)


def run_rule(
    rule: Callable[..., Any],
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    *gates: jax.Array,
    axis: str,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """What `rule` gives for the whole rows, from a slice of them on each device.

    Args:
      rule: one of `delta_rule`, `gated_delta_rule`, `kimi_delta_rule`, `gated_linear_attention`,
        `linear_attention`.
      q_BTHK, k_BTHK, v_BTGV, gates, segment_ids: this device's slice of the rule's arguments.
      axis: mesh axis that the tokens are cut over.
      initial_state: [B, G, K, V], before the first slice, the same on all devices of the axis.
      options: the rule's others, except normalize.

    Returns:
      (this slice's o_BTGV, the state behind the last slice, the same on all devices of the axis).

    Raises:
      UserError: as the rule; normalize=True.
    """
    check(
        not options.get("normalize"),
        "sequence_parallel.run_rule: normalize=True carries a pair of states, which is not cut "
        "over tokens; append a channel of ones to v and divide by it",
    )
    inputs = (q_BTHK, k_BTHK, v_BTGV, *gates)
    batch, _, _, key_dim = q_BTHK.shape
    value_heads, value_dim = v_BTGV.shape[2:]
    acc = jnp.promote_types(
        jnp.result_type(*inputs, *([] if initial_state is None else [initial_state])), jnp.float32
    )
    S_BGKV = jnp.zeros((batch, value_heads, key_dim, value_dim), acc)
    if initial_state is not None:
        S_BGKV = initial_state.astype(acc)

    # One call for U and M: M's columns are value channels that nothing is written to.
    mixing = rule in MIXING
    probe = jnp.eye(key_dim, dtype=acc) if mixing else jnp.ones((key_dim, 1), acc)
    probe = jnp.broadcast_to(probe[None, None], (batch, value_heads, *probe.shape))
    silent = jnp.zeros((*v_BTGV.shape[:3], probe.shape[-1]), v_BTGV.dtype)
    _, pair = rule(
        q_BTHK,
        k_BTHK,
        jnp.concatenate([v_BTGV, silent], axis=-1),
        *gates,
        initial_state=jnp.concatenate([jnp.zeros_like(S_BGKV), probe], axis=-1),
        segment_ids=segment_ids,
        **options,
    )
    flows_B = jnp.ones((batch,), bool) if segment_ids is None else _flows_in(segment_ids, axis)
    S_BGKV, pair, flows_B = vary_alike((S_BGKV, pair, flows_B))
    slices = jax.lax.all_gather((pair, flows_B), axis)

    def compose(S_BGKV, one):
        pair, flows_B = one
        S_BGKV = jnp.where(flows_B[:, None, None, None], S_BGKV, 0.0)
        U_BGKV, M = pair[..., :value_dim], pair[..., value_dim:]
        if mixing:
            moved_BGKV = jnp.einsum("bgij,bgjv->bgiv", M, S_BGKV, precision="highest")
        else:
            moved_BGKV = M * S_BGKV
        return moved_BGKV + U_BGKV, S_BGKV

    _, states_NBGKV = jax.lax.scan(compose, S_BGKV, slices)
    place = jax.lax.axis_index(axis)
    before_BGKV = jax.lax.dynamic_index_in_dim(states_NBGKV, place, keepdims=False)
    o_BTGV, S_BGKV = rule(*inputs, initial_state=before_BGKV, segment_ids=segment_ids, **options)
    is_last = place == jax.lax.axis_size(axis) - 1
    return o_BTGV, jax.lax.psum(jnp.where(is_last, S_BGKV, 0.0), axis)


def _flows_in(segment_ids_BT: jax.Array, axis: str) -> jax.Array:
    """Whether the state before this slice belongs to its first document, [B].

    A rule takes its first real token for a continuation. Here it is one only if the last real token
    of the slices before has the same id, or there is none. A slice of padding passes the state on.
    """
    length = segment_ids_BT.shape[1]
    valid_BT = segment_ids_BT != 0
    first_B1 = jnp.argmax(valid_BT, axis=1, keepdims=True)
    last_B1 = length - 1 - jnp.argmax(valid_BT[:, ::-1], axis=1, keepdims=True)
    # Ids are 0 for a slice without a real token.
    first_B, last_B = (
        jnp.take_along_axis(segment_ids_BT, at, axis=1)[:, 0] for at in (first_B1, last_B1)
    )
    last_NB = jax.lax.all_gather(last_B, axis)
    number_N1 = jnp.arange(last_NB.shape[0])[:, None]
    earlier_NB = (number_N1 < jax.lax.axis_index(axis)) & (last_NB != 0)
    nearest_B = jnp.max(jnp.where(earlier_NB, number_N1, -1), axis=0)
    before_B = jnp.take_along_axis(last_NB, jnp.maximum(nearest_B, 0)[None], axis=0)[0]
    return (first_B == 0) | (nearest_B < 0) | (before_B == first_B)


def convolve(
    x_BTD: jax.Array,
    w_WD: jax.Array,
    bias_D: jax.Array | None = None,
    *,
    axis: str,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """What `short_convolution` without a cache gives for whole rows, from a slice of them each.

    The W - 1 tokens before the slice come from as many devices as they lie on.

    Args:
      x_BTD, segment_ids: this device's slice.
      w_WD, bias_D: the same on all devices of the axis.
      axis: mesh axis that the tokens are cut over.
      options: activation and unit_heads.

    Returns:
      This slice's y_BTD in x's dtype.

    Raises:
      UserError: as `short_convolution`.
    """
    reach = w_WD.shape[0] - 1
    x_BED = _with_halo(x_BTD, reach, axis)
    ids_BE = None if segment_ids is None else _with_halo(segment_ids, reach, axis)
    x_BED, w_WD, bias_D, ids_BE = vary_alike((x_BED, w_WD, bias_D, ids_BE))
    y_BED, _ = short_convolution(x_BED, w_WD, bias_D, segment_ids=ids_BE, **options)
    return y_BED[:, reach:]


def _with_halo(x: jax.Array, reach: int, axis: str) -> jax.Array:
    """x [B, T, ...] behind the `reach` tokens before it; zeros before the row's start."""
    length, count = x.shape[1], jax.lax.axis_size(axis)
    parts, missing = [x], reach
    for distance in range(1, count):
        tokens = min(length, missing)
        if not tokens:
            break
        # A device that nothing is sent to gets zeros.
        pairs = [(i, i + distance) for i in range(count - distance)]
        parts.insert(0, jax.lax.ppermute(x[:, length - tokens :], axis, pairs))
        missing -= tokens
    whole = jnp.concatenate(parts, axis=1)
    return jnp.pad(whole, ((0, 0), (missing, 0)) + ((0, 0),) * (x.ndim - 2))

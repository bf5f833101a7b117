"""The ops on rows whose tokens are cut over a mesh axis: for use inside `jax.shard_map`.

Each device holds a slice of T tokens of every row, in the order of the mesh axis. Over a slice any
of the rules is an affine map of the state, S -> M S + U (symbols as in `reference.py`): U is the
state that the slice makes from nothing, M what it makes of the states before it. The pairs are
exchanged once and composed in order; then every device runs the rule on its slice from the state
that reaches it. Attention takes whole rows of some of the heads instead of slices of all.

On a mesh with a `sequence` axis the public ops come here by themselves.

Shapes: as in the ops' own files, with T the tokens of one slice; N slices, W taps.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fastweights.errors import check
from fastweights.ops import attention, rules, segments, selective, structured
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
    S_BGKV = _start((batch, value_heads, key_dim, value_dim), initial_state, *inputs)
    acc = S_BGKV.dtype

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

    def move(pair, S_BGKV):
        U_BGKV, M = pair[..., :value_dim], pair[..., value_dim:]
        if mixing:
            return jnp.einsum("bgij,bgjv->bgiv", M, S_BGKV, precision="highest") + U_BGKV
        return M * S_BGKV + U_BGKV

    before_BGKV = _state_before(S_BGKV, pair, move, segment_ids, axis)
    o_BTGV, S_BGKV = rule(*inputs, initial_state=before_BGKV, segment_ids=segment_ids, **options)
    return o_BTGV, _of_last(S_BGKV, axis)


def run_selective_scan(
    x_BTD: jax.Array,
    dt_BTD: jax.Array,
    A_DN: jax.Array,
    B_BTN: jax.Array,
    C_BTN: jax.Array,
    *,
    axis: str,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    D: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """What `selective_scan` gives for the whole rows, from a slice of them on each device.

    M is diagonal: the decay of all tokens together, exp(A sum dt).

    Args:
      x_BTD, dt_BTD, B_BTN, C_BTN, segment_ids: this device's slice.
      A_DN, D, initial_state: the same on all devices of the axis.
      axis: mesh axis that the tokens are cut over.
      options: chunk_size and implementation.

    Returns:
      (this slice's y_BTD, the state behind the last slice, the same on all devices of the axis).

    Raises:
      UserError: as `selective_scan`.
    """
    tokens = (x_BTD, dt_BTD, A_DN, B_BTN, C_BTN)
    shape = (x_BTD.shape[0], *A_DN.shape)
    h_BDN = _start(shape, initial_state, *tokens)
    run = functools.partial(selective.selective_scan, *tokens, segment_ids=segment_ids, **options)
    _, U_BDN = run()
    dt_BTD, keeps_B = dt_BTD.astype(h_BDN.dtype), jnp.ones(shape[:1], bool)
    if segment_ids is not None:
        index_BT, valid_BT = segments.find_documents(segment_ids)
        dt_BTD, keeps_B = segments.select_real(dt_BTD, valid_BT), index_BT[:, -1] == 0
    M_BDN = jnp.exp(jnp.sum(dt_BTD, axis=1)[..., None] * A_DN[None].astype(h_BDN.dtype))
    M_BDN = jnp.where(keeps_B[:, None, None], M_BDN, 0.0)
    before_BDN = _state_before(
        h_BDN, (M_BDN, U_BDN), lambda pair, h_BDN: pair[0] * h_BDN + pair[1], segment_ids, axis
    )
    y_BTD, h_BDN = run(D=D, initial_state=before_BDN)
    return y_BTD, _of_last(h_BDN, axis)


def run_state_space(
    x_BTD: jax.Array,
    *system: jax.Array,
    axis: str,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    D: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """What `state_space` gives for the whole rows, from a slice of them on each device.

    Every token moves the state alike, so that M is a power and its exponent says all of it.

    Args:
      x_BTD, segment_ids: this device's slice.
      system: dt_D, A_DP, B_DP and C_DP, which like D, P and initial_state are the same on all
        devices of the axis.
      axis: mesh axis that the tokens are cut over.
      options: the others of `state_space`.

    Returns:
      (this slice's y_BTD, the state behind the last slice, the same on all devices of the axis).

    Raises:
      UserError: as `state_space`.
    """
    (batch, length, channels), (dt_D, A_DP, B_DP, C_DP) = x_BTD.shape, system
    shape = (batch, channels, 2 * A_DP.shape[1])
    h_BDN = _start(shape, initial_state, x_BTD, dt_D, A_DP.real, B_DP.real, C_DP.real)
    run = functools.partial(
        structured.state_space, x_BTD, *system, segment_ids=segment_ids, **options
    )
    # A state to start from: a slice is no whole row, which alone can be one convolution.
    _, U_BDN = run(initial_state=jnp.zeros_like(h_BDN))
    count_B, keeps_B = jnp.full((batch,), length), jnp.ones((batch,), bool)
    if segment_ids is not None:
        index_BT, valid_BT = segments.find_documents(segment_ids)
        count_B, keeps_B = jnp.sum(valid_BT, axis=1), index_BT[:, -1] == 0
    idle = structured.idle_steps(
        dt_D,
        A_DP,
        P=options.get("P"),
        discretization=options.get("discretization", "zoh"),
        most=length,
        dtype=h_BDN.dtype,
    )

    def move(pair, h_BDN):
        U_BDN, count_B, keeps_B = pair
        return jnp.where(keeps_B[:, None, None], idle(h_BDN, count_B), 0.0) + U_BDN

    before_BDN = _state_before(h_BDN, (U_BDN, count_B, keeps_B), move, segment_ids, axis)
    y_BTD, h_BDN = run(D=D, initial_state=before_BDN)
    return y_BTD, _of_last(h_BDN, axis)


def _start(shape, initial_state: jax.Array | None, *inputs: jax.Array) -> jax.Array:
    """The state before the first slice, in float32 or wider."""
    given = (*inputs, *([] if initial_state is None else [initial_state]))
    acc = jnp.promote_types(jnp.result_type(*given), jnp.float32)
    return jnp.zeros(shape, acc) if initial_state is None else initial_state.astype(acc)


def _state_before(start, pair, move, segment_ids, axis: str) -> jax.Array:
    """The state that reaches this slice; `move(pair, state)` takes a state across a slice."""
    batch = start.shape[:1]
    flows_B = jnp.ones(batch, bool) if segment_ids is None else _flows_in(segment_ids, axis)
    start, pair, flows_B = vary_alike((start, pair, flows_B))

    def compose(state, one):
        pair, flows_B = one
        state = jnp.where(flows_B.reshape(batch + (1,) * (state.ndim - 1)), state, 0.0)
        return move(pair, state), state

    _, states = jax.lax.scan(compose, start, jax.lax.all_gather((pair, flows_B), axis))
    return jax.lax.dynamic_index_in_dim(states, jax.lax.axis_index(axis), keepdims=False)


def _of_last(state: jax.Array, axis: str) -> jax.Array:
    """The last slice's state, on every device."""
    is_last = jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
    return jax.lax.psum(jnp.where(is_last, state, 0.0), axis)


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


def attend(
    q_BTHK: jax.Array,
    k_BTJK: jax.Array,
    v_BTJV: jax.Array,
    *,
    axis: str,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """What `softmax_attention` of rows to themselves gives, from a slice of them on each device.

    Slices of all heads are exchanged for whole rows of some heads, and back (Jacobs et al. 2023,
    arXiv:2309.14509), so that every device has the same work though attention is causal, and the
    same kernel as on one device. Where the devices do not divide the heads, keys and values are
    gathered, and a device's queries see them through a mask [B, T, N T].

    Args:
      q_BTHK, k_BTJK, v_BTJV, segment_ids: this device's slice.
      axis: mesh axis that the tokens are cut over.
      options: scale, window, logit_cap and implementation.

    Returns:
      This slice's o_BTHV in v's dtype.

    Raises:
      UserError: as `softmax_attention`.
    """
    count, (batch, length, heads, _) = jax.lax.axis_size(axis), q_BTHK.shape
    attend_whole = functools.partial(attention.softmax_attention, **options)

    def gather(x):
        return None if x is None else jax.lax.all_gather(x, axis, axis=1, tiled=True)

    ids_BS = gather(segment_ids)
    if heads % count == 0:
        q_BSHK, k_BSJK, v_BSJV = (
            jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
            for x in attention.heads_to_cut(q_BTHK, k_BTJK, v_BTJV, count)
        )
        o_BSHV = attend_whole(q_BSHK, k_BSJK, v_BSJV, segment_ids=ids_BS)
        return jax.lax.all_to_all(o_BSHV, axis, split_axis=1, concat_axis=2, tiled=True)

    if ids_BS is None:
        ids_BS = jnp.ones((batch, count * length), jnp.int32)
    index_BS, valid_BS = segments.find_documents(ids_BS)
    document_BS = jnp.where(valid_BS, index_BS + 1, 0)
    place_BS = jnp.cumsum(valid_BS, axis=1, dtype=jnp.int32)

    def own(x_BS):
        start = jax.lax.axis_index(axis) * length
        return jax.lax.dynamic_slice_in_dim(x_BS, start, length, axis=1)

    return attend_whole(
        q_BTHK,
        gather(k_BTJK),
        gather(v_BTJV),
        segment_ids=own(document_BS),
        kv_segment_ids=document_BS,
        q_positions=own(place_BS),
        kv_positions=place_BS,
    )

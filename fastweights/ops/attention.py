"""Causal softmax attention with grouped heads, windows, packed rows and caches.

Shapes: B batch, T queries, S keys (cache slots in decoding), H query heads, J key/value heads
(H % J == 0, query head h reads key head h // (H // J)), K key dim, V value dim.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastweights import sharding
from fastweights.errors import check
from fastweights.ops import kernels, segments
from fastweights.ops.checks import check_segments
from fastweights.ops.mosaic_gpu.support import on_hopper

IMPLEMENTATIONS = ("auto", "xla", "cudnn")
# Of a device; beyond, queries come in blocks. In the XLA form logits, 256 MiB in float32; cuDNN
# makes none, but its mask has 3 bytes an entry.
LOGITS_AT_ONCE = 2**26
MASK_AT_ONCE = 2**29
# Up to so many entries a row cuDNN gets a mask of every head: under vmap jax (0.11) takes no other
# for several. What is trained side by side has short rows (`training.group` sees to it).
MASK_OF_HEADS = 2**20
FEWEST_QUERIES = 128  # of a block: fewer would not fill a matrix unit


class Places(NamedTuple):
    """Which keys a query sees: of its document, filled, and not behind it.

    Documents are numbers to compare, None where all tokens are of one.
    """

    q_document_BT: jax.Array | None
    kv_document_BS: jax.Array | None
    q_valid_BT: jax.Array
    filled_BS: jax.Array
    q_place_BT: jax.Array
    kv_place_BS: jax.Array


def softmax_attention(
    q_BTHK: jax.Array,
    k_BSJK: jax.Array,
    v_BSJV: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    logit_cap: float | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(scale q k^T) v over the keys a query may see (Vaswani et al. 2017, eq. 1).

    A query sees the keys at its own and earlier positions, of its own document, and at most
    `window` of them. A query with nothing to see, padding above all, gives 0 with zero gradients,
    and NaN in padding or empty slots spreads nowhere.

    Args:
      q_BTHK: queries.
      k_BSJK: keys.
      v_BSJV: values.
      scale: factor on the logits, K**-0.5 by default.
      window: how many of the latest positions a token sees, itself included (1: itself alone).
      logit_cap: bends logits to logit_cap * tanh(logits / logit_cap), in float32 or wider and
        before the mask (Bello et al. 2016, arXiv 1611.09940; in attention Gemma Team
        2024, arXiv 2408.00118). None for none. Takes the "xla" path.
      segment_ids: int [B, T], the queries' documents, 0 = padding. Without kv_segment_ids they
        are the keys' too (then S = T), and padding takes up no position.
      kv_segment_ids: int [B, S], 0 = empty slot. Compared with segment_ids as they are; without
        segment_ids every query may see every filled slot.
      q_positions: int [B, T], place of each query in the order of the keys; 0..T-1 by default.
      kv_positions: int [B, S], place of each key; 0..S-1 by default.
      implementation: "auto", "xla" or "cudnn". Both are `jax.nn.dot_product_attention`, for some
        queries at a time where the logits of all, or cuDNN's mask, would take much memory. "auto"
        takes cuDNN on NVIDIA GPUs for 16-bit inputs with equal head dims it supports. Packed rows
        and caches go through a boolean mask [B, 1, T, S] (one for every head of short rows), which
        cuDNN reads too; plain causal attention, windowed or not, never builds a mask there.

    Returns:
      o_BTHV in v's dtype.

    Raises:
      UserError: on shapes that do not fit, segment ids that are negative or no integers,
        window < 1 or no integer, logit_cap not in (0, inf), or an implementation that is unknown
        or has no logit_cap.
    """
    _check_inputs(
        q_BTHK, k_BSJK, v_BSJV, window, segment_ids, kv_segment_ids, q_positions, kv_positions
    )
    check(
        implementation in IMPLEMENTATIONS,
        f"softmax_attention: unknown implementation {implementation!r}; "
        f"choose one of {', '.join(IMPLEMENTATIONS)}",
    )
    check(
        logit_cap is None or (0 < logit_cap < math.inf and implementation != "cudnn"),
        f"softmax_attention: logit_cap must be positive and finite, and is not for implementation "
        f"'cudnn', got {logit_cap} with {implementation!r}",
    )
    batch, length, heads, key_dim = q_BTHK.shape
    slots, value_dim = k_BSJK.shape[1], v_BSJV.shape[-1]
    if 0 in (batch, length, slots):
        return jnp.zeros((batch, length, heads, value_dim), v_BSJV.dtype)
    to_itself = all(x is None for x in (kv_segment_ids, q_positions, kv_positions))
    if to_itself and slots == length and sharding.cuts_tokens(length):
        options = dict(scale=scale, window=window, logit_cap=logit_cap)
        arrays = (q_BTHK, k_BSJK, v_BSJV, segment_ids)
        return _on_slices(*arrays, implementation=implementation, **options)
    given = (segment_ids, kv_segment_ids, q_positions, kv_positions)
    dtype = jnp.result_type(q_BTHK, k_BSJK, v_BSJV)
    options = dict(
        scale=key_dim**-0.5 if scale is None else scale, window=window, logit_cap=logit_cap
    )
    if implementation == "auto":
        takes = logit_cap is None and _cudnn_takes(dtype, key_dim, value_dim)
        implementation = "cudnn" if takes else "xla"
    run = functools.partial(_run_here, options=options, backend=implementation)
    q, k, v = (x.astype(dtype) for x in (q_BTHK, k_BSJK, v_BSJV))
    if implementation == "cudnn" and kernels.obstacle_of_sharding(q, k, v) is None:
        # By hand: the compiler would have every device do the backward pass of all rows.
        o_BTHV = _on_each_device(run, q, k, v, given, tokens=None)
    else:
        o_BTHV = run(q, k, v, *given)
    return o_BTHV.astype(v_BSJV.dtype)


def _run_here(q, k, v, *given, options: dict[str, Any], backend: str) -> jax.Array:
    """`softmax_attention` of tensors of one dtype: with a mask or without, whole or in blocks."""
    (batch, length, heads, _), slots = q.shape, k.shape[1]
    attend = functools.partial(_attend, **options, backend=backend)
    # Plain causal attention needs no mask array: cuDNN skips what a causal window hides.
    plain = all(x is None for x in (options["logit_cap"], *given))
    at_once = _queries_at_once(backend, batch, length, heads, slots)
    whole = at_once >= length
    if plain and (whole or backend == "cudnn"):
        return attend(q, k, v, None)
    places = _find_places((batch, length, slots), *given)
    masked = attend if whole else functools.partial(_in_blocks, attend, rows=at_once)
    segment_ids, *others = given
    if backend == "cudnn" and segment_ids is not None and all(x is None for x in others):
        return _without_mask_if_whole(attend, masked, q, k, v, places, segment_ids)
    return masked(q, k, v, places)


def _on_slices(q_BTHK, k_BTJK, v_BTJV, segment_ids, **options) -> jax.Array:
    """Attention of rows to themselves on a mesh whose devices hold slices of them."""
    from fastweights.ops import sequence_parallel  # it runs this op on them

    def run(q, k, v, ids):
        return sequence_parallel.attend(q, k, v, axis=sharding.SEQUENCE, segment_ids=ids, **options)

    return _on_each_device(run, q_BTHK, k_BTJK, v_BTJV, (segment_ids,), tokens="tokens")


def _on_each_device(run: Callable, q, k, v, given, *, tokens: str | None) -> jax.Array:
    """run(q, k, v, *given), each device with its own rows and heads, and its own `tokens`.

    Args:
      given: arrays [B, T] or [B, S], or None.
      tokens: the logical axis of T and S; None leaves them whole.
    """
    heads = ("batch", tokens, "heads", None)
    arrays = *heads_to_cut(q, k, v, sharding.devices("heads")), *given
    axes = (*[heads] * 3, *[heads[:2]] * len(given))
    return sharding.on_each_device(lambda *x: (run(*x),), arrays, axes, (heads,))[0]


def heads_to_cut(q_BTHK, k_BSJK, v_BSJV, parts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """So many copies of each key head that each of `parts` devices can have its query heads' own.

    Without them, key heads that `parts` does not divide would keep the query heads from being cut.
    """
    copies = parts // math.gcd(parts, k_BSJK.shape[2])
    if copies == 1 or q_BTHK.shape[2] % parts:
        return q_BTHK, k_BSJK, v_BSJV
    return q_BTHK, jnp.repeat(k_BSJK, copies, axis=2), jnp.repeat(v_BSJV, copies, axis=2)


def _queries_at_once(backend: str, batch: int, length: int, heads: int, slots: int) -> int:
    """As many as a device has room for, in steps of what fills a matrix unit."""
    each, most = sharding.part(batch, "batch") * slots, MASK_AT_ONCE
    if backend == "xla":
        each, most = each * sharding.part(heads, "heads"), LOGITS_AT_ONCE
    else:
        each *= _mask_heads(heads, length, slots)
    if each * length <= most:
        return length
    return max(FEWEST_QUERIES, most // each // FEWEST_QUERIES * FEWEST_QUERIES)


def _mask_heads(heads: int, queries: int, slots: int) -> int:
    """Heads of cuDNN's mask. One where it will be cut: several are not cut as the queries' are."""
    return heads if sharding.is_whole() and queries * slots <= MASK_OF_HEADS else 1


def _in_blocks(attend: Callable, q_BTHK, k_BSJK, v_BSJV, places: Places, rows: int) -> jax.Array:
    """The same, `rows` queries after the other, whose logits the backward pass computes anew."""
    length = q_BTHK.shape[1]
    count = -(-length // rows)

    def cut(x_BT):
        """Blocks in front; those beyond the last token are no queries, or see what they like."""
        if x_BT is None:
            return None
        missing = [(0, 0), (0, count * rows - length), *[(0, 0)] * (x_BT.ndim - 2)]
        x_BCR = jnp.pad(x_BT, missing).reshape(x_BT.shape[0], count, rows, *x_BT.shape[2:])
        return jnp.moveaxis(x_BCR, 1, 0)

    # Wide, so that the blocks' parts of their gradients are summed unrounded.
    acc = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    wide = k_BSJK.astype(acc), v_BSJV.astype(acc)

    @jax.checkpoint
    def block(queries, wide):
        q_BRHK, document_BR, valid_BR, place_BR = queries
        here = places._replace(q_document_BT=document_BR, q_valid_BT=valid_BR, q_place_BT=place_BR)
        return attend(q_BRHK, *(x.astype(q_BRHK.dtype) for x in wide), here)

    asks = (q_BTHK, places.q_document_BT, places.q_valid_BT, places.q_place_BT)
    o_CBRHV = jax.lax.map(lambda queries: block(queries, wide), jax.tree.map(cut, asks))
    o_BTHV = jnp.moveaxis(o_CBRHV, 0, 1).reshape(q_BTHK.shape[0], count * rows, *o_CBRHV.shape[3:])
    return o_BTHV[:, :length]


def _without_mask_if_whole(attend, masked, q, k, v, places: Any, segment_ids) -> jax.Array:
    """Where all rows turn out to be one document each, the mask says nothing and costs much.

    Which it is shows at run time. Checkpointed, for a `cond` keeps the residuals of both branches.
    """
    whole = _all_whole(segment_ids)

    @jax.checkpoint
    def choose(places, *tensors):
        return jax.lax.cond(
            whole, lambda *x: attend(*x, None), lambda *x: masked(*x, places), *tensors
        )

    return choose(places, q, k, v)


@jax.custom_batching.custom_vmap
def _all_whole(segment_ids: jax.Array) -> jax.Array:
    """Whether each row is one document without padding."""
    return jnp.all((segment_ids != 0) & (segment_ids == segment_ids[:, :1]))


@_all_whole.def_vmap
def _all_whole_of_members(size, batched, segment_ids):
    """One answer for all members of a `vmap`, or its `cond` would run both branches."""
    return _all_whole(segment_ids.reshape(-1, segment_ids.shape[-1])), False


def _attend(q, k, v, places: Places | None, *, scale, window, logit_cap, backend) -> jax.Array:
    """`softmax_attention` of tensors of one dtype; `places` None: plain causal."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    mask_B1TS = sees_BT = None
    if places is not None:
        mask_BTS = _visible(places, window)
        mask_B1TS = mask_BTS[:, None]
        if backend == "cudnn":
            heads = _mask_heads(q.shape[2], *mask_BTS.shape[1:])
            mask_B1TS = jnp.broadcast_to(mask_B1TS, (q.shape[0], heads, *mask_BTS.shape[1:]))
        sees_BT = jnp.any(mask_BTS, axis=2)
        q = segments.select_real(q, sees_BT)
        k, v = (segments.select_real(x, places.filled_BS) for x in (k, v))

    if logit_cap is not None and mask_B1TS is not None:
        o_BTHV = _capped(q, k, v, mask_B1TS, scale, logit_cap)
    else:
        # dot_product_attention wants one head dim: zero channels change neither logits nor output.
        width = max(key_dim, value_dim)
        o = jax.nn.dot_product_attention(
            *(_widen(x, width) for x in (q, k, v)),
            mask=mask_B1TS,
            scale=scale,
            is_causal=places is None,
            local_window_size=(window - 1, 0) if places is None and window is not None else None,
            implementation=backend,
        )
        o_BTHV = o[..., :value_dim]
    return o_BTHV if sees_BT is None else segments.select_real(o_BTHV, sees_BT)


def _capped(q_BTHK, k_BSJK, v_BSJV, mask_B1TS, scale, cap: float) -> jax.Array:
    """Attention with bent logits, in float32 or wider; queries that see nothing give anything."""
    acc = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    (batch, length, heads, key_dim), kv_heads = q_BTHK.shape, k_BSJK.shape[2]
    q_BTJRK = q_BTHK.reshape(batch, length, kv_heads, heads // kv_heads, key_dim)
    logits_BJRTS = jnp.einsum("btjrk,bsjk->bjrts", q_BTJRK, k_BSJK, preferred_element_type=acc)
    logits_BJRTS = cap * jnp.tanh(scale / cap * logits_BJRTS)
    # Finite, so that a row without a single key has no NaN in its gradient.
    logits_BJRTS = jnp.where(mask_B1TS[:, :, None], logits_BJRTS, jnp.finfo(acc).min)
    weights_BJRTS = jax.nn.softmax(logits_BJRTS, axis=-1).astype(v_BSJV.dtype)
    o_BTJRV = jnp.einsum("bjrts,bsjv->btjrv", weights_BJRTS, v_BSJV, preferred_element_type=acc)
    return o_BTJRV.reshape(batch, length, heads, -1)


def _find_places(shape, segment_ids, kv_segment_ids, q_positions, kv_positions) -> Places:
    batch, length, slots = shape
    q_document_BT = kv_document_BS = None
    q_valid_BT = jnp.ones((batch, length), bool)
    filled_BS = jnp.ones((batch, slots), bool)
    q_place_BT, kv_place_BS = q_positions, kv_positions
    if segment_ids is not None and kv_segment_ids is None:
        q_document_BT, q_valid_BT = segments.find_documents(segment_ids)
        kv_document_BS, filled_BS = q_document_BT, q_valid_BT
        if q_positions is None and kv_positions is None:
            # Padding takes up no position, or it would use up room in a window.
            q_place_BT = kv_place_BS = jnp.cumsum(q_valid_BT, axis=1, dtype=jnp.int32)
    elif kv_segment_ids is not None:
        filled_BS = kv_segment_ids != 0
        if segment_ids is not None:
            q_valid_BT = segment_ids != 0
            q_document_BT, kv_document_BS = segment_ids, kv_segment_ids

    def default_place(size):
        return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None, :], (batch, size))

    q_place_BT = default_place(length) if q_place_BT is None else q_place_BT
    kv_place_BS = default_place(slots) if kv_place_BS is None else kv_place_BS
    return Places(q_document_BT, kv_document_BS, q_valid_BT, filled_BS, q_place_BT, kv_place_BS)


def _visible(places: Places, window: int | None) -> jax.Array:
    """Which keys each query sees [B, T, S]."""
    back_BTS = places.q_place_BT[:, :, None] - places.kv_place_BS[:, None, :]
    mask_BTS = (back_BTS >= 0) & places.q_valid_BT[:, :, None] & places.filled_BS[:, None, :]
    if window is not None:
        mask_BTS &= back_BTS < window
    if places.q_document_BT is not None and places.kv_document_BS is not None:
        mask_BTS &= places.q_document_BT[:, :, None] == places.kv_document_BS[:, None, :]
    return mask_BTS


def _cudnn_takes(dtype, key_dim: int, value_dim: int) -> bool:
    return (
        jax.default_backend() == "gpu"
        and dtype in (jnp.bfloat16, jnp.float16)
        and key_dim == value_dim
        and key_dim % 8 == 0
        and key_dim <= (256 if on_hopper() else 128)
    )


def _widen(x: jax.Array, width: int) -> jax.Array:
    missing = width - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


def _check_inputs(q, k, v, window, segment_ids, kv_segment_ids, q_positions, kv_positions) -> None:
    name = "softmax_attention"
    for label, x in (("q", q), ("k", k), ("v", v)):
        check(
            x.ndim == 4 and jnp.issubdtype(x.dtype, jnp.floating),
            f"{name}: {label} must be a floating-point array [B, T, heads, dim], "
            f"got {x.dtype} of shape {x.shape}",
        )
    batch, length, heads, key_dim = q.shape
    _, slots, kv_heads, _ = k.shape
    check(key_dim > 0, f"{name}: q must be [B, T, H, K] with K >= 1, got {q.shape}")
    check(
        k.shape == (batch, slots, kv_heads, key_dim),
        f"{name}: k must be [B, S, J, K] with B = {batch} and K = {key_dim} as in q, got {k.shape}",
    )
    check(
        v.shape[:3] == k.shape[:3],
        f"{name}: v must be [B, S, J, V] with [B, S, J] = {k.shape[:3]} as in k, got {v.shape}",
    )
    check(
        kv_heads > 0 and heads % kv_heads == 0,
        f"{name}: {heads} query heads are no multiple of {kv_heads} key heads",
    )
    check(
        window is None or (isinstance(window, int | np.integer) and int(window) >= 1),
        f"{name}: window counts the current token and must be an integer of at least 1, "
        f"got {window}",
    )
    check(
        segment_ids is None or kv_segment_ids is not None or slots == length,
        f"{name}: with {length} queries and {slots} keys, segment_ids need kv_segment_ids beside",
    )
    check_segments(name, segment_ids, (batch, length))
    check_segments(name, kv_segment_ids, (batch, slots), "kv_segment_ids", "[B, S]")
    for label, x, shape in (
        ("q_positions", q_positions, (batch, length)),
        ("kv_positions", kv_positions, (batch, slots)),
    ):
        check(
            x is None or (x.shape == shape and jnp.issubdtype(x.dtype, jnp.integer)),
            f"{name}: {label} must be integers of shape {shape}, "
            f"got {None if x is None else (x.dtype, x.shape)}",
        )

"""Short causal depthwise convolution, the local mixing in front of the recurrent rules.

Shapes: B batch, T tokens, D channels, W taps, X = W - 1 cached inputs, E = X + T.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fastweights import sharding
from fastweights.errors import check
from fastweights.ops import kernels, segments
from fastweights.ops.checks import check_segments
from fastweights.ops.features import normalize_heads
from fastweights.ops.mosaic_gpu import support as gpu
from fastweights.ops.mosaic_tpu import support as tpu
from fastweights.ops.weights import sum_tokens


def short_convolution(
    x_BTD: jax.Array,
    w_WD: jax.Array,
    bias_D: jax.Array | None = None,
    *,
    cache: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    activation: str | None = "silu",
    unit_heads: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Sums the last W inputs of each channel: y_t = act(bias + sum_i w_i * x_(t - X + i)).

    The last tap multiplies the current token; inputs before a document's start count as zero. Sums
    are in float32 or wider.

    Args:
      x_BTD: inputs.
      w_WD: taps, oldest first.
      bias_D: added before the activation; None for none.
      cache: [B, X, D], the last X real inputs of the document that this call continues, oldest
        first and zeros before its start. With segment_ids too, padding inside the row is skipped
        over, as it would be token by token.
      segment_ids: int [B, T], 0 = padding (its output is 0). Without a cache, padding inside a
        document counts as a zero input that takes up its place.
      activation: "silu" or None.
      unit_heads: scale each so many channels of y to unit length (`l2_normalize`); 0 for none.

    Returns:
      (y_BTD in x's dtype, cache_BXD in x's dtype holding the last X real inputs of the last
      document).

    Raises:
      UserError: on shapes that do not fit, segment_ids that are negative or no integers, or an
        unknown activation.
    """
    _check_inputs(x_BTD, w_WD, bias_D, cache, segment_ids, activation, unit_heads)
    batch, length, channels = x_BTD.shape
    reach = w_WD.shape[0] - 1
    if length == 0:
        empty = jnp.zeros((batch, reach, channels), x_BTD.dtype)
        return x_BTD, empty if cache is None else cache.astype(x_BTD.dtype)
    form = activation, unit_heads
    cut = cache is None and sharding.cuts_tokens(length)
    if segment_ids is None:
        if cut:
            y_BTD = _on_slices((x_BTD, w_WD, bias_D, None), *form)
        else:
            y_BTD = _outputs(x_BTD, cache, w_WD, bias_D, None, None, *form)
        return y_BTD, _prepend(cache, x_BTD, reach)[:, length:]

    index_BT, valid_BT = segments.find_documents(segment_ids)
    # Real tokens first, in order. Needed for the cache of the last real inputs, and with a cache
    # for the sums too: a padding token must not push the cached inputs out of reach.
    order_BT = jnp.argsort(~valid_BT, axis=1, stable=True)
    real_BTD = segments.select_real(x_BTD, valid_BT)
    compact_BTD = jnp.take_along_axis(real_BTD, order_BT[:, :, None], axis=1)
    compact_index_BT = jnp.take_along_axis(index_BT, order_BT, axis=1)

    if cut:
        y_BTD = _on_slices((x_BTD, w_WD, bias_D, segment_ids), *form)
    elif cache is None:
        y_BTD = _outputs(x_BTD, None, w_WD, bias_D, index_BT, valid_BT, *form)
    else:
        y_BTD = _outputs(compact_BTD, cache, w_WD, bias_D, compact_index_BT, None, *form)
        place_BT = jnp.argsort(order_BT, axis=1)
        y_BTD = jnp.take_along_axis(y_BTD, place_BT[:, :, None], axis=1)
        y_BTD = segments.select_real(y_BTD, valid_BT)

    extended_BED = _prepend(cache, compact_BTD, reach)
    extended_index_BE = _prepend_index(compact_index_BT, reach)
    count_B1 = jnp.sum(valid_BT, axis=1, keepdims=True, dtype=jnp.int32)
    slot_BX = count_B1 + jnp.arange(reach, dtype=jnp.int32)[None, :]
    kept_BXD = jnp.take_along_axis(extended_BED, slot_BX[:, :, None], axis=1)
    same_BX = jnp.take_along_axis(extended_index_BE, slot_BX, axis=1) == index_BT[:, -1:]
    return y_BTD, segments.select_real(kept_BXD, same_BX)


def _prepend(cache: jax.Array | None, x_BTD: jax.Array, reach: int) -> jax.Array:
    if cache is None:
        return jnp.pad(x_BTD, ((0, 0), (reach, 0), (0, 0)))
    return jnp.concatenate([cache.astype(x_BTD.dtype), x_BTD], axis=1)


def _on_slices(arrays, activation, unit_heads) -> jax.Array:
    """y of every token on a mesh whose devices hold slices of the rows."""
    from fastweights.ops import sequence_parallel  # it runs this op on them

    def run(x_BTD, w_WD, bias_D, segment_ids):
        form = dict(activation=activation, unit_heads=unit_heads)
        return (
            sequence_parallel.convolve(
                x_BTD, w_WD, bias_D, axis=sharding.SEQUENCE, segment_ids=segment_ids, **form
            ),
        )

    x_BTD, w_WD, bias_D, segment_ids = arrays
    channels = "heads" if _heads_are_whole(x_BTD.shape[2], unit_heads) else None
    tokens = ("batch", "tokens", channels)
    # Wide, as for the kernel below.
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), (w_WD, bias_D))
    axes = (tokens, (None, channels), (channels,), tokens[:2])
    return sharding.on_each_device(run, (x_BTD, *wide, segment_ids), axes, (tokens,))[0]


def _heads_are_whole(channels: int, unit_heads: int) -> bool:
    """Whether the devices' parts of the channels cut no head in two that is to be scaled."""
    return not unit_heads or sharding.part(channels, "heads") % unit_heads == 0


def _prepend_index(index_BT: Any, reach: int) -> Any:
    """The cached inputs are of document 0, which the call continues."""
    return None if index_BT is None else jnp.pad(index_BT, ((0, 0), (reach, 0)))


def _outputs(x_BTD, cache, w_WD, bias_D, index_BT, valid_BT, activation, unit_heads) -> jax.Array:
    """y of every token, in x's dtype; 0 at padding. None for one document or no padding, and
    `valid_BT` is for calls without a cache."""
    reach = w_WD.shape[0] - 1
    on_tpu = tpu.on_tpu()
    support = tpu if on_tpu else gpu
    reason = support.convolution_obstacle(x_BTD, w_WD)
    worth_it = (on_tpu or gpu.on_hopper()) and x_BTD.shape[1] >= support.CONVOLVED_TOKENS
    if reason is None and worth_it:
        # Pallas takes a while to import.
        if on_tpu:
            from fastweights.ops.mosaic_tpu import convolution
        else:
            from fastweights.ops.mosaic_gpu import convolution

        whole_BED, index_BE = x_BTD, index_BT
        if cache is not None:
            whole_BED, index_BE = _prepend(cache, x_BTD, reach), _prepend_index(index_BT, reach)
        # A head that devices share, or that fills no block, is scaled behind the kernel.
        whole = _heads_are_whole(x_BTD.shape[2], unit_heads)
        unit = unit_heads if whole and unit_heads in support.BLOCKS else 0
        reach_BE = _reach(whole_BED.shape[:2], index_BE, valid_BT, reach)
        (y_BED,) = sharding.on_each_device(
            lambda *x: (convolution.short_convolution(*x, activation=activation, unit=unit),),
            # Wide, so that the devices' parts of their gradients are summed unrounded.
            (whole_BED, *jax.tree.map(lambda x: x.astype(jnp.float32), (w_WD, bias_D)), reach_BE),
            (("batch", None, "heads"), (None, "heads"), ("heads",), ("batch", None)),
            (("batch", None, "heads"),),
        )
        y_BTD = y_BED[:, -x_BTD.shape[1] :]
        return y_BTD if unit else normalize_heads(y_BTD, unit_heads)
    if worth_it:
        kernels.say_once("short_convolution", reason)
    if valid_BT is not None:
        x_BTD = segments.select_real(x_BTD, valid_BT)
    extended_BED, index_BE = _prepend(cache, x_BTD, reach), _prepend_index(index_BT, reach)
    y_BTD: Any = _weighted_sum(extended_BED, w_WD, bias_D, index_BE, activation)
    if valid_BT is not None:
        y_BTD = segments.select_real(y_BTD, valid_BT)
    return normalize_heads(y_BTD, unit_heads)


def _reach(shape, index_BT, valid_BT, farthest: int) -> jax.Array:
    """How many of the `farthest` tokens before it a token sees; -1 at padding."""
    position_BT = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    reach_BT = position_BT
    if index_BT is not None:
        before_BT = jnp.pad(index_BT[:, :-1], ((0, 0), (1, 0)))
        begins_BT = jnp.where(index_BT != before_BT, position_BT, 0)
        reach_BT = position_BT - jax.lax.cummax(begins_BT, axis=1)
    reach_BT = jnp.minimum(reach_BT, farthest)
    return reach_BT if valid_BT is None else jnp.where(valid_BT, reach_BT, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted_sum(extended_BED, w_WD, bias_D, index_BE, activation) -> Any:
    """Shifted copies times their taps; one fused loop, since XLA never stores the copies."""
    y_BTD = _activated(_sum_of_taps(extended_BED, w_WD, bias_D, index_BE), activation)
    y_BTD = y_BTD.astype(extended_BED.dtype)
    # As it leaves: fused with what comes behind, all taps would be computed again for each use.
    # Of one token that is less work than to start another kernel.
    return y_BTD if y_BTD.shape[1] == 1 else jax.lax.optimization_barrier(y_BTD)


def _weighted_sum_forward(extended_BED, w_WD, bias_D, index_BE, activation):
    kept = (extended_BED, w_WD, bias_D, index_BE)
    return _weighted_sum(*kept, activation), kept


def _weighted_sum_backward(activation, kept, dy_BTD):
    """Keeps the input alone. The barrier parts the three passes over the tokens: fused, each of
    the sums over tokens would compute the activation anew, with most of a GPU idle."""
    extended_BED, w_WD, bias_D, index_BE = kept
    sums_BTD, pull = jax.vjp(
        lambda z: _activated(z, activation), _sum_of_taps(extended_BED, w_WD, bias_D, index_BE)
    )
    (dsums_BTD,) = pull(dy_BTD.astype(sums_BTD.dtype))
    dsums_BTD = jax.lax.optimization_barrier(dsums_BTD.astype(dy_BTD.dtype))
    acc = sums_BTD.dtype
    taps, length = w_WD.shape[0], dsums_BTD.shape[1]
    dextended, dw = jnp.zeros(extended_BED.shape, acc), []
    for i in range(taps):
        same_BT = _same_document(index_BE, i, taps)
        part_BTD = _selected(dsums_BTD.astype(acc), same_BT)
        dw.append(sum_tokens(part_BTD * extended_BED[:, i : i + length].astype(acc)))
        after = ((0, 0), (i, taps - 1 - i), (0, 0))
        dextended = dextended + jnp.pad(part_BTD * w_WD[i][None, None].astype(acc), after)
    dbias_D = None if bias_D is None else sum_tokens(dsums_BTD.astype(acc)).astype(bias_D.dtype)
    return dextended.astype(extended_BED.dtype), jnp.stack(dw).astype(w_WD.dtype), dbias_D, None


_weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)


def _same_document(index_BE, i: int, taps: int):
    """Whether a token's document is that of the input that tap i weighs."""
    if index_BE is None or i == taps - 1:
        return None
    length = index_BE.shape[1] - taps + 1
    return index_BE[:, i : i + length] == index_BE[:, taps - 1 :]


def _selected(x_BTD, same_BT):
    return x_BTD if same_BT is None else segments.select_real(x_BTD, same_BT)


def _sum_of_taps(extended_BED, w_WD, bias_D, index_BE) -> jax.Array:
    taps = w_WD.shape[0]
    length = extended_BED.shape[1] - taps + 1
    acc = jnp.promote_types(jnp.promote_types(extended_BED.dtype, w_WD.dtype), jnp.float32)
    terms = []
    for i in range(taps):
        tap_BTD = extended_BED[:, i : i + length].astype(acc)
        tap_BTD = _selected(tap_BTD, _same_document(index_BE, i, taps))
        terms.append(tap_BTD * w_WD[i][None, None].astype(acc))
    if bias_D is not None:
        terms.append(bias_D[None, None].astype(acc))
    return sum(terms[1:], terms[0])


def _activated(x: jax.Array, activation: str | None) -> jax.Array:
    return jax.nn.silu(x) if activation == "silu" else x


def _check_inputs(x_BTD, w_WD, bias_D, cache, segment_ids, activation, unit_heads) -> None:
    name = "short_convolution"
    check(x_BTD.ndim == 3, f"{name}: x must be [B, T, D], got shape {x_BTD.shape}")
    batch, length, channels = x_BTD.shape
    check(
        w_WD.ndim == 2 and w_WD.shape[0] >= 1 and w_WD.shape[1] == channels,
        f"{name}: w must be [W, D] with W >= 1 and D = {channels}, got shape {w_WD.shape}",
    )
    check(
        bias_D is None or bias_D.shape == (channels,),
        f"{name}: bias must be [D] = {(channels,)}, got {None if bias_D is None else bias_D.shape}",
    )
    reach = w_WD.shape[0] - 1
    check(
        cache is None or cache.shape == (batch, reach, channels),
        f"{name}: cache must be [B, W - 1, D] = {(batch, reach, channels)}, "
        f"got {None if cache is None else cache.shape}",
    )
    check_segments(name, segment_ids, (batch, length))
    check(
        not unit_heads or channels % unit_heads == 0,
        f"{name}: unit_heads must divide the {channels} channels, got {unit_heads}",
    )
    check(
        activation in (None, "silu"),
        f"{name}: activation must be 'silu' or None, got {activation!r}",
    )

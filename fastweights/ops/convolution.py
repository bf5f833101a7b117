"""Short causal depthwise convolution, the local mixing in front of the recurrent rules.

Shapes: B batch, T tokens, D channels, W taps, X = W - 1 cached inputs, E = X + T.
"""

import jax
import jax.numpy as jnp

from fastweights.errors import check
from fastweights.ops import segments
from fastweights.ops.checks import check_segments
from fastweights.ops.weights import spread


def short_convolution(
    x_BTD: jax.Array,
    w_WD: jax.Array,
    bias_D: jax.Array | None = None,
    *,
    cache: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    activation: str | None = "silu",
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

    Returns:
      (y_BTD in x's dtype, cache_BXD in x's dtype holding the last X real inputs of the last
      document).

    Raises:
      UserError: on shapes that do not fit, segment_ids that are negative or no integers, or an
        unknown activation.
    """
    _check_inputs(x_BTD, w_WD, bias_D, cache, segment_ids, activation)
    batch, length, channels = x_BTD.shape
    reach = w_WD.shape[0] - 1
    if length == 0:
        empty = jnp.zeros((batch, reach, channels), x_BTD.dtype)
        return x_BTD, empty if cache is None else cache.astype(x_BTD.dtype)
    if segment_ids is None:
        extended_BED = _prepend(cache, x_BTD, reach)
        y_BTD = _weighted_sum(extended_BED, w_WD, bias_D, None, activation)
        return y_BTD.astype(x_BTD.dtype), extended_BED[:, length:]

    index_BT, valid_BT = segments.find_documents(segment_ids)
    x_BTD = segments.select_real(x_BTD, valid_BT)
    # Real tokens first, in order. Needed for the cache of the last real inputs, and with a cache
    # for the sums too: a padding token must not push the cached inputs out of reach.
    order_BT = jnp.argsort(~valid_BT, axis=1, stable=True)
    compact_BTD = jnp.take_along_axis(x_BTD, order_BT[:, :, None], axis=1)
    compact_index_BT = jnp.take_along_axis(index_BT, order_BT, axis=1)
    extended_BED = _prepend(cache, compact_BTD, reach)
    extended_index_BE = jnp.pad(compact_index_BT, ((0, 0), (reach, 0)))

    if cache is None:
        y_BTD = _weighted_sum(
            _prepend(None, x_BTD, reach),
            w_WD,
            bias_D,
            jnp.pad(index_BT, ((0, 0), (reach, 0))),
            activation,
        )
    else:
        y_BTD = _weighted_sum(extended_BED, w_WD, bias_D, extended_index_BE, activation)
        place_BT = jnp.argsort(order_BT, axis=1)
        y_BTD = jnp.take_along_axis(y_BTD, place_BT[:, :, None], axis=1)
    y_BTD = segments.select_real(y_BTD, valid_BT)

    count_B1 = jnp.sum(valid_BT, axis=1, keepdims=True, dtype=jnp.int32)
    slot_BX = count_B1 + jnp.arange(reach, dtype=jnp.int32)[None, :]
    kept_BXD = jnp.take_along_axis(extended_BED, slot_BX[:, :, None], axis=1)
    same_BX = jnp.take_along_axis(extended_index_BE, slot_BX, axis=1) == index_BT[:, -1:]
    return y_BTD.astype(x_BTD.dtype), segments.select_real(kept_BXD, same_BX)


def _prepend(cache: jax.Array | None, x_BTD: jax.Array, reach: int) -> jax.Array:
    if cache is None:
        return jnp.pad(x_BTD, ((0, 0), (reach, 0), (0, 0)))
    return jnp.concatenate([cache.astype(x_BTD.dtype), x_BTD], axis=1)


def _weighted_sum(extended_BED, w_WD, bias_D, index_BE, activation) -> jax.Array:
    """Shifted copies times their taps; one fused loop, since XLA never stores the copies."""
    taps = w_WD.shape[0]
    length = extended_BED.shape[1] - taps + 1
    acc = jnp.promote_types(jnp.promote_types(extended_BED.dtype, w_WD.dtype), jnp.float32)
    terms = []
    for i in range(taps):
        tap_BTD = extended_BED[:, i : i + length].astype(acc)
        if index_BE is not None and i < taps - 1:
            same_BT = index_BE[:, i : i + length] == index_BE[:, taps - 1 :]
            tap_BTD = segments.select_real(tap_BTD, same_BT)
        terms.append(tap_BTD * spread(w_WD[i].astype(acc), tap_BTD.shape))
    if bias_D is not None:
        terms.append(spread(bias_D.astype(acc), terms[0].shape))
    total = sum(terms[1:], terms[0])
    return jax.nn.silu(total) if activation == "silu" else total


def _check_inputs(x_BTD, w_WD, bias_D, cache, segment_ids, activation) -> None:
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
        activation in (None, "silu"),
        f"{name}: activation must be 'silu' or None, got {activation!r}",
    )

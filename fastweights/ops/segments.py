"""Packed rows: from segment ids to documents that no rule may mix.

A row holds documents one after another. Ids are positive and constant along a document; 0 is
padding and may stand anywhere. Padding takes no part in anything: it neither writes, decays nor
resets, so the document it stands in simply goes on behind it.

Shapes: B batch, T tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Documents(NamedTuple):
    """What the rules need to know of a packed row.

    Attributes:
      index_BT: int32, the number of the document a token belongs to. It starts at 0 with the
        document that continues the call's initial state and never falls; padding carries the
        number of the real token before it (0 where there is none).
      valid_BT: bool, False at padding.
    """

    index_BT: jax.Array
    valid_BT: jax.Array


def find_documents(segment_ids_BT: jax.Array) -> Documents:
    """Numbers the documents of packed rows.

    A document begins at a real token whose id differs from that of the real token before it, so an
    id that returns later in the row is a new document. A row's first real token begins nothing: it
    continues whatever state the call was given.

    Args:
      segment_ids_BT: integers [B, T], 0 for padding.

    Returns:
      `Documents`.
    """
    valid_BT = segment_ids_BT != 0
    position_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
    last_real_BT = jax.lax.cummax(jnp.where(valid_BT, position_BT, -1), axis=1)
    before_BT = jnp.pad(last_real_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    id_before_BT = jnp.take_along_axis(segment_ids_BT, jnp.maximum(before_BT, 0), axis=1)
    begins_BT = valid_BT & (before_BT >= 0) & (segment_ids_BT != id_before_BT)
    return Documents(jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32), valid_BT)


def last_of_document(segment_ids_BT: jax.Array) -> jax.Array:
    """int32 [B, T]: where the last real token of each token's document stands.

    Padding belongs to the document of the real token before it, or to the first one.
    """
    index_BT, valid_BT = find_documents(segment_ids_BT)
    place_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
    real_BT = jax.lax.cummax(jnp.where(valid_BT, place_BT, 0), axis=1)
    ends_BT = jnp.pad(index_BT[:, 1:] != index_BT[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    far = segment_ids_BT.shape[1]
    # The nearest end from here on, with the last real token up to there: both grow with the place.
    return jax.lax.cummin(jnp.where(ends_BT, real_BT, far), axis=1, reverse=True)


def select_real(x: jax.Array, valid_BT: jax.Array) -> jax.Array:
    """Puts zeros where there is padding, in the value and in the gradient.

    A select and not a product: padding may hold NaN, and 0 * NaN is NaN.

    Args:
      x: [B, T, ...].
      valid_BT: bool.
    """
    return jnp.where(valid_BT.reshape(valid_BT.shape + (1,) * (x.ndim - 2)), x, jnp.zeros_like(x))

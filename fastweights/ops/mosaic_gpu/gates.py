"""Decays and documents as the Hopper kernels read them, made by XLA before and undone after.

Shapes: B batch, T tokens, G value heads, N chunks, C = 64 tokens of a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastweights.ops.chunked import MIN_LOG_DECAY
from fastweights.ops.mosaic_gpu.tiles import CHUNK, LOG2_E


class Gates(NamedTuple):
    """The factors of `chunked.py`, of which the kernels form D from sum and start.

    Attributes:
      sum_BGNC: running sum of g within the chunk, in units of log 2.
      read_BGNC: a_i; its last entry is also the factor `keep` on the whole state.
      write_BGNC: b_j.
      start_BNC: int32, the place in the chunk where each token's document begins, 0 if before the
        chunk; None where each row is one document.
    """

    sum_BGNC: jax.Array
    read_BGNC: jax.Array
    write_BGNC: jax.Array
    start_BNC: jax.Array | None


def chunked(x_BTG: jax.Array) -> jax.Array:
    """[B, T, G] -> [B, G, N, C]."""
    batch, length, heads = x_BTG.shape
    return jnp.moveaxis(x_BTG.reshape(batch, length // CHUNK, CHUNK, heads), 3, 1)


def unchunked(x_BGNC: jax.Array) -> jax.Array:
    """Undoes `chunked`."""
    batch, heads = x_BGNC.shape[:2]
    return jnp.moveaxis(x_BGNC, 1, 3).reshape(batch, -1, heads)


def sums_so_far(x_BGNC: jax.Array, factor: float = 1.0, reverse: bool = False) -> jax.Array:
    """factor times the sum of each token of a chunk and those before it (`reverse`: behind it).

    A product in float32: on a GPU `jnp.cumsum` takes three kernels, and a masked sum is slow.
    """
    seen = np.tri(CHUNK) if reverse else np.tri(CHUNK).T
    factors = np.asarray(factor * seen, np.float32)
    return jnp.dot(x_BGNC, factors, precision=jax.lax.Precision.HIGHEST)


def make_gates(g_BTG: jax.Array, document_BT: jax.Array | None) -> Gates:
    """From log decays and document numbers (`segments.find_documents`); T a multiple of 64."""
    # Cut at e^-50, which is nothing: a far stronger gate would cost the milder ones behind it their
    # digits in the running sum. See `chunked.py`.
    g_BGNC = chunked(jnp.maximum(g_BTG.astype(jnp.float32), MIN_LOG_DECAY))
    # The barrier keeps both powers in one kernel, of the sums in this shape.
    sum_BGNC = jax.lax.optimization_barrier(sums_so_far(g_BGNC, LOG2_E))
    read, write = jnp.exp2(sum_BGNC), jnp.exp2(sum_BGNC[..., -1:] - sum_BGNC)
    if document_BT is None:
        return Gates(sum_BGNC, read, write, None)
    batch, length = document_BT.shape
    document_BNC = document_BT.reshape(batch, length // CHUNK, CHUNK)
    last_BN = document_BNC[..., -1]
    carried_BN = jnp.pad(last_BN[:, :-1], ((0, 0), (1, 0)))
    reads = (document_BNC == carried_BN[..., None])[:, None]
    writes = (document_BNC == last_BN[..., None])[:, None]
    begins_BNC = begins(document_BT).reshape(document_BNC.shape)
    place = jnp.arange(CHUNK, dtype=jnp.int32)[None, None]
    start_BNC = jax.lax.cummax(jnp.where(begins_BNC, place, 0), axis=2)
    return Gates(sum_BGNC, jnp.where(reads, read, 0.0), jnp.where(writes, write, 0.0), start_BNC)


def begins(document_BT: jax.Array) -> jax.Array:
    """Where a token is the first of its document, which its decay therefore does not reach."""
    return document_BT != jnp.pad(document_BT[:, :-1], ((0, 0), (1, 0)))

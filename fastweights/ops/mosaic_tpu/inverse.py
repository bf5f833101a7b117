"""Inverse of I + L for strictly lower triangular L, in registers, for several heads at once.

Diagonal blocks of 16 are substituted row by row in float32 on the vector unit: the blocks of 128
rows lie side by side in lanes, so one step serves them all. Neighbours then merge by products of
three passes: the inverse of [[A, 0], [B, D]] is [[A^-1, 0], [-D^-1 B A^-1, D^-1]]. No power series;
see `ops/triangular.py`.

Shapes: C chunk, Z = 16 block size, M = 128 lanes.
"""

import functools

import jax
import jax.numpy as jnp

from fastweights.ops.mosaic_tpu.blocks import F32, dot_split, each
from fastweights.ops.mosaic_tpu.support import LANES

BLOCK = 16


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _blocks_in_lanes(L_CM: jax.Array) -> jax.Array:
    """The diagonal blocks side by side, [Z, M]: each is in its lanes already."""
    size = L_CM.shape[0]
    block = _iota((BLOCK, LANES), 1) % size // BLOCK
    out = L_CM[:BLOCK]
    for i in range(1, size // BLOCK):
        out = jnp.where(block == i, L_CM[i * BLOCK : (i + 1) * BLOCK], out)
    return out


def _blocks_on_diagonal(X_ZM: jax.Array, size: int) -> jax.Array:
    """Undoes `_blocks_in_lanes`, with zeros elsewhere."""
    shape = (size, LANES)
    here = _iota(shape, 0) // BLOCK == _iota(shape, 1) % size // BLOCK
    return jnp.where(here, jnp.concatenate([X_ZM] * (size // BLOCK), axis=0), 0.0)


def _heads_on_diagonal(X_CM: jax.Array) -> jax.Array:
    """[M, M] with a pack's heads as blocks: a product with it is each head's own."""
    size = X_CM.shape[0]
    if size == LANES:
        return X_CM
    here = _iota((LANES, LANES), 0) // size == _iota((LANES, LANES), 1) // size
    return jnp.where(here, jnp.concatenate([X_CM] * (LANES // size), axis=0), 0.0)


def _substitute(packs: list[jax.Array]) -> list[jax.Array]:
    """Row by row, x_i = e_i - sum_(j < i) L_ij x_j: step j takes x_j's share from all rows below.

    Args:
      packs: [Z, M] each, blocks side by side.
    """
    half = BLOCK // 2
    shape = (half, LANES)
    lane = _iota(shape, 1)
    first = lane // BLOCK * BLOCK
    identity = [(lane % BLOCK == _iota(shape, 0) + rows).astype(F32) for rows in (0, half)]
    upper, lower = ([x] * len(packs) for x in identity)

    def column(L_8M, j):
        """L_ij for each block, in all its lanes."""
        return jnp.take_along_axis(L_8M, first + j, axis=1)

    for j in range(BLOCK - 1):
        rows = [x[j : j + 1] for x in upper] if j < half else [x[j - half :][:1] for x in lower]
        if j < half - 1:
            shares = each(lambda L, x, j=j: column(L[:half], j) * x, packs, rows)
            upper = each(jnp.subtract, upper, shares)
        shares = each(lambda L, x, j=j: column(L[half:], j) * x, packs, rows)
        lower = each(jnp.subtract, lower, shares)
    return each(lambda a, b: jnp.concatenate([a, b], axis=0), upper, lower)


def _odd_rows(X_CM: jax.Array, block: int) -> jax.Array:
    starts = range(block, X_CM.shape[0], 2 * block)
    return jnp.concatenate([X_CM[i : i + block] for i in starts], axis=0)


def _with_odd_rows(X_CM: jax.Array, odd: jax.Array, block: int) -> jax.Array:
    parts = []
    for i in range(0, odd.shape[0], block):
        parts += [X_CM[2 * i : 2 * i + block], odd[i : i + block]]
    return jnp.concatenate(parts, axis=0)


def unit_lower_inverses(Ls: list[jax.Array], *, wide: bool) -> list[jax.Array]:
    """(I + L)^-1 of each strictly lower triangular L [C, C], float32, C = 64 or 128.

    Two heads of 64 lie side by side in lanes throughout.
    """
    size = Ls[0].shape[0]
    together = LANES // size
    padded = Ls + [jnp.zeros_like(Ls[0])] * (-len(Ls) % together)
    starts = range(0, len(padded), together)
    packs = [jnp.concatenate(padded[i : i + together], axis=1) for i in starts]
    Xs = _substitute(each(_blocks_in_lanes, packs))
    Xs = [_blocks_on_diagonal(X, size) for X in Xs]
    dot = functools.partial(dot_split, wide=wide)
    row, lane = _iota((size, LANES), 0), _iota((size, LANES), 1) % size
    block = BLOCK
    while block < size:
        corner = (row // block % 2 == 1) & (lane // block == row // block - 1)
        below = [_heads_on_diagonal(jnp.where(corner, L, 0.0)) for L in packs]
        odd = [_odd_rows(X, block) for X in Xs]
        corners = each(dot, each(dot, odd, below), each(_heads_on_diagonal, Xs))
        odd = each(jnp.subtract, odd, corners)
        Xs = [_with_odd_rows(X, rows, block) for X, rows in zip(Xs, odd, strict=True)]
        block *= 2
    return [Xs[i // together][:, i % together * size :][:, :size] for i in range(len(Ls))]

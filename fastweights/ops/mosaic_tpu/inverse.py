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


def _blocks_in_lanes(L_CC: jax.Array) -> jax.Array:
    """The diagonal blocks side by side, [Z, C]: each is in its lanes already."""
    size = L_CC.shape[0]
    block = _iota((BLOCK, size), 1) // BLOCK
    out = L_CC[:BLOCK]
    for i in range(1, size // BLOCK):
        out = jnp.where(block == i, L_CC[i * BLOCK : (i + 1) * BLOCK], out)
    return out


def _blocks_on_diagonal(X_ZC: jax.Array) -> jax.Array:
    size = X_ZC.shape[1]
    here = _iota((size, size), 0) // BLOCK == _iota((size, size), 1) // BLOCK
    return jnp.where(here, jnp.concatenate([X_ZC] * (size // BLOCK), axis=0), 0.0)


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


def _odd_rows(X_CC: jax.Array, block: int) -> jax.Array:
    starts = range(block, X_CC.shape[0], 2 * block)
    return jnp.concatenate([X_CC[i : i + block] for i in starts], axis=0)


def _with_odd_rows(X_CC: jax.Array, odd: jax.Array, block: int) -> jax.Array:
    parts = []
    for i in range(0, odd.shape[0], block):
        parts += [X_CC[2 * i : 2 * i + block], odd[i : i + block]]
    return jnp.concatenate(parts, axis=0)


def unit_lower_inverses(Ls: list[jax.Array], *, wide: bool) -> list[jax.Array]:
    """(I + L)^-1 of each strictly lower triangular L [C, C], float32, C = 64 or 128."""
    size = Ls[0].shape[0]
    together = LANES // size
    blocks = each(_blocks_in_lanes, Ls)
    blocks += [jnp.zeros_like(blocks[0])] * (-len(Ls) % together)
    packs = [
        jnp.concatenate(blocks[i : i + together], axis=1) for i in range(0, len(blocks), together)
    ]
    packs = _substitute(packs)
    Xs = [packs[i // together][:, i % together * size :][:, :size] for i in range(len(Ls))]
    Xs = each(_blocks_on_diagonal, Xs)
    dot = functools.partial(dot_split, wide=wide)
    row, lane = _iota((size, size), 0), _iota((size, size), 1)
    block = BLOCK
    while block < size:
        corner = (row // block % 2 == 1) & (lane // block == row // block - 1)
        odd = [_odd_rows(X, block) for X in Xs]
        right = each(lambda X, L, c=corner: dot(X, jnp.where(c, L, 0.0)), odd, Ls)
        corners = each(dot, right, Xs)
        Xs = [_with_odd_rows(X, o - c, block) for X, o, c in zip(Xs, odd, corners, strict=True)]
        block *= 2
    return Xs

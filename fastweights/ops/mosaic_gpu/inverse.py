"""First kernel: the gated inverse of every chunk, all chunks side by side.

    A = ((I + strictly_lower(diag(beta) K K^T))^-1 * D) diag(beta),   D_ij = e^(G_i - G_j)

with D masked to j <= i of the same document (`chunked.py` has the algebra). The two diagonal blocks
of 32 x 32 are inverted by substitution in float32, the block below them by two products,

    X21 = -X22 L21 X11,

of operands split into two bfloat16 numbers (three products each): operands rounded once would cost
two digits on similar keys, and all of them for beta near 2.

A is stored in bfloat16, which on its own would cost most of the accuracy that is lost on similar
keys: there A maps nearly equal rows to nearly nothing, and its rounding does not. So what a column
lost is given back to one of its entries, `BAND` rows below the diagonal, where entries are small
and so finely spaced; but not in a row of far smaller beta, whose entries are all small. (Emulated
at cosine 0.99, beta 0.95, no decay: the error of the final state falls from 1.2e-2 to 4.9e-3, that
of dv from 1.6e-2 to 6.9e-3.)

Blocks are persistent: their independent warpgroups walk over the chunks, heads
fastest, and fetch the next keys as soon as K K^T is done.

Shapes: B batch, T tokens, H query/key heads, G value heads, N chunks, C = 64 tokens of a chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from fastweights.ops.mosaic_gpu import substitution
from fastweights.ops.mosaic_gpu.gates import Gates
from fastweights.ops.mosaic_gpu.tiles import (
    BF16,
    CHUNK,
    F32,
    MULTIPROCESSORS,
    along_columns,
    along_rows,
    call,
    digits,
    fence_reads,
    hidden_zero,
    in_layout,
    indices,
    is_wide,
    issue,
    loop,
    multiply,
    plgpu,
    power,
    read,
    slot,
    split,
    tile,
    transposed,
    with_sums,
)

HALF = CHUNK // 2
BAND = 4


@functools.partial(jax.jit, static_argnames=("simulate",))
def gated_inverse(
    k_BTHK: jax.Array, gates: Gates, *, simulate: bool
) -> tuple[jax.Array, jax.Array]:
    """See the module docstring.

    Args:
      k_BTHK: bfloat16, T a multiple of 64, K of 64.
      gates: of the same chunks, with beta.
      simulate: run in Pallas' simulator.

    Returns:
      A_BGNCC in bfloat16, and beta |k|^2 of each token, [B, G, N, C] in float32: where it is above
      2 the token's transition stretches the state.
    """
    batch, _, heads, key_dim = k_BTHK.shape
    value_heads, chunks = gates.sum_BGNC.shape[1:3]
    group = value_heads // heads
    packed = gates.start_BNC is not None
    total = batch * value_heads * chunks
    # At 128 registers a thread four fill a multiprocessor; for wide keys shared memory has three.
    warpgroups = 3 if is_wide(key_dim) else 4
    blocks = min(MULTIPROCESSORS, -(-total // warpgroups))
    stride = blocks * warpgroups
    shape = (CHUNK, HALF)
    lower_half, upper_half = pl.ds(HALF, HALF), pl.ds(0, HALF)

    def body(block, me, operands, results, scratch):
        k_ref, sum_ref, beta_ref, *start_ref = operands
        A_ref, stretch_ref = results
        *tiles, rows_all, columns_all, starts_all, barriers = scratch
        keys_all = tiles[0]
        barrier = barriers.at[me]
        first = block * warpgroups + me
        count = jax.lax.div(jnp.int32(total - 1 + stride) - first, jnp.int32(stride))

        def place(i):
            b, n, h = digits(first + i * stride, batch, chunks, value_heads)
            return b, h, n

        def fetch(i):
            b, h, n = place(i)
            here = slot(i, 2)
            rows = pl.ds(n * CHUNK, CHUNK)
            copy = plgpu.copy_gmem_to_smem
            copy(k_ref.at[b, rows, jax.lax.div(h, jnp.int32(group))], keys_all.at[me], barrier)
            for j, ref in enumerate((sum_ref, beta_ref)):
                copy(ref.at[b, h, n], rows_all.at[me, here, j], barrier)
                copy(ref.at[b, h, n], columns_all.at[me, here, j], barrier)
            if packed:
                copy(start_ref[0].at[b, n], starts_all.at[me, here], barrier)

        pl.when(count > 0)(lambda: fetch(jnp.int32(0)))

        @loop(0, count)
        def _(i):
            b, h, n = place(i)
            here = slot(i, 2)
            plgpu.barrier_wait(barrier)
            zero = hidden_zero(simulate)
            keys, columns, X_high, X_low, L_high, L_low = (x.at[me + zero] for x in tiles)

            def row_vector(j):
                return along_rows(rows_all.at[me, here, j], shape)

            def column_vector(j, half):
                return along_columns(columns_all.at[me, here, j, pl.ds(half * HALF, HALF)], shape)

            row, column = indices(shape, zero)
            top = row < HALF
            row_in_half = jnp.where(top, row, row - HALF)

            def grams(left, right):
                issue(left, keys, transposed(keys.at[upper_half]))
                issue(right, keys, transposed(keys.at[lower_half]))
                return read(left), read(right)

            gram_left, gram_right = with_sums(grams, [shape, shape], simulate)
            fence_reads(simulate)
            pl.when(i + 1 < count)(lambda: fetch(i + 1))
            diagonal = jnp.where(
                top, gram_left * column_vector(1, 0), gram_right * column_vector(1, 1)
            )
            upper = in_layout(jnp.where(column > row_in_half, diagonal, 0.0))
            lengths = in_layout(jnp.where(column == row_in_half, diagonal, 0.0))
            stretch_ref.at[b, h, n][...] = jnp.sum(lengths, axis=1)
            # The last chunk's A has left the buffers.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # -L. With the sign at the product's end LLVM negates sums that are still under way.
            L_high[...], L_low[...] = split(in_layout(gram_left * -row_vector(1)))
            if simulate:
                X = substitution.reference(upper)
            else:
                X = substitution.invert_blocks(upper, columns, slot(me + i, 4))
            X = in_layout(X)
            high, low = split(X)
            X_high[...], X_low[...] = high, low
            plgpu.commit_smem()
            L21_high, L21_low = L_high.at[lower_half], L_low.at[lower_half]
            terms = [(high, L21_high), (low, L21_high), (high, L21_low)]
            high, low = split(multiply(terms, shape, simulate))  # rows 32 to 63: -X22 L21

            # Anew: kept from above, the numbers would take registers across the substitution.
            zero = hidden_zero(simulate)
            b, h, n = place(i + zero)
            here = here + zero
            X_high, X_low, L_high, L_low = (x.at[me + zero] for x in tiles[2:])
            row, column = indices(shape, zero)
            top = row < HALF
            reach = column <= jnp.where(top, row, row - HALF)

            def decay(mask, half):
                if packed:
                    start = along_rows(starts_all.at[me, here], shape)
                    mask = mask & (column + half * HALF >= start)
                return power(mask, row_vector(0) - column_vector(0, half))

            # Each half in bfloat16, and what that left out.
            right = split(X * (decay(reach & (row >= HALF), 1) * column_vector(1, 1)))
            X11_high, X11_low = X_high.at[upper_half], X_low.at[upper_half]
            terms = [(high, X11_high), (low, X11_high), (high, X11_low)]
            X = jnp.where(top, X, multiply(terms, shape, simulate))
            left = split(X * (decay(reach | (row >= HALF), 0) * column_vector(1, 0)))
            fence_reads(simulate)
            plgpu.commit_smem()  # all warps are done with the tiles
            X_high[...], X_low[...] = in_layout(left[1]), in_layout(right[1])
            plgpu.commit_smem()

            # Column sums by a product with ones: Pallas' own sums over rows share one buffer a
            # block.
            square = (CHUNK, CHUNK)
            ones = in_layout((indices(square, hidden_zero(simulate))[0] >= 0).astype(BF16))
            tiles_of_halves = ((left[0], X_high, L_high), (right[0], X_low, L_low))
            for half, (kept, left_out, target) in enumerate(tiles_of_halves):
                missing = multiply([(ones, left_out)], shape, simulate)
                kept = kept.astype(F32)
                near = (row == column + (half * HALF + BAND)) & (kept != 0)
                near = near & (row_vector(1) >= 0.5 * column_vector(1, half))
                target[...] = in_layout(jnp.where(near, kept + missing, kept)).astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(L_high, A_ref.at[b, h, n, :, upper_half])
            plgpu.copy_smem_to_gmem(L_low, A_ref.at[b, h, n, :, lower_half])

        plgpu.wait_smem_to_gmem(0)

    half = tile(warpgroups, CHUNK, HALF, width=HALF)
    scratch = [
        tile(warpgroups, CHUNK, key_dim),
        plgpu.SMEM((warpgroups, substitution.SCRATCH), F32),
        half,
        half,
        half,
        half,
        plgpu.SMEM((warpgroups, 2, 2, CHUNK), F32),
        plgpu.SMEM((warpgroups, 2, 2, CHUNK), F32),
        plgpu.SMEM((warpgroups, 2, CHUNK), jnp.int32),
        plgpu.Barrier(num_arrivals=6 if packed else 5, num_barriers=warpgroups),
    ]
    operands: list[Any] = [k_BTHK, gates.sum_BGNC, gates.beta_BGNC]
    if gates.start_BNC is not None:
        operands.append(gates.start_BNC)
    return call(
        body,
        operands,
        name="gated_inverse",
        out_type=(
            jax.ShapeDtypeStruct((batch, value_heads, chunks, CHUNK, CHUNK), BF16),
            jax.ShapeDtypeStruct(gates.sum_BGNC.shape, F32),
        ),
        blocks=blocks,
        threads=warpgroups,
        scratch=scratch,
        simulate=simulate,
        guard_stores=False,
    )

"""Fourth kernel: the gradients inside each chunk, all chunks side by side.

With dV (of the third kernel), the state S before the chunk and the gradient dS behind it,

    p   = scale <dO, U>                    row by row, what a token reads of itself
    dP  = scale strictly_lower(dO U^T) * D
    E   = -strictly_lower(dV U^T) * D
    dq  = scale diag(a) dO S^T + dP K      and p k beside it
    e   = E K - diag(a) dV S^T             (what k gets as the key that is looked up, beta in it)
    dk  = dP^T Q + E^T K                   and e, p q and diag(b) U dS^T beside it
    w   = <k, b (U dS^T)>                  row by row, as is
    r   = <q, dq> + <k, e - dk>
    dg_t = sum_{i>=t} r_i + sum_{i<t} w_i + c <S, dS>
    dbeta = <dV, U> / beta^2

(E in place of the inverse's derivative is the form of MaxText's gated delta kernels; dbeta follows
because dV = beta u and U holds one beta, so that neither v nor the inverse is needed here.) Without
delta the terms with E, e and dbeta go. No decay comes between a token's write and its own read or
what is behind it: under strong decay these terms are larger than all of dg, which therefore may not
be found by taking them from a sum. Its sums are in float32, from dq and dk before they are rounded.

A unit of work is a chunk times 64 columns of K, on one warpgroup; two blocks share a multiprocessor
and hide each other's waiting. Blocks are persistent and refill each tile as soon as its last reader
is done with it.

Shapes: B batch, T tokens, H query/key heads, G value heads, N chunks of C = 64 tokens, J = K / 64.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from fastweights.ops.mosaic_gpu.gates import Gates
from fastweights.ops.mosaic_gpu.tiles import (
    BF16,
    CHUNK,
    COLUMN,
    F32,
    MATRIX,
    MULTIPROCESSORS,
    ROW,
    along_rows,
    call,
    continue_sums,
    digits,
    fence_reads,
    hidden_zero,
    in_layout,
    indices,
    issue,
    loop,
    plgpu,
    power,
    read,
    tile,
    transposed,
    with_sums,
)

WIDTH = 64  # columns of K a unit, and rows of S^T a tile
SQUARE = (CHUNK, CHUNK)


class Local(NamedTuple):
    """Gradients of a chunk.

    Attributes:
      dq_BTGK, dk_BTGK: bfloat16, one for each value head.
      felt_JBGNC: float32; r is the sum over J.
      written_JBGNC: float32; w is the sum over J.
      kept_JBGNC: float32; c <S, dS> is the sum over J and C.
      dot_JBGNC: float32, <dV, U>, the same for each J; undefined without delta.
    """

    dq_BTGK: jax.Array
    dk_BTGK: jax.Array
    felt_JBGNC: jax.Array
    written_JBGNC: jax.Array
    kept_JBGNC: jax.Array
    dot_JBGNC: jax.Array


@functools.partial(jax.jit, static_argnames=("scale", "simulate"))
def local_gradients(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    do_BTGV: jax.Array,
    u_BTGV: jax.Array,
    dv_BTGV: jax.Array | None,
    states_BGNVK: jax.Array,
    dstates_BGNVK: jax.Array,
    gates: Gates,
    *,
    scale: float,
    simulate: bool,
) -> Local:
    """See the module docstring; all inputs but the gates are bfloat16, dv None without delta."""
    batch, length, heads, key_dim = k_BTHK.shape
    value_heads, value_dim = do_BTGV.shape[2:]
    chunks, group = length // CHUNK, value_heads // heads
    delta, packed = dv_BTGV is not None, gates.start_BNC is not None
    columns, parts = key_dim // WIDTH, value_dim // WIDTH
    total = batch * value_heads * chunks * columns
    blocks = min(total, MULTIPROCESSORS * (2 if parts <= 2 else 1))
    # dv's tiles are used again for the two operands of 64 x 64 that the masks make.
    spare = max(parts, 2 if delta else 1)

    def body(block, me, operands, results, scratch):
        del me
        q_ref, k_ref, do_ref, u_ref, S_ref, dS_ref, sum_ref, read_ref, write_ref, *rest = operands
        rest = list(rest)
        dv_ref: Any = rest.pop(0) if delta else None
        start_ref: Any = rest.pop(0) if packed else None
        dq_ref, dk_ref, felt_ref, written_ref, kept_ref, dot_ref = results
        queries, keys, dos, us, dvs, Ss, dSs, rows, cols, reads, writes, starts, *barriers = scratch
        wide_full, state_full, narrow_full = barriers

        def place(unit):
            b, h, n, j = digits(unit, batch, value_heads, chunks, columns)
            return b, h, n, j, pl.ds(n * CHUNK, CHUNK), pl.ds(j * WIDTH, WIDTH)

        copy = plgpu.copy_gmem_to_smem

        def fetch_wide(unit):
            b, h, n, _, tokens, mine = place(unit)
            for part in range(parts):
                of_part = pl.ds(part * WIDTH, WIDTH)
                copy(u_ref.at[b, tokens, h, of_part], us.at[part], wide_full)
                copy(do_ref.at[b, tokens, h, of_part], dos.at[part], wide_full)
            copy(sum_ref.at[b, h, n], rows, wide_full)
            copy(sum_ref.at[b, h, n], cols, wide_full)
            copy(read_ref.at[b, h, n], reads, wide_full)
            copy(write_ref.at[b, h, n], writes, wide_full)
            if packed:
                copy(start_ref.at[b, n], starts, wide_full)
            for part in range(parts):
                of_part = pl.ds(part * WIDTH, WIDTH)
                copy(S_ref.at[b, h, n, of_part, mine], Ss.at[part], state_full)
                copy(dS_ref.at[b, h, n, of_part, mine], dSs.at[part], state_full)

        def fetch_dv(unit):
            b, h, _, _, tokens, _ = place(unit)
            if delta:
                for part in range(parts):
                    of_part = pl.ds(part * WIDTH, WIDTH)
                    copy(dv_ref.at[b, tokens, h, of_part], dvs.at[part], wide_full)

        def fetch_narrow(unit):
            b, h, _, _, tokens, mine = place(unit)
            shared_head = jax.lax.div(h, jnp.int32(group))
            copy(k_ref.at[b, tokens, shared_head, mine], keys.at[0], narrow_full)
            copy(q_ref.at[b, tokens, shared_head, mine], queries.at[0], narrow_full)

        def compute(unit, more):
            b, h, n, j, tokens, mine = place(unit)

            def refill(fetch):
                fence_reads(simulate)
                pl.when(more)(lambda: fetch(unit + blocks))

            plgpu.barrier_wait(wide_full)
            zero = hidden_zero(simulate)
            keep = reads[CHUNK - 1 + zero]

            def at(tiles, part=0):
                return tiles.at[part + zero]

            query, key = at(queries), at(keys)

            def masked(dots, dv_dots):
                row, column = indices(SQUARE, zero)
                low = row > column
                if packed:
                    low = low & (column >= along_rows(starts, SQUARE))
                exponent = along_rows(rows, SQUARE) - jax.lax.broadcast_in_dim(
                    plgpu.load(cols, layout=COLUMN, optimized=False), SQUARE, [1]
                )
                D = power(low, exponent)

                def diagonal(x):
                    return jnp.sum(in_layout(jnp.where(row == column, x, 0.0)), axis=1)

                dP = in_layout(dots * D * scale).astype(BF16)
                if not delta:
                    return diagonal(dots) * scale, dP, None
                dot_ref.at[j, b, h, n][...] = diagonal(dv_dots)
                return diagonal(dots) * scale, dP, in_layout(-(dv_dots * D)).astype(BF16)

            def first(dots, *rest):
                for part in range(parts):
                    issue(dots, at(dos, part), transposed(at(us, part)))
                if delta:
                    dv_dots, seen = rest
                    for part in range(parts):
                        issue(dv_dots, at(dvs, part), transposed(at(us, part)))
                plgpu.barrier_wait(state_full)
                if not delta:
                    return (*masked(read(dots), None), None)
                for part in range(parts):
                    issue(seen, at(dvs, part), at(Ss, part))
                out = masked(read(dots, parts), read(dv_dots, parts))
                return (*out, read(seen))

            own, dP, E, seen = with_sums(first, [SQUARE] * (3 if delta else 1), simulate)
            fence_reads(simulate)
            dP_tile = dvs.at[zero]
            E_tile: Any = dvs.at[1 + zero] if delta else None
            dP_tile[...] = dP
            if delta:
                E_tile[...] = E
            plgpu.commit_smem()

            def second(written, wanted):
                for part in range(parts):
                    issue(written, at(us, part), at(dSs, part))
                for part in range(parts):
                    issue(wanted, at(dos, part), at(Ss, part))
                kept = None
                for part in range(parts):
                    S = plgpu.load(at(Ss, part), layout=MATRIX).astype(F32)
                    dS = plgpu.load(at(dSs, part), layout=MATRIX).astype(F32)
                    dots = jnp.sum(S * dS, axis=1)
                    kept = dots if kept is None else kept + dots
                return kept * keep, read(written), read(wanted)

            kept, written, wanted = with_sums(second, [SQUARE] * 2, simulate)
            written = written * along_rows(writes, SQUARE)
            read_decay = plgpu.load(reads, layout=ROW, optimized=False)
            refill(fetch_wide)
            plgpu.barrier_wait(narrow_full)
            k = plgpu.load(key, layout=MATRIX).astype(F32)
            kept_ref.at[j, b, h, n][...] = kept
            written_ref.at[j, b, h, n][...] = jnp.sum(k * written, axis=1)

            nothing = in_layout(jnp.zeros(SQUARE, F32))

            def decayed(x, factor):
                return x * jax.lax.broadcast_in_dim(read_decay * factor, SQUARE, [0])

            if delta:

                def third(sums):
                    dq, e, dk = sums
                    issue(dq, dP_tile, key)
                    issue(e, E_tile, key)
                    issue(dk, transposed(dP_tile), query)
                    issue(dk, transposed(E_tile), key)

                begin = [decayed(wanted, scale), -decayed(seen, 1.0), nothing]
                dq, e, dk = continue_sums(third, begin, simulate)
            else:

                def third(sums):
                    dq, dk = sums
                    issue(dq, dP_tile, key)
                    issue(dk, transposed(dP_tile), query)

                dq, dk = continue_sums(third, [decayed(wanted, scale), nothing], simulate)
                e = None
            refill(fetch_dv)
            q = plgpu.load(query, layout=MATRIX).astype(F32)
            k = plgpu.load(key, layout=MATRIX).astype(F32)
            change = q * dq - k * dk if e is None else q * dq + k * (e - dk)
            felt_ref.at[j, b, h, n][...] = jnp.sum(change, axis=1)
            own = jax.lax.broadcast_in_dim(own, SQUARE, [0])
            dk = dk + written + own * q
            fence_reads(simulate)
            query[...] = (dq + own * k).astype(BF16)
            key[...] = (dk if e is None else dk + e).astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(query, dq_ref.at[b, tokens, h, mine])
            plgpu.copy_smem_to_gmem(key, dk_ref.at[b, tokens, h, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            refill(fetch_narrow)

        fetch_wide(block)
        fetch_dv(block)
        fetch_narrow(block)
        count = jax.lax.div(jnp.int32(total - 1) - block, jnp.int32(blocks)) + 1

        @loop(0, count)
        def _(i):
            compute(block + i * blocks, i + 1 < count)

        plgpu.wait_smem_to_gmem(0)

    vector = plgpu.SMEM((CHUNK,), F32)
    scratch = [
        tile(1, CHUNK, WIDTH),
        tile(1, CHUNK, WIDTH),
        tile(parts, CHUNK, WIDTH),
        tile(parts, CHUNK, WIDTH),
        tile(spare, CHUNK, WIDTH),
        tile(parts, WIDTH, WIDTH),
        tile(parts, WIDTH, WIDTH),
        vector,
        vector,
        vector,
        vector,
        plgpu.SMEM((CHUNK,), jnp.int32),
        plgpu.Barrier(num_arrivals=2 * parts + 4 + packed + (parts if delta else 0)),
        plgpu.Barrier(num_arrivals=2 * parts),
        plgpu.Barrier(num_arrivals=2),
    ]
    gradient = jax.ShapeDtypeStruct((batch, length, value_heads, key_dim), BF16)
    sums = jax.ShapeDtypeStruct((columns, batch, value_heads, chunks, CHUNK), F32)
    operands: list[Any] = [q_BTHK, k_BTHK, do_BTGV, u_BTGV, states_BGNVK, dstates_BGNVK]
    operands += [gates.sum_BGNC, gates.read_BGNC, gates.write_BGNC]
    operands += [dv_BTGV] if delta else []
    operands += [gates.start_BNC] if packed else []
    return Local(
        *call(
            body,
            operands,
            name="local_gradients",
            out_type=(gradient, gradient, sums, sums, sums, sums),
            blocks=blocks,
            threads=1,
            scratch=scratch,
            simulate=simulate,
        )
    )

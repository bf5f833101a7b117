"""Second kernel: the scan over chunks, with the state in registers from first token to last.

Everything is transposed, so that the state is the left operand and what the copy engine brings the
right one, and no value makes the trip through shared memory inside the chain of a chunk:

    X   = S^T K^T                            [V, C]
    U^T = (V^T - X diag(a)) A^T              [V, C]   (V^T without delta)
    O^T = scale S^T Q^T diag(a) + U^T P^T    [V, C]
    S^T = c S^T + U^T diag(b) K              [V, K]

with a, b, c as in `chunked.py`, A from `inverse.py` with beta and the decay in it, and P = scale
lower(Q K^T) * D, which the copying warpgroup makes while it waits. A block has one or two computing
warpgroups of 64 rows of S^T each. Few heads and long rows: `pieces` blocks a head, each beginning
from its own state (`pieces.py`).

Shapes: B batch, T tokens, H query/key heads, G value heads, P pieces, N chunks of C = 64 tokens.
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
    F32,
    MATRIX,
    SHARED_MEMORY,
    WIDTH,
    along_columns,
    along_rows,
    call,
    computing_warpgroups,
    continue_sums,
    count_up,
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
    tile,
    transposed,
    with_sums,
)

# Registers a thread of (computing, copying) warpgroups after they traded: a block of three
# warpgroups starts with 168 each, and asking for more than 504 in all waits for ever. With 200 for
# those that compute, ptxas runs every product of the kernel by itself (C7512).
REGISTERS = (208, 80)


class Saved(NamedTuple):
    """What the backward kernels need of the forward one, in bfloat16.

    Attributes:
      u_BTGV: the corrected values U; None without delta, where they are v.
      states_BGNVK: S^T before each chunk.
      scores_BGNCC: P.
    """

    u_BTGV: jax.Array | None
    states_BGNVK: jax.Array
    scores_BGNCC: jax.Array


class Forward(NamedTuple):
    o_BTGV: jax.Array
    state_BGVK: jax.Array
    saved: Saved | None


@functools.partial(jax.jit, static_argnames=("scale", "save", "simulate"))
def scan_forward(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    A_BGNCC: jax.Array | None,
    gates: Gates,
    states_BGPVK: jax.Array,
    *,
    scale: float,
    save: bool,
    simulate: bool,
) -> Forward:
    """Output and final state, and with `save` what the gradient needs.

    Args:
      q_BTHK, k_BTHK, v_BTGV: bfloat16; T a multiple of 64 P, K and V of 64.
      A_BGNCC: from `gated_inverse`; None for rules without delta.
      states_BGPVK: float32, transposed state before each piece.
    """
    batch, length, heads, key_dim = k_BTHK.shape
    value_heads, value_dim = v_BTGV.shape[2:]
    pieces = states_BGPVK.shape[2]
    group = value_heads // heads
    chunks = length // CHUNK
    steps = chunks // pieces
    delta, packed = A_BGNCC is not None, gates.start_BNC is not None
    computing, wide = computing_warpgroups(value_dim, key_dim), is_wide(key_dim)
    parts = value_dim // (computing * WIDTH)
    bytes_fixed, bytes_stage = _bytes(key_dim, computing, delta, save)
    stages = max(1, min(3, steps, (SHARED_MEMORY - bytes_fixed) // bytes_stage))
    shape = (WIDTH, CHUNK)

    def body(block, me, operands, results, scratch):
        q_ref, k_ref, v_ref, sum_ref, read_ref, write_ref, states_ref, *rest = operands
        rest = list(rest)
        A_ref: Any = rest.pop(0) if delta else None
        start_ref: Any = rest.pop(0) if packed else None
        o_ref, final_ref, *save_refs = results
        queries, keys, values, As, scores, reads, writes, rows, columns, starts, *stores = scratch[
            :-3
        ]
        full, scored, free = scratch[-3:]

        def place():
            """Row, head, first chunk, the block's first column of V, and piece; found by each role
            for itself: found once for both, these numbers are spilled."""
            mine = block + hidden_zero(simulate)
            b, part, piece, h = digits(mine, batch, parts, pieces, value_heads)
            return b, h, piece * steps, part * (computing * WIDTH), piece

        @pl.when(me < computing)
        def _compute():
            if computing == 2:
                plgpu.set_max_registers(REGISTERS[0], action="increase")
            b, h, first, base, piece = place()
            mine = pl.ds(base + me * WIDTH, WIDTH)
            o_store = u_store = stores[0].at[me]
            if save and delta and not wide:
                u_store = stores[2].at[me]
            # Copies that may be under way when the next one's buffer is filled.
            others = 0 if wide else save + (save and delta)

            def store(buffer, value, target, turn):
                plgpu.wait_smem_to_gmem(others, wait_read_only=True)
                (transposed(buffer) if turn else buffer)[...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, target)

            def step(i, S):
                n, here = first + i, slot(i, stages)
                tokens = pl.ds(n * CHUNK, CHUNK)
                plgpu.barrier_wait(full.at[here])
                here = here + hidden_zero(simulate)
                key, query, value = keys.at[here], queries.at[here], values.at[here, me]
                A, score = As.at[here], scores.at[here]
                S_low: Any = S.astype(BF16)

                def read_decay():
                    return along_columns(reads.at[here], shape)

                def write_decay():
                    return along_columns(writes.at[here], shape)

                def store_state():
                    if save and not wide:
                        store(stores[1].at[me], S_low, save_refs[0].at[b, h, n, mine, :], False)

                if wide:  # products read the rounded state from its buffer
                    buffer = stores[1].at[me + hidden_zero(simulate)]
                    if save:
                        store(buffer, S_low, save_refs[0].at[b, h, n, mine, :], False)
                    else:
                        fence_reads(simulate)
                        buffer[...] = S_low
                        plgpu.commit_smem()
                    S_low = buffer

                def from_state(o):
                    issue(o, S_low, transposed(query))
                    store_state()
                    return read(o) * (scale * read_decay())

                if delta and wide:  # sums one after the other: two do not fit beside S
                    seen = multiply([(S_low, transposed(key))], shape, simulate)
                    seen = (seen * -read_decay()).astype(BF16)
                    terms = [(transposed(value), transposed(A)), (seen, transposed(A))]
                    u = multiply(terms, shape, simulate)
                    U, U_decayed = u.astype(BF16), (u * write_decay()).astype(BF16)
                    out = with_sums(from_state, [shape], simulate)
                elif delta:
                    # Each conversion runs beside a product that does not need it.
                    def run(x, o):
                        issue(x, S_low, transposed(key))
                        issue(o, S_low, transposed(query))
                        store_state()
                        seen = (read(x, 1) * -read_decay()).astype(BF16)

                        def correct(u):
                            issue(u, transposed(value), transposed(A))
                            issue(u, seen, transposed(A))
                            out = read(o, 2) * (scale * read_decay())
                            U = read(u)
                            return U.astype(BF16), (U * write_decay()).astype(BF16), out

                        return with_sums(correct, [shape], simulate)

                    U, U_decayed, out = with_sums(run, [shape, shape], simulate)
                else:
                    out = with_sums(from_state, [shape], simulate)
                    U = in_layout(plgpu.load(transposed(value), layout=MATRIX))
                    U_decayed = (U.astype(F32) * write_decay()).astype(BF16)
                plgpu.barrier_wait(scored.at[here])

                def last(sums):
                    output, state = sums
                    issue(output, U, transposed(score))
                    issue(state, U_decayed, key)
                    if save:
                        if delta:
                            store(u_store, U, save_refs[2].at[b, tokens, h, mine], True)
                        store(
                            o_store,
                            read(output, 1).astype(BF16),
                            o_ref.at[b, tokens, h, mine],
                            True,
                        )

                keep = reads[here, CHUNK - 1]
                out, S = continue_sums(last, [out, S * keep], simulate)
                fence_reads(simulate)
                plgpu.barrier_arrive(free.at[here])
                if not save:
                    store(o_store, out.astype(BF16), o_ref.at[b, tokens, h, mine], True)
                return S

            begin = plgpu.load(states_ref.at[b, h, piece, mine, :], layout=MATRIX, optimized=False)
            S = count_up(steps, step, in_layout(begin))
            plgpu.wait_smem_to_gmem(0)

            @pl.when(piece == pieces - 1)
            def _():
                final_ref.at[b, h, mine, :][...] = S

        @pl.when(me == computing)
        def _copy():
            if computing == 2:
                plgpu.set_max_registers(REGISTERS[1], action="decrease")
            b, h, first, base = place()[:4]
            shared_head = jax.lax.div(h, jnp.int32(group))

            def fetch(i, here):
                n = first + i
                tokens, barrier = pl.ds(n * CHUNK, CHUNK), full.at[here]
                copy = plgpu.copy_gmem_to_smem
                copy(k_ref.at[b, tokens, shared_head], keys.at[here], barrier)
                if delta:
                    copy(A_ref.at[b, h, n], As.at[here], barrier)
                for j in range(computing):
                    mine = pl.ds(base + j * WIDTH, WIDTH)
                    copy(v_ref.at[b, tokens, h, mine], values.at[here, j], barrier)
                copy(q_ref.at[b, tokens, shared_head], queries.at[here], barrier)
                copy(read_ref.at[b, h, n], reads.at[here], barrier)
                copy(write_ref.at[b, h, n], writes.at[here], barrier)
                copy(sum_ref.at[b, h, n], rows.at[here], barrier)
                copy(sum_ref.at[b, h, n], columns.at[here], barrier)
                if packed:
                    copy(start_ref.at[b, n], starts.at[here], barrier)

            # Bounds that are not seen through: unrolled, these loops' addresses would be spilled.
            @loop(0, stages + hidden_zero(simulate))
            def _(i):
                fetch(i, i)

            @loop(0, steps)
            def _(i):
                here = slot(i, stages)
                plgpu.barrier_wait(full.at[here])
                here = here + hidden_zero(simulate)
                square = (CHUNK, CHUNK)
                product = multiply(
                    [(queries.at[here], transposed(keys.at[here]))], square, simulate
                )
                row, column = indices(square, hidden_zero(simulate))
                mask = row >= column
                if packed:
                    mask = mask & (column >= along_rows(starts.at[here], square))
                exponent = along_rows(rows.at[here], square) - along_columns(
                    columns.at[here], square
                )
                if save:
                    plgpu.wait_smem_to_gmem(stages - 1, wait_read_only=True)
                scores[here, :, :] = in_layout(product * power(mask, exponent) * scale).astype(BF16)
                plgpu.commit_smem()
                plgpu.barrier_arrive(scored.at[here])
                if save:
                    # Every part of V computes the same scores and writes the same bytes.
                    plgpu.copy_smem_to_gmem(scores.at[here], save_refs[1].at[b, h, first + i])

                @pl.when((i >= 1) & (i - 1 + stages < steps))
                def _():
                    before = slot(i - 1, stages)
                    plgpu.barrier_wait(free.at[before])
                    fetch(i - 1 + stages, before)

            @loop(steps - stages + hidden_zero(simulate), steps)
            def _(i):
                plgpu.barrier_wait(free.at[slot(i, stages)])

            plgpu.wait_smem_to_gmem(0)

    vector = plgpu.SMEM((stages, CHUNK), F32)
    square = tile(stages, CHUNK, CHUNK)
    scratch = [
        tile(stages, CHUNK, key_dim),
        tile(stages, CHUNK, key_dim),
        tile(stages, computing, CHUNK, WIDTH),
        square if delta else tile(1, 8, CHUNK),
        square,
        vector,
        vector,
        vector,
        vector,
        plgpu.SMEM((stages if packed else 1, CHUNK), jnp.int32),
        tile(computing, CHUNK, WIDTH),
        *([tile(computing, WIDTH, key_dim)] if save or wide else []),
        *([tile(computing, CHUNK, WIDTH)] if save and delta and not wide else []),
        plgpu.Barrier(num_arrivals=6 + delta + packed + computing, num_barriers=stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        plgpu.Barrier(num_arrivals=computing, num_barriers=stages),
    ]
    low = jax.ShapeDtypeStruct((batch, length, value_heads, value_dim), BF16)
    of_chunks = (batch, value_heads, chunks)
    out_type = [low, jax.ShapeDtypeStruct((batch, value_heads, value_dim, key_dim), F32)]
    if save:
        out_type.append(jax.ShapeDtypeStruct((*of_chunks, value_dim, key_dim), BF16))
        out_type.append(jax.ShapeDtypeStruct((*of_chunks, CHUNK, CHUNK), BF16))
        out_type += [low] if delta else []
    operands = [q_BTHK, k_BTHK, v_BTGV, gates.sum_BGNC, gates.read_BGNC, gates.write_BGNC]
    operands += [
        states_BGPVK,
        *([A_BGNCC] if delta else []),
        *([gates.start_BNC] if packed else []),
    ]
    o_BTGV, state_BGVK, *kept = call(
        body,
        operands,
        name="scan_forward",
        out_type=tuple(out_type),
        blocks=value_heads * pieces * parts * batch,
        threads=computing + 1,
        scratch=scratch,
        simulate=simulate,
        guard_stores=False,
    )
    saved = None
    if save:
        saved = Saved(kept[2] if delta else None, kept[0], kept[1])
    return Forward(o_BTGV, state_BGVK, saved)


def _bytes(key_dim: int, computing: int, delta: bool, save: bool) -> tuple[int, int]:
    """Shared memory: (fixed, a stage)."""
    values = computing * CHUNK * WIDTH * 2
    square = CHUNK * CHUNK * 2
    state = computing * WIDTH * key_dim * 2
    wide = is_wide(key_dim)
    fixed = values + (state if save or wide else 0) + 2048
    fixed += values if save and delta and not wide else 0
    return fixed, 2 * CHUNK * key_dim * 2 + values + (1 + delta) * square + 5 * 4 * CHUNK

"""Third kernel: the reverse scan, with the gradient of the state in registers.

For every chunk, last to first, with dS the gradient of the state behind it:

    Y    = dS^T K^T                                  [V, C]
    dU^T = dO^T P + Y diag(b)                        [V, C]
    dV^T = dU^T A   (dU^T without delta)             [V, C]
    dS^T = c dS^T + scale dO^T diag(a) Q - dV^T diag(a) K   [V, K]

A holds beta and the decay, so dV is the gradient of v as it stands; the fourth kernel makes the
other gradients of a chunk from dV and dS. With `head_BGP` it walks over the first chunks of each
piece from nothing and keeps only the gradient before the piece, for `pieces.combine`.

Shapes: B batch, T tokens, H query/key heads, G value heads, P pieces, N chunks of C = 64 tokens.
"""

import functools
from typing import Any

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
    call,
    computing_warpgroups,
    continue_sums,
    count_up,
    digits,
    feed,
    fence_reads,
    hidden_zero,
    in_layout,
    is_wide,
    issue,
    multiply,
    plgpu,
    read,
    slot,
    tile,
    transposed,
    with_sums,
    zeros,
)

REGISTERS = (232, 40)  # of a thread that computes, and that copies


@functools.partial(jax.jit, static_argnames=("pieces", "scale", "simulate"))
def scan_backward(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    do_BTGV: jax.Array,
    A_BGNCC: jax.Array | None,
    scores_BGNCC: jax.Array,
    gates: Gates,
    ends: jax.Array,
    head_BGP: jax.Array | None = None,
    *,
    pieces: int,
    scale: float,
    simulate: bool,
) -> Any:
    """Gradients of v, and of the state behind each chunk and before the row.

    Args:
      ends: float32, the gradient of the state behind each piece [B, G, P, V, K]; or with head_BGP
        that of the final state alone, [B, G, V, K].
      head_BGP: int32, only these first chunks of each piece (`Plan.head_BGP`): find what
        `pieces.combine` needs.

    Returns:
      (dv_BTGV and dS^T [B, G, N, V, K] in bfloat16, dS^T before the row [B, G, V, K] in float32);
      with head_BGP the state gradient before each piece [B, G, P, V, K], undefined at piece 0.
    """
    batch, length, heads, key_dim = k_BTHK.shape
    value_heads, value_dim = do_BTGV.shape[2:]
    group = value_heads // heads
    ends_only = head_BGP is not None
    chunks = length // CHUNK
    steps = chunks // pieces
    delta = A_BGNCC is not None
    computing, wide = computing_warpgroups(value_dim, key_dim), is_wide(key_dim)
    parts = value_dim // (computing * WIDTH)
    bytes_fixed, bytes_stage = _bytes(key_dim, computing, delta, ends_only)
    stages = max(1, min(3, steps, (SHARED_MEMORY - bytes_fixed) // bytes_stage))
    shape = (WIDTH, CHUNK)
    first_piece = 1 if ends_only else 0

    def body(block, me, operands, results, scratch):
        q_ref, k_ref, do_ref, scores_ref, read_ref, write_ref, ends_ref, *rest = operands
        rest = list(rest)
        A_ref: Any = rest.pop(0) if delta else None
        queries, keys, dos, As, scores, reads, writes, *stores, full, free = scratch
        b, part, piece, h = digits(block, batch, parts, pieces - first_piece, value_heads)
        piece = piece + first_piece
        shared_head = jax.lax.div(h, jnp.int32(group))
        count = rest[0][b, h, piece] if ends_only else steps
        last = piece * steps + count - 1
        base = part * (computing * WIDTH)

        @pl.when(me < computing)
        def _compute():
            if computing == 2:
                plgpu.set_max_registers(REGISTERS[0], action="increase")
            mine = pl.ds(base + me * WIDTH, WIDTH)

            def store(buffer, value, target, turn):
                if ends_only:
                    return
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                (transposed(buffer) if turn else buffer)[...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, target)

            def step(i, dS):
                n, here = last - i, slot(i, stages)
                tokens = pl.ds(n * CHUNK, CHUNK)
                plgpu.barrier_wait(full.at[here])
                here = here + hidden_zero(simulate)
                key, query, do = keys.at[here], queries.at[here], dos.at[here, me]
                dS_low: Any = dS.astype(BF16)

                def read_decay():
                    return along_columns(reads.at[here], shape)

                def write_decay():
                    return along_columns(writes.at[here], shape)

                def store_state():
                    if not wide and not ends_only:
                        store(stores[0].at[me], dS_low, results[1].at[b, h, n, mine, :], False)

                if wide:  # products read the rounded gradient from its buffer
                    buffer = stores[0].at[me + hidden_zero(simulate)]
                    store(buffer, dS_low, results[1].at[b, h, n, mine, :], False)
                    dS_low = buffer

                def store_dv(dV):
                    if not ends_only:
                        store(stores[1].at[me], dV, results[0].at[b, tokens, h, mine], True)

                def decayed_do():
                    x = in_layout(plgpu.load(transposed(do), layout=MATRIX)).astype(F32)
                    return (x * (scale * read_decay())).astype(BF16)

                def start(y, du):
                    issue(y, dS_low, transposed(key))
                    issue(du, transposed(do), scores.at[here])
                    store_state()
                    decayed = decayed_do()
                    Y = read(y, 1) * write_decay()
                    return (read(du) + Y).astype(BF16), decayed

                if wide:  # the two sums do not fit side by side
                    Y = multiply([(dS_low, transposed(key))], shape, simulate) * write_decay()
                    add = functools.partial(issue, left=transposed(do), right=scores.at[here])
                    (dU,) = continue_sums(lambda sums: add(sums[0]), [Y], simulate)
                    dU, do_decayed = dU.astype(BF16), decayed_do()
                else:
                    dU, do_decayed = with_sums(start, [shape, shape], simulate)
                keep = reads[here, CHUNK - 1]
                if delta:

                    def finish(sums):
                        state, dv = sums
                        issue(dv, dU, As.at[here])
                        issue(state, do_decayed, query)
                        dV = read(dv, 1)
                        issue(state, (-(dV * read_decay())).astype(BF16), key)
                        store_dv(dV.astype(BF16))

                    dS, _ = continue_sums(finish, [dS * keep, zeros(*shape)], simulate)
                else:

                    def finish(sums):
                        issue(sums[0], do_decayed, query)
                        store_dv(dU)

                    (dS,) = continue_sums(finish, [dS * keep], simulate)
                fence_reads(simulate)
                plgpu.barrier_arrive(free.at[here])
                return dS

            if ends_only:
                dS = plgpu.load(ends_ref.at[b, h, mine, :], layout=MATRIX, optimized=False)
                begins = (piece == pieces - 1) & (count == steps)
                dS = dS * begins.astype(F32)
            else:
                dS = plgpu.load(ends_ref.at[b, h, piece, mine, :], layout=MATRIX, optimized=False)
            dS = count_up(count, step, in_layout(dS))
            if ends_only:
                results[0].at[b, h, piece, mine, :][...] = dS
            else:
                plgpu.wait_smem_to_gmem(0)

                @pl.when(piece == 0)
                def _():
                    results[2].at[b, h, mine, :][...] = dS

        @pl.when(me == computing)
        def _copy():
            if computing == 2:
                plgpu.set_max_registers(REGISTERS[1], action="decrease")

            def fetch(i, here):
                n = last - i
                tokens, barrier = pl.ds(n * CHUNK, CHUNK), full.at[here]
                copy = plgpu.copy_gmem_to_smem
                copy(k_ref.at[b, tokens, shared_head], keys.at[here], barrier)
                for j in range(computing):
                    columns = pl.ds(base + j * WIDTH, WIDTH)
                    copy(do_ref.at[b, tokens, h, columns], dos.at[here, j], barrier)
                copy(scores_ref.at[b, h, n], scores.at[here], barrier)
                if delta:
                    copy(A_ref.at[b, h, n], As.at[here], barrier)
                copy(q_ref.at[b, tokens, shared_head], queries.at[here], barrier)
                copy(read_ref.at[b, h, n], reads.at[here], barrier)
                copy(write_ref.at[b, h, n], writes.at[here], barrier)

            feed(fetch, free, stages, count)

    vector = plgpu.SMEM((stages, CHUNK), F32)
    square = tile(stages, CHUNK, CHUNK)
    stores = [tile(computing, WIDTH, key_dim), tile(computing, CHUNK, WIDTH)]
    scratch = [
        tile(stages, CHUNK, key_dim),
        tile(stages, CHUNK, key_dim),
        tile(stages, computing, CHUNK, WIDTH),
        square if delta else tile(1, 8, CHUNK),
        square,
        vector,
        vector,
        *([] if ends_only else stores),
        plgpu.Barrier(num_arrivals=5 + delta + computing, num_barriers=stages),
        plgpu.Barrier(num_arrivals=computing, num_barriers=stages),
    ]
    state = (value_dim, key_dim)
    if ends_only:
        shape_out = (batch, value_heads, pieces, *state)
        out_type: Any = (jax.ShapeDtypeStruct(shape_out, F32),)
    else:
        out_type = (
            jax.ShapeDtypeStruct((batch, length, value_heads, value_dim), BF16),
            jax.ShapeDtypeStruct((batch, value_heads, chunks, *state), BF16),
            jax.ShapeDtypeStruct((batch, value_heads, *state), F32),
        )
    operands = [q_BTHK, k_BTHK, do_BTGV, scores_BGNCC, gates.read_BGNC, gates.write_BGNC, ends]
    operands += [A_BGNCC] if delta else []
    operands += [head_BGP] if ends_only else []
    out = call(
        body,
        operands,
        name="scan_backward_ends" if ends_only else "scan_backward",
        out_type=out_type,
        blocks=value_heads * (pieces - first_piece) * parts * batch,
        threads=computing + 1,
        scratch=scratch,
        simulate=simulate,
        guard_stores=False,
    )
    return out[0] if ends_only else out


def _bytes(key_dim: int, computing: int, delta: bool, ends_only: bool) -> tuple[int, int]:
    """Shared memory: (fixed, a stage)."""
    values = computing * CHUNK * WIDTH * 2
    square = CHUNK * CHUNK * 2
    fixed = 2048 + (0 if ends_only else values + computing * WIDTH * key_dim * 2)
    return fixed, 2 * CHUNK * key_dim * 2 + values + (1 + delta) * square + 2 * 4 * CHUNK

"""Long rows with few heads: the scan is cut into pieces that run side by side.

Across a piece the state goes S -> M S + U, and its gradient dS -> M^T dS + dU. A first pass finds U
(the piece's state from nothing) and, where it matters, M; `combine` then walks over the pieces for
the state that each begins with. Where a piece's decay leaves less than e^-12 of what came in, M is
dropped and U needs only the last chunks of the piece. That holds for rules whose transition never
stretches a vector, which for the delta rule means beta |k|^2 <= 2; pieces where some token breaks
it take the exact path, as do those with little decay.

Shapes: B batch, T tokens, G value heads, P pieces, N chunks of C = 64 tokens.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from fastweights.ops.mosaic_gpu.gates import Gates
from fastweights.ops.mosaic_gpu.tiles import (
    BF16,
    CHUNK,
    F32,
    LOG2_E,
    MATRIX,
    MULTIPROCESSORS,
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
    indices,
    issue,
    plgpu,
    read,
    slot,
    split,
    tile,
    transposed,
    with_sums,
)

NEGLIGIBLE = 12.0 * LOG2_E  # decay in units of log 2 behind which a state counts as gone
SHORTEST = 4  # chunks of a piece, below which cutting does not pay


class Plan(NamedTuple):
    """Which chunks of a piece the states at its ends depend on.

    Attributes:
      exact_BGP: int32, 1 where what comes into the piece still matters at its other end.
      tail_BGP: int32, how many of its last chunks its final state depends on.
      head_BGP: int32, how many of its first chunks the state gradient before it depends on.
    """

    exact_BGP: jax.Array
    tail_BGP: jax.Array
    head_BGP: jax.Array


class Transitions(NamedTuple):
    """M^T of each piece (row: incoming key channel) as the sum of two bfloat16 matrices."""

    high_BGPKK: jax.Array
    low_BGPKK: jax.Array


def count_pieces(heads: int, chunks: int) -> int:
    """How many pieces a row is cut into; `heads` counts value heads of all rows."""
    pieces = 1
    while heads * pieces * 2 <= MULTIPROCESSORS and chunks >= 2 * pieces * SHORTEST:
        pieces *= 2
    return pieces


def make_plan(gates: Gates, pieces: int, stretch_BGNC: jax.Array | None) -> Plan:
    """From the decays, and from how much each token's transition stretches (`gated_inverse`)."""
    # A document's end empties the state like an endless decay: keep is 0 there.
    keep_BGN = gates.read_BGNC[..., -1]
    total_BGN = jnp.where(keep_BGN > 0, gates.sum_BGNC[..., -1], -1e4)
    batch, heads, chunks = total_BGN.shape
    steps = chunks // pieces
    total = total_BGN.reshape(batch, heads, pieces, 1, steps)
    # Masked sums make fewer and faster kernels of these few numbers than jnp.cumsum does.
    seen = np.tri(steps, dtype=bool)
    ahead = jnp.sum(jnp.where(seen, total, 0.0), axis=-1)
    behind = jnp.sum(jnp.where(seen.T, total, 0.0), axis=-1)
    exact = ahead[..., -1] > -NEGLIGIBLE
    if stretch_BGNC is not None and gates.beta_BGNC is not None:
        # Keys of length 1 are a little longer once rounded.
        contracts = (stretch_BGNC < 2.02) & (gates.beta_BGNC >= 0)
        exact |= ~jnp.all(contracts.reshape(batch, heads, pieces, steps * CHUNK), axis=-1)

    def reach(sums):
        needed = jnp.sum(sums > -NEGLIGIBLE, axis=-1) + 1
        return jnp.where(exact, steps, jnp.minimum(needed, steps))

    return Plan(*(x.astype(jnp.int32) for x in (exact, reach(behind), reach(ahead))))


@functools.partial(jax.jit, static_argnames=("simulate",))
def final_states(
    k_BTHK: jax.Array,
    v_BTGV: jax.Array | None,
    A_BGNCC: jax.Array | None,
    gates: Gates,
    initial_BGVK: jax.Array | None,
    plan: Plan,
    *,
    simulate: bool,
) -> Any:
    """States (v given) or transitions (v None) behind all pieces but the last.

    Piece 0 begins with the initial state, the others with nothing. Returns U as float32
    [B, G, P, V, K], or `Transitions`; entry P - 1 is undefined, as are transitions of piece 0 and
    of pieces that do not need theirs.
    """
    batch, length, heads, key_dim = k_BTHK.shape
    _, value_heads, pieces = plan.exact_BGP.shape
    moves = v_BTGV is None
    if moves and A_BGNCC is None:
        return _diagonal(gates, pieces, key_dim)
    delta = A_BGNCC is not None
    rows = key_dim if moves else v_BTGV.shape[3]
    group, steps = value_heads // heads, length // CHUNK // pieces
    computing = computing_warpgroups(rows, key_dim)
    parts = rows // (computing * WIDTH)
    stages = min(3, steps)
    shape = (WIDTH, CHUNK)
    first_piece = 1 if moves else 0

    def body(block, me, operands, results, scratch):
        k_ref, read_ref, write_ref, tail_ref, *rest = operands
        rest = list(rest)
        A_ref: Any = rest.pop(0) if delta else None
        v_ref: Any = None if moves else rest.pop(0)
        other_ref = rest.pop(0)  # exact for transitions, the initial state for states
        keys, values, As, reads, writes, full, free = scratch
        b, part, piece, h = digits(block, batch, parts, pieces - 1 - first_piece, value_heads)
        piece = piece + first_piece
        count = tail_ref[b, h, piece]
        if moves:
            count = count * other_ref[b, h, piece]
        first = (piece + 1) * steps - count
        base = part * (computing * WIDTH)

        @pl.when(me < computing)
        def _compute():
            if computing == 2:
                plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(base + me * WIDTH, WIDTH)
            if moves:
                row, column = indices((WIDTH, key_dim))
                S = in_layout(jnp.where(row + (base + me * WIDTH) == column, 1.0, 0.0))
            else:
                S = plgpu.load(other_ref.at[b, h, mine, :], layout=MATRIX, optimized=False)
                begins = (piece == 0) & (count == steps)
                S = in_layout(S * begins.astype(F32))

            def step(i, S):
                here = slot(i, stages)
                plgpu.barrier_wait(full.at[here])
                here = here + hidden_zero(simulate)
                key = keys.at[here]
                S_low = S.astype(BF16)
                if delta:

                    def run(x, u):
                        issue(x, S_low, transposed(key))
                        if not moves:
                            issue(u, transposed(values.at[here, me]), transposed(As.at[here]))
                        seen = read(x, 0 if moves else 1) * along_columns(reads.at[here], shape)
                        issue(u, (-seen).astype(BF16), transposed(As.at[here]))
                        return read(u)

                    U = with_sums(run, [shape, shape], simulate)
                else:
                    value = plgpu.load(transposed(values.at[here, me]), layout=MATRIX)
                    U = in_layout(value).astype(F32)
                U = (U * along_columns(writes.at[here], shape)).astype(BF16)
                keep = reads[here, CHUNK - 1]
                (S,) = continue_sums(lambda s: issue(s[0], U, key), [S * keep], simulate)
                fence_reads(simulate)
                plgpu.barrier_arrive(free.at[here])
                return S

            S = count_up(count, step, S)
            if moves:
                high, low = split(S)
                results[0].at[b, h, piece, mine, :][...] = high
                results[1].at[b, h, piece, mine, :][...] = low
            else:
                results[0].at[b, h, piece, mine, :][...] = S

        @pl.when(me == computing)
        def _copy():
            if computing == 2:
                plgpu.set_max_registers(40, action="decrease")

            def fetch(i, here):
                n = first + i
                tokens, barrier = pl.ds(n * CHUNK, CHUNK), full.at[here]
                copy = plgpu.copy_gmem_to_smem
                copy(k_ref.at[b, tokens, jax.lax.div(h, jnp.int32(group))], keys.at[here], barrier)
                if delta:
                    copy(A_ref.at[b, h, n], As.at[here], barrier)
                if not moves:
                    for j in range(computing):
                        columns = pl.ds(base + j * WIDTH, WIDTH)
                        copy(v_ref.at[b, tokens, h, columns], values.at[here, j], barrier)
                copy(read_ref.at[b, h, n], reads.at[here], barrier)
                copy(write_ref.at[b, h, n], writes.at[here], barrier)

            feed(fetch, free, stages, count)

    vector = plgpu.SMEM((stages, CHUNK), F32)
    arrivals = 3 + delta + (0 if moves else computing)
    scratch = [
        tile(stages, CHUNK, key_dim),
        tile(1, 1, 8, WIDTH) if moves else tile(stages, computing, CHUNK, WIDTH),
        tile(stages, CHUNK, CHUNK) if delta else tile(1, 8, CHUNK),
        vector,
        vector,
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        plgpu.Barrier(num_arrivals=computing, num_barriers=stages),
    ]
    shape_out = (batch, value_heads, pieces, rows, key_dim)
    if moves:
        out_type: Any = (jax.ShapeDtypeStruct(shape_out, BF16),) * 2
    else:
        out_type = (jax.ShapeDtypeStruct(shape_out, F32),)
    operands = [k_BTHK, gates.read_BGNC, gates.write_BGNC, plan.tail_BGP]
    operands += [A_BGNCC] if delta else []
    operands += [plan.exact_BGP] if moves else [v_BTGV, initial_BGVK]
    out = call(
        body,
        operands,
        name="piece_transitions" if moves else "piece_states",
        out_type=out_type,
        blocks=value_heads * (pieces - 1 - first_piece) * parts * batch,
        threads=computing + 1,
        scratch=scratch,
        simulate=simulate,
    )
    return Transitions(*out) if moves else out[0]


def _diagonal(gates: Gates, pieces: int, key_dim: int) -> Transitions:
    """Transitions of rules without delta: one number a piece."""
    keep_BGN = gates.read_BGNC[..., -1]
    batch, heads, chunks = keep_BGN.shape
    keep = jnp.prod(keep_BGN.reshape(batch, heads, pieces, chunks // pieces), axis=-1)
    return Transitions(*split(jnp.einsum("bgp,ij->bgpij", keep, jnp.eye(key_dim, dtype=F32))))


@functools.partial(jax.jit, static_argnames=("reverse", "simulate"))
def combine(
    ends_BGPVK: jax.Array,
    transitions: Transitions,
    plan: Plan,
    outer_BGVK: jax.Array,
    *,
    reverse: bool,
    simulate: bool,
) -> jax.Array:
    """What each piece begins with, float32 [B, G, P, V, K].

    Forward: from the final states of the pieces and the initial state. Reverse: from the state
    gradients before the pieces and that of the final state; then "begins" is the piece's end.
    """
    batch, heads, pieces, value_dim, key_dim = ends_BGPVK.shape

    def body(block, me, operands, results, scratch):
        del me
        ends_ref, high_ref, low_ref, exact_ref, outer_ref = operands
        (out_ref,) = results
        high, low, barrier = scratch
        b, part, h = digits(block, batch, value_dim // WIDTH, heads)
        rows = pl.ds(part * WIDTH, WIDTH)

        def load(ref):
            return in_layout(plgpu.load(ref, layout=MATRIX, optimized=False))

        def turn(ref):
            return transposed(ref) if reverse else ref

        def at(i):
            return pieces - 1 - i if reverse else i

        S = load(outer_ref.at[b, h, rows, :])
        out_ref.at[b, h, at(0), rows, :][...] = S

        def step(i, S):
            piece = at(i)
            # The outermost piece began with the given state, so its end is already whole.
            exact = jnp.where(i > 0, exact_ref[b, h, piece], 0)

            @pl.when(exact > 0)
            def _():
                plgpu.copy_gmem_to_smem(high_ref.at[b, h, piece], high, barrier)
                plgpu.copy_gmem_to_smem(low_ref.at[b, h, piece], low, barrier)
                plgpu.barrier_wait(barrier)

            def moved(S, end):
                S_high, S_low = split(S)

                def run(sums):
                    issue(sums[0], S_high, turn(high))
                    issue(sums[0], S_low, turn(high))
                    issue(sums[0], S_high, turn(low))

                return in_layout(continue_sums(run, [end], simulate)[0])

            end = load(ends_ref.at[b, h, piece, rows, :])
            S = jax.lax.cond(exact > 0, moved, lambda S, end: in_layout(end), S, end)
            fence_reads(simulate)
            out_ref.at[b, h, at(i + 1), rows, :][...] = S
            return S

        count_up(pieces - 1, step, S)

    square = tile(key_dim, key_dim)
    return call(
        body,
        [ends_BGPVK, *transitions, plan.exact_BGP, outer_BGVK],
        name="combine_pieces",
        out_type=jax.ShapeDtypeStruct(ends_BGPVK.shape, F32),
        blocks=batch * heads * (value_dim // WIDTH),
        threads=1,
        scratch=[square, square, plgpu.Barrier(num_arrivals=2)],
        simulate=simulate,
    )

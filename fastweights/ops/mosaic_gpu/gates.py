"""Decays, beta and documents as the Hopper kernels read them, made before and undone after.

A warp takes a chunk of a head, two tokens a thread. XLA would take five kernels for these small
arrays. The simulator has no per-thread code, so there jnp does it.

Shapes: B batch, T tokens, G value heads, N chunks, C = 64 tokens, J parts of a sum.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastweights.ops.chunked import MIN_LOG_DECAY
from fastweights.ops.mosaic_gpu.threads import Thread
from fastweights.ops.mosaic_gpu.tiles import CHUNK, LOG2_E, call, plgpu

# dbeta divides by beta^2; a smaller beta than this writes nothing that bfloat16 could show.
LEAST_BETA = 1e-6
WARPS = 4  # of a block


class Gates(NamedTuple):
    """The factors of `chunked.py`, of which the kernels form D from sum and start; float32.

    Attributes:
      sum_BGNC: running sum of g within the chunk, in units of log 2.
      read_BGNC: a_i; its last entry is also the factor `keep` on the whole state.
      write_BGNC: b_j.
      beta_BGNC: never quite zero; None without delta.
      start_BNC: int32, the place in the chunk where each token's document begins, 0 if before the
        chunk; None where each row is one document.
    """

    sum_BGNC: jax.Array
    read_BGNC: jax.Array
    write_BGNC: jax.Array
    beta_BGNC: jax.Array | None
    start_BNC: jax.Array | None


def make_gates(
    g_BTG: jax.Array,
    beta_BTG: jax.Array | None,
    document_BT: jax.Array | None,
    *,
    simulate: bool = False,
) -> Gates:
    """From log decays, beta and document numbers (`segments.find_documents`); T a multiple of 64.

    Log decays are cut at e^-50, which is nothing: a far stronger gate would cost the milder ones
    behind it their digits in the running sum. See `chunked.py`.
    """
    inputs = [g_BTG] if beta_BTG is None else [g_BTG, beta_BTG]
    batch, length, heads = g_BTG.shape
    row = jax.ShapeDtypeStruct((batch, heads, length // CHUNK, CHUNK), jnp.float32)
    if simulate:
        sums = jnp.cumsum(chunked(jnp.maximum(g_BTG, MIN_LOG_DECAY)) * LOG2_E, axis=-1)
        made = [sums, jnp.exp2(sums), jnp.exp2(sums[..., -1:] - sums)]
        if beta_BTG is not None:
            small = jnp.abs(beta_BTG) < LEAST_BETA
            made.append(chunked(jnp.where(small, LEAST_BETA, beta_BTG)))
    else:
        targets = [row] * (2 + len(inputs))
        made = _by_warps(_make, inputs, targets, "make_gates", (batch, heads, length // CHUNK))
    sum_BGNC, read, write, *beta = made
    beta_BGNC = beta[0] if beta else None
    if document_BT is None:
        return Gates(sum_BGNC, read, write, beta_BGNC, None)
    document_BNC = document_BT.reshape(batch, -1, CHUNK)
    last_BN = document_BNC[..., -1]
    carried_BN = jnp.pad(last_BN[:, :-1], ((0, 0), (1, 0)))
    read = jnp.where((document_BNC == carried_BN[..., None])[:, None], read, 0.0)
    write = jnp.where((document_BNC == last_BN[..., None])[:, None], write, 0.0)
    begins_BNC = begins(document_BT).reshape(document_BNC.shape)
    place = jnp.arange(CHUNK, dtype=jnp.int32)[None, None]
    start_BNC = jax.lax.cummax(jnp.where(begins_BNC, place, 0), axis=2)
    return Gates(sum_BGNC, read, write, beta_BGNC, start_BNC)


def gradients(
    felt_JBGNC: jax.Array,
    written_JBGNC: jax.Array,
    kept_JBGNC: jax.Array,
    dot_JBGNC: jax.Array,
    beta_BGNC: jax.Array | None,
    *,
    simulate: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients by g and by beta, float32 [B, T, G], from the sums of `backward_local.Local`."""
    parts, batch, heads, chunks, _ = felt_JBGNC.shape
    if simulate:
        felt_BGNC, written_BGNC = jnp.sum(felt_JBGNC, axis=0), jnp.sum(written_JBGNC, axis=0)
        onward_BGNC = jnp.flip(jnp.cumsum(jnp.flip(felt_BGNC, -1), axis=-1), -1)
        earlier_BGNC = jnp.cumsum(jnp.roll(written_BGNC, 1, axis=-1).at[..., 0].set(0.0), axis=-1)
        kept_BGN = jnp.sum(kept_JBGNC, axis=(0, -1))
        dg = _unchunked(onward_BGNC + earlier_BGNC + kept_BGN[..., None])
        dbeta = None if beta_BGNC is None else _unchunked(dot_JBGNC[0] / jnp.square(beta_BGNC))
        return dg, dbeta
    out = jax.ShapeDtypeStruct((batch, chunks * CHUNK, heads), jnp.float32)
    sources, targets = [felt_JBGNC, written_JBGNC, kept_JBGNC], [out]
    if beta_BGNC is not None:
        sources, targets = [*sources, dot_JBGNC, beta_BGNC], [out, out]
    body = functools.partial(_undo, parts=parts)
    dg, *dbeta = _by_warps(body, sources, targets, "gate_gradients", (batch, heads, chunks))
    return dg, dbeta[0] if dbeta else None


def chunked(x_BTG: jax.Array) -> jax.Array:
    """[B, T, G] -> [B, G, N, C]."""
    batch, length, heads = x_BTG.shape
    return jnp.moveaxis(x_BTG.reshape(batch, length // CHUNK, CHUNK, heads), 3, 1)


def _unchunked(x_BGNC: jax.Array) -> jax.Array:
    batch, heads = x_BGNC.shape[:2]
    return jnp.moveaxis(x_BGNC, 1, 3).reshape(batch, -1, heads)


def begins(document_BT: jax.Array) -> jax.Array:
    """Where a token is the first of its document, which its decay therefore does not reach."""
    return document_BT != jnp.pad(document_BT[:, :-1], ((0, 0), (1, 0)))


class _Place(NamedTuple):
    """Where a thread works: its lane, the offset of its two tokens in [B, T, G] and in
    [B, G, N, C], the distance from one token to the next in the former, and the size of both."""

    lane: Any
    tokens: Any
    row: Any
    stride: int
    size: int


def _by_warps(
    body: Callable[[Thread, _Place, list[Any], list[Any]], None],
    sources: Sequence[jax.Array],
    targets: Sequence[jax.ShapeDtypeStruct],
    name: str,
    sizes: tuple[int, int, int],
) -> Sequence[jax.Array]:
    """Runs body(thread, place, pointers to sources, pointers to targets) by a warp for each chunk
    of sizes (B, G, N)."""
    batch, heads, chunks = sizes
    total = batch * heads * chunks

    def kernel(block, me, operands, results, scratch):
        del me, scratch
        references = [*operands, *results]

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(references)))
        def run(ctx, block, *references):
            del ctx
            thread = Thread()
            # Heads vary fastest: the warps of a block read from the same lines.
            index = thread.index(block.registers.item(), WARPS, thread.warp())
            with thread.only_below(index, total):
                n, h = thread.digits(index, heads)
                b, n_of_row = thread.digits(n, chunks)
                lane = thread.lane()
                token = thread.index(thread.index(n, CHUNK // 2, lane), 2, 0)
                row = thread.index(b, heads, h, chunks, n_of_row, CHUNK // 2, lane)
                place = _Place(
                    lane,
                    thread.index(token, heads, h),
                    thread.index(row, 2, 0),
                    heads,
                    total * CHUNK,
                )
                pointers = [thread.pointer(x) for x in references]
                body(thread, place, pointers[: len(sources)], pointers[len(sources) :])

        run(block, *references)

    return call(
        kernel,
        sources,
        name=name,
        out_type=tuple(targets),
        blocks=-(-total // WARPS),
        threads=1,
        scratch=(),
        simulate=False,
    )


def _make(thread: Thread, place: _Place, sources: list[Any], targets: list[Any]) -> None:
    gate, *betas = (thread.address(x, place.tokens) for x in sources)
    sums, read, write, *kept = (thread.address(x, place.row) for x in targets)

    def both(base, change):
        return [change(thread.load(base, i * place.stride)) for i in range(2)]

    unit, least = thread.number(LOG2_E), thread.number(MIN_LOG_DECAY)
    first, second = both(gate, lambda g: thread.multiply(thread.larger(g, least), unit))
    before, _ = thread.sum_of_others(thread.add(first, second), place.lane)
    first = thread.add(before, first)
    second = thread.add(first, second)
    total = thread.from_lane(31, second)
    thread.store2(sums, 0, first, second)
    thread.store2(read, 0, *map(thread.power_of_two, (first, second)))
    behind = (thread.subtract(total, x) for x in (first, second))
    thread.store2(write, 0, *map(thread.power_of_two, behind))
    least = thread.number(LEAST_BETA)
    for source, target in zip(betas, kept, strict=True):
        floored = both(source, lambda x: thread.where_less(x, least, least, x))
        thread.store2(target, 0, *floored)


def _undo(
    thread: Thread, place: _Place, sources: list[Any], targets: list[Any], *, parts: int
) -> None:
    felt, written, kept, *of_beta = (thread.address(x, place.row) for x in sources)
    dg, *dbeta = (thread.address(x, place.tokens) for x in targets)

    def over_parts(base):
        pairs = [thread.load_many(2, thread.address(base, j * place.size)) for j in range(parts)]
        return [functools.reduce(thread.add, x) for x in zip(*pairs, strict=True)]

    first, second = over_parts(felt)
    behind, _ = thread.sum_of_others(thread.add(first, second), place.lane, behind=True)
    mine, next_ = over_parts(written)
    earlier, _ = thread.sum_of_others(thread.add(mine, next_), place.lane)
    _, all_kept = thread.sum_of_others(thread.add(*over_parts(kept)), place.lane)
    second = thread.add(behind, second)
    first = thread.add(thread.add(second, first), thread.add(earlier, all_kept))
    second = thread.add(second, thread.add(thread.add(earlier, mine), all_kept))
    thread.store(dg, 0, first)
    thread.store(dg, place.stride, second)
    if of_beta:
        pairs = zip(*(thread.load_many(2, x) for x in of_beta), strict=True)
        for i, (dot, beta) in enumerate(pairs):
            quotient = thread.divide(dot, thread.multiply(beta, beta))
            thread.store(dbeta[0], i * place.stride, quotient)

"""Decays, beta and documents as the Hopper kernels read them, made before and undone after.

A thread takes a chunk of a head: it reads along the heads, side by side with its neighbours, and
writes a row of 64 numbers. XLA would take five kernels for these small arrays, longer than an
eighth of all else in the forward pass. The simulator has no per-thread code, so there jnp does it.

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
THREADS = 128  # of a warpgroup


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
        made = _by_threads(_make, inputs, targets, "make_gates", (batch, heads, length // CHUNK))
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
    dsum_JBGNC: jax.Array,
    last_JBGNC: jax.Array,
    write_JBGNC: jax.Array,
    beta_BGNC: jax.Array | None,
    *,
    simulate: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients by g and by beta, float32 [B, T, G], from the sums of `backward_local.Local`."""
    parts, batch, heads, chunks, _ = dsum_JBGNC.shape
    if simulate:
        dsum_BGNC = jnp.sum(dsum_JBGNC, axis=0)
        dsum_BGNC = dsum_BGNC.at[..., -1].add(jnp.sum(last_JBGNC, axis=(0, -1)))
        dg = _unchunked(jnp.flip(jnp.cumsum(jnp.flip(dsum_BGNC, -1), axis=-1), -1))
        dbeta = None if beta_BGNC is None else _unchunked(write_JBGNC[0] / jnp.square(beta_BGNC))
        return dg, dbeta
    out = jax.ShapeDtypeStruct((batch, chunks * CHUNK, heads), jnp.float32)
    sources, targets = [dsum_JBGNC, last_JBGNC], [out]
    if beta_BGNC is not None:
        sources, targets = [*sources, write_JBGNC, beta_BGNC], [out, out]
    body = functools.partial(_undo, parts=parts)
    dg, *dbeta = _by_threads(body, sources, targets, "gate_gradients", (batch, heads, chunks))
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
    """Where a thread works: offsets of its chunk in [B, T, G] and in [B, G, N, C]."""

    tokens: Any
    row: Any
    heads: int
    numbers: int  # in all of [B, G, N, C]


def _by_threads(
    body: Callable[[Thread, _Place, list[Any], list[Any]], None],
    sources: Sequence[jax.Array],
    targets: Sequence[jax.ShapeDtypeStruct],
    name: str,
    sizes: tuple[int, int, int],
) -> Sequence[jax.Array]:
    """Runs body(thread, place, pointers to sources, pointers to targets) for each chunk of sizes
    (B, G, N), the heads of a chunk side by side."""
    batch, heads, chunks = sizes
    total = batch * heads * chunks

    def kernel(block, me, operands, results, scratch):
        del me, scratch
        references = [*operands, *results]

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * len(references)))
        def run(ctx, block, *references):
            del ctx
            thread = Thread()
            index = thread.index(block.registers.item(), THREADS, thread.in_warpgroup())
            with thread.where_below(index, total):
                n, h = thread.digits(index, heads)
                b, n_of_row = thread.digits(n, chunks)
                place = _Place(
                    thread.index(n, CHUNK * heads, h),
                    thread.index(thread.index(b, heads, h, chunks, n_of_row), CHUNK, 0),
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
        blocks=-(-total // THREADS),
        threads=1,
        scratch=(),
        simulate=False,
    )


def _make(thread: Thread, place: _Place, sources: list[Any], targets: list[Any]) -> None:
    gate, *betas = (thread.address(x, place.tokens) for x in sources)
    total, read, write, *kept = (thread.address(x, place.row) for x in targets)
    unit, least = thread.number(LOG2_E), thread.number(MIN_LOG_DECAY)
    sums = [thread.number(0.0)]
    for i in range(CHUNK):
        g = thread.larger(thread.load(gate, i * place.heads), least)
        sums.append(thread.add(sums[-1], thread.multiply(g, unit)))
    for i in range(0, CHUNK, 4):
        four = sums[1 + i : 5 + i]
        behind = [thread.subtract(sums[-1], x) for x in four]
        thread.store4(total, i, four)
        thread.store4(read, i, [thread.power_of_two(x) for x in four])
        thread.store4(write, i, [thread.power_of_two(x) for x in behind])
    least = thread.number(LEAST_BETA)
    for source, target in zip(betas, kept, strict=True):
        for i in range(0, CHUNK, 4):
            four = [thread.load(source, (i + j) * place.heads) for j in range(4)]
            thread.store4(target, i, [thread.where_less(x, least, least, x) for x in four])


def _undo(
    thread: Thread, place: _Place, sources: list[Any], targets: list[Any], *, parts: int
) -> None:
    dsum, last, *of_beta = (thread.address(x, place.row) for x in sources)
    dg, *dbeta = (thread.address(x, place.tokens) for x in targets)
    dsums = [thread.address(dsum, j * place.numbers) for j in range(parts)]
    lasts = [thread.address(last, j * place.numbers) for j in range(parts)]
    total = thread.number(0.0)
    for i in range(0, CHUNK, 4):
        for x in lasts:
            total = functools.reduce(thread.add, thread.load4(x, i), total)
    for i in reversed(range(0, CHUNK, 4)):
        fours = [thread.load4(x, i) for x in dsums]
        for j in reversed(range(4)):
            total = functools.reduce(thread.add, [four[j] for four in fours], total)
            thread.store(dg, (i + j) * place.heads, total)
    if of_beta:
        write, beta = of_beta
        for i in range(0, CHUNK, 4):
            fours = zip(thread.load4(write, i), thread.load4(beta, i), strict=True)
            for j, (dot, b) in enumerate(fours):
                quotient = thread.divide(dot, thread.multiply(b, b))
                thread.store(dbeta[0], (i + j) * place.heads, quotient)

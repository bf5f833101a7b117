"""The short causal depthwise convolution with its activation: each input is read once.

XLA's form reads every tap anew, and its gradient recomputes the activation for each sum over
tokens; on an H200 they reach a quarter and a twentieth of the memory's speed.

A block is one warpgroup with 128 channels, or 64, of four spans of consecutive tokens, a span to a
warp. A warp walks along its span with the last inputs in registers, so a token costs one read of
shared memory; four or two channels lie in each lane. Spans overlap by the taps' reach, and results
take the place of inputs that have been read.

Shapes: B batch, T tokens, D channels, W taps, X = W - 1, N blocks along T, P = X + span + X places
of a span and its surroundings, S warps of a block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from fastweights.ops.features import UNIT_EPS
from fastweights.ops.mosaic_gpu.support import BLOCKS, CONVOLVED_TOKENS
from fastweights.ops.mosaic_gpu.tiles import BF16, F32, call, count_up, digits, plgpu
from fastweights.ops.weights import sum_tokens

WARPS, LANES = 4, 32
TOKENS = CONVOLVED_TOKENS
SPAN = TOKENS // WARPS  # tokens of a warp
UNROLLED = 2  # tokens a turn of the loop


@dataclasses.dataclass(frozen=True)
class Block:
    """Of WARPS x `channels` entries, warp w has row w and each lane as many columns in a row."""

    channels: int

    @property
    def shape(self) -> tuple[int, int]:
        return WARPS, self.channels

    @property
    def layout(self) -> Any:
        tiling = plgpu.Tiling((self.shape, (self.channels // LANES,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def zeros(self) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros(self.shape, F32), self.layout)

    def load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=self.layout, optimized=False).astype(F32)

    def weights(self, ref: Any, channels: Any, count: int) -> list[jax.Array]:
        """Rows of a [count, D] array, each the same for all warps."""
        layout = self.layout.reduce(0)
        rows = [
            plgpu.load(ref.at[i, channels], layout=layout, optimized=False) for i in range(count)
        ]
        return [jax.lax.broadcast_in_dim(row.astype(F32), self.shape, [1]) for row in rows]

    def reaches(self, ref: Any, place: Any) -> jax.Array:
        """How far each warp's token sees back, for each of its channels."""
        reach = plgpu.load(ref.at[place], layout=self.layout.reduce(1), optimized=False)
        return jax.lax.broadcast_in_dim(reach, self.shape, [0])

    def spans(self, rows: int) -> Any:
        return plgpu.SMEM((WARPS, rows, self.channels), BF16)

    def push(self, spans, reaches, past, place, window):
        """(the token's reach, the window with its input behind it)."""
        reach = self.reaches(reaches, place + past)
        x = jnp.where(reach >= 0, self.load(spans.at[:, place + past]), 0.0)
        return reach, [*window, x]

    def begin(self, reach_ref, reaches, w_ref, bias_ref, channels, barrier):
        """(taps, bias or None), once all that was to be copied is there; the reaches are copied
        too."""
        plgpu.copy_gmem_to_smem(reach_ref, reaches, barrier)
        taps = self.weights(w_ref, channels, w_ref.shape[0])
        bias = self.weights(bias_ref[0], channels, 1)[0] if bias_ref else None
        plgpu.barrier_wait(barrier)
        return taps, bias


def _block(channels: int, unit: int) -> Block:
    """Of a head, if heads are scaled; else as wide as the channels allow."""
    return Block(unit or next(n for n in BLOCKS if channels % n == 0))


def _sigmoid(x: jax.Array) -> jax.Array:
    # A root and a square instead of a division, which takes ten instructions.
    root = jax.lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def _sum_of_head(x: jax.Array) -> jax.Array:
    """Sum over the block's channels, for each of them."""
    return jax.lax.broadcast_in_dim(jnp.sum(x, axis=1), x.shape, [0])


def _inverse_length(x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(_sum_of_head(x * x) + UNIT_EPS)


def _sum_of_taps(reach, window, taps, bias):
    """`window` holds the last W inputs, the newest last."""
    last = len(taps) - 1
    total = window[last] * taps[last]
    for back in range(1, len(taps)):
        seen = jnp.where(reach >= back, window[last - back], 0.0)
        total = total + seen * taps[last - back]
    return total if bias is None else total + bias


def _copy_spans(ref, b, first, channels, before, after, length, spans, barrier) -> None:
    """Each warp's span of a [B, T, D] array, with some tokens before and after it."""
    for warp in range(WARPS):
        begin = first + warp * SPAN
        rows = spans.at[warp]
        parts = [(begin, before, SPAN)]
        # Beyond the ends of the row come tokens from inside it; their reach says to ignore them.
        if before:
            parts.append((jnp.maximum(begin - before, 0), 0, before))
        if after:
            parts.append(
                (jnp.minimum(begin + SPAN, length - after), before + SPAN, after),
            )
        for token, row, count in parts:
            plgpu.copy_gmem_to_smem(
                ref.at[b, pl.ds(token, count), channels], rows.at[pl.ds(row, count)], barrier
            )


def _store_spans(spans, before, ref, b, first, channels) -> None:
    plgpu.commit_smem()
    for warp in range(WARPS):
        tokens = pl.ds(first + warp * SPAN, SPAN)
        plgpu.copy_smem_to_gmem(spans.at[warp, pl.ds(before, SPAN)], ref.at[b, tokens, channels])
    plgpu.wait_smem_to_gmem(0)


def _start(kernel, name, width, operands, shape, out_type, scratch, simulate):
    """Runs kernel(b, n, channels, operands, results, scratch) a block, of `width` channels."""
    batch, length, channels = shape
    counts = (batch, length // TOKENS, channels // width)

    def body(block, me, operand_refs, result_refs, scratch_refs):
        del me
        b, n, part = digits(block, *counts)
        columns = pl.ds(part * width, width)
        kernel(b, n, columns, operand_refs, result_refs, scratch_refs)

    return call(
        body,
        operands,
        name=name,
        out_type=out_type,
        blocks=counts[0] * counts[1] * counts[2],
        threads=1,
        scratch=scratch,
        simulate=simulate,
        guard_stores=False,
    )


@functools.partial(jax.jit, static_argnames=("silu", "unit", "simulate"))
def convolve(
    x_BTD, w_WD, bias_D, reach_BNPS, *, silu: bool, unit: int, simulate: bool
) -> jax.Array:
    """y_BTD; T a multiple of `TOKENS`. Arguments as in `short_convolution`."""
    length, taps_count = x_BTD.shape[1], w_WD.shape[0]
    past = taps_count - 1
    block = _block(x_BTD.shape[2], unit)

    def kernel(b, n, channels, operands, results, scratch):
        x_ref, reach_ref, w_ref, *bias_ref = operands
        spans, reaches, barrier = scratch
        first = n * TOKENS
        _copy_spans(x_ref, b, first, channels, past, 0, length, spans, barrier)
        taps, bias = block.begin(reach_ref.at[b, n], reaches, w_ref, bias_ref, channels, barrier)
        push = functools.partial(block.push, spans, reaches, past)

        def group(i, window):
            for j in range(UNROLLED):
                place = i * UNROLLED + j
                reach, window = push(place, window)
                y = _sum_of_taps(reach, window, taps, bias)
                y = y * _sigmoid(y) if silu else y
                y = y * _inverse_length(y) if unit else y
                y = jnp.where(reach >= 0, y, 0.0)
                spans.at[:, place + past][...] = y.astype(BF16)
                window = window[1:]
            return window

        window = []
        for place in range(-past, 0):
            _, window = push(place, window)
        count_up(SPAN // UNROLLED, group, window)
        _store_spans(spans, past, results[0], b, first, channels)

    copies = 1 + WARPS * (1 + (past > 0))
    (y_BTD,) = _start(
        kernel,
        "convolve",
        block.channels,
        [x_BTD, reach_BNPS, w_WD, *([] if bias_D is None else [bias_D[None]])],
        x_BTD.shape,
        (jax.ShapeDtypeStruct(x_BTD.shape, BF16),),
        [
            block.spans(past + SPAN),
            plgpu.SMEM((past + SPAN + past, WARPS), jnp.int32),
            plgpu.Barrier(num_arrivals=copies),
        ],
        simulate,
    )
    return y_BTD


@functools.partial(jax.jit, static_argnames=("silu", "unit", "simulate"))
def convolve_backward(
    x_BTD, w_WD, bias_D, reach_BNPS, dy_BTD, *, silu: bool, unit: int, simulate: bool
):
    """(dx_BTD, dw_WD, dbias_D or None); the sums of taps are computed anew from x."""
    batch, length, width = x_BTD.shape
    taps_count = w_WD.shape[0]
    past = taps_count - 1
    sums_count = taps_count + (bias_D is not None)
    block = _block(width, unit)

    def kernel(b, n, channels, operands, results, scratch):
        x_ref, dy_ref, reach_ref, w_ref, *bias_ref = operands
        dx_ref, sums_ref = results
        xs, dys, reaches, barrier = scratch
        first = n * TOKENS
        _copy_spans(x_ref, b, first, channels, past, past, length, xs, barrier)
        _copy_spans(dy_ref, b, first, channels, 0, past, length, dys, barrier)
        taps, bias = block.begin(reach_ref.at[b, n], reaches, w_ref, bias_ref, channels, barrier)
        push = functools.partial(block.push, xs, reaches, past)

        def step(place, window, pending, sums):
            """`pending` are the gradients of the last X inputs, which later tokens add to."""
            reach, window = push(place, window)
            d = block.load(dys.at[:, place])
            if silu or unit:
                s = _sum_of_taps(reach, window, taps, bias)
                gate = _sigmoid(s) if silu else 1.0
                y = s * gate
                if unit:
                    inverse = _inverse_length(y)
                    u = y * inverse
                    d = (d - u * _sum_of_head(d * u)) * inverse
                d = d * (gate + y * (1.0 - gate)) if silu else d
            d = jnp.where(reach >= 0, d, 0.0)
            backs = [d] + [jnp.where(reach >= back, d, 0.0) for back in range(1, taps_count)]
            pending = [
                p + backs[past - i] * taps[i] for i, p in enumerate([*pending, block.zeros()])
            ]
            if sums is not None:
                terms = [backs[past - i] * window[i] for i in range(taps_count)]
                terms += [] if bias is None else [d]
                sums = [a + t for a, t in zip(sums, terms, strict=True)]
            # Input `place - past` has all its terms. Those before the span go where no one reads.
            dx = jnp.where(block.reaches(reaches, place) >= 0, pending[0], 0.0)
            xs.at[:, place][...] = dx.astype(BF16)
            return window[1:], pending[1:], sums

        def group(i, carry):
            for j in range(UNROLLED):
                carry = step(i * UNROLLED + j, *carry)
            return carry

        window = []
        for place in range(-past, 0):
            _, window = push(place, window)
        carry = (window, [block.zeros()] * past, [block.zeros()] * sums_count)
        window, pending, sums = count_up(SPAN // UNROLLED, group, carry)
        for place in range(SPAN, SPAN + past):
            window, pending, _ = step(place, window, pending, None)
        for i, total in enumerate(sums):
            sums_ref.at[b, n, i, channels][...] = jnp.sum(total, axis=0)
        _store_spans(xs, past, dx_ref, b, first, channels)

    copies = 1 + WARPS * (2 + 3 * (past > 0))
    blocks = length // TOKENS
    dx_BTD, sums_BNSD = _start(
        kernel,
        "convolve_backward",
        block.channels,
        [x_BTD, dy_BTD, reach_BNPS, w_WD, *([] if bias_D is None else [bias_D[None]])],
        x_BTD.shape,
        (
            jax.ShapeDtypeStruct(x_BTD.shape, BF16),
            jax.ShapeDtypeStruct((batch, blocks, sums_count, width), F32),
        ),
        [
            block.spans(past + SPAN + past),
            block.spans(SPAN + past),
            plgpu.SMEM((past + SPAN + past, WARPS), jnp.int32),
            plgpu.Barrier(num_arrivals=copies),
        ],
        simulate,
    )
    sums_SD = sum_tokens(sums_BNSD.reshape(batch, blocks, -1)).reshape(sums_count, width)
    dbias_D = None if bias_D is None else sums_SD[-1].astype(bias_D.dtype)
    return dx_BTD, sums_SD[:taps_count].astype(w_WD.dtype), dbias_D


def _by_span(reach_BT: jax.Array, missing: int, past: int) -> jax.Array:
    """Each span's reaches and those around it; beyond the row's ends lies padding."""
    around = ((0, 0), (past, missing + past))
    reach_BE = jnp.pad(reach_BT.astype(jnp.int32), around, constant_values=-1)
    blocks = (reach_BT.shape[1] + missing) // TOKENS
    place_NPS = (
        np.arange(blocks)[:, None, None] * TOKENS
        + np.arange(past + SPAN + past)[:, None]
        + np.arange(WARPS) * SPAN
    )
    return reach_BE[:, place_NPS]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _core(x_BTD, w_WD, bias_D, reach_BNPS, silu, unit, simulate) -> Any:
    return convolve(x_BTD, w_WD, bias_D, reach_BNPS, silu=silu, unit=unit, simulate=simulate)


def _core_forward(x_BTD, w_WD, bias_D, reach_BNPS, silu, unit, simulate):
    kept = (x_BTD, w_WD, bias_D, reach_BNPS)
    return _core(*kept, silu, unit, simulate), kept


def _core_backward(silu, unit, simulate, kept, dy_BTD):
    gradients = convolve_backward(*kept, dy_BTD, silu=silu, unit=unit, simulate=simulate)
    return *gradients, None


_core.defvjp(_core_forward, _core_backward)


def short_convolution(
    x_BTD: jax.Array,
    w_WD: jax.Array,
    bias_D: jax.Array | None,
    reach_BT: jax.Array,
    *,
    activation: str | None,
    unit: int = 0,
    simulate: bool = False,
) -> jax.Array:
    """y_t = act(bias + sum_i w_i * x_(t - X + i)) over the tokens that t sees; y in bfloat16.

    Args:
      x_BTD: bfloat16; D a multiple of the least of `BLOCKS`, W up to `MAX_TAPS`.
      w_WD, bias_D: any float dtype; bias None for none.
      reach_BT: int32, how many of the X tokens before it a token sees: 0 for a document's first,
        -1 for padding, whose output is 0 and which counts as a zero input.
      activation: "silu" or None.
      unit: scale each so many channels of y to unit length, one of `BLOCKS`; 0 for none.
      simulate: run in Pallas' simulator, on any machine.
    """
    length = x_BTD.shape[1]
    missing = -length % TOKENS
    if missing:
        x_BTD = jnp.pad(x_BTD, ((0, 0), (0, missing), (0, 0)))
    reach_BNPS = _by_span(reach_BT, missing, past=w_WD.shape[0] - 1)
    y_BTD: Any = _core(x_BTD, w_WD, bias_D, reach_BNPS, activation == "silu", unit, simulate)
    return y_BTD[:, :length]

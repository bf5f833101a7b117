"""The short causal depthwise convolution with its activation: each input is read once.

A grid step has a run of tokens of some channels and, as a small block of its own, the tokens before
it. The gradient walks along a row from its end and hands on what the next tokens' sums ask of the
inputs before them; the sums over tokens for the taps stay in their block of the result.

Shapes: B batch, T tokens, D channels, W taps, X = W - 1, S sums (W, and one for a bias).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fastweights.ops.features import UNIT_EPS
from fastweights.ops.mosaic_tpu.blocks import F32
from fastweights.ops.mosaic_tpu.support import HALO, LANES, VMEM_LIMIT

TOKENS = 256  # of a grid step
MOST_CHANNELS = 512


def _shifted(x_ED: jax.Array, first: int, count: int) -> jax.Array:
    return x_ED[first : first + count]


def _sums(extended, reach, w, bias, count):
    """The weighted sums, and the inputs that each tap saw, oldest first."""
    taps = w.shape[0]
    seen = []
    for i in range(taps):
        back = taps - 1 - i
        x = _shifted(extended, HALO - back, count)
        seen.append(jnp.where(reach >= back, x, 0.0) if back else x)
    total = functools.reduce(jnp.add, [x * w[i : i + 1] for i, x in enumerate(seen)])
    return (total if bias is None else total + bias), seen


def _by_head(f, *arrays: jax.Array) -> jax.Array:
    """f on each `LANES` channels."""
    count = arrays[0].shape[1] // LANES
    parts = [f(*(x[:, i * LANES : (i + 1) * LANES] for x in arrays)) for i in range(count)]
    return jnp.concatenate(parts, axis=1)


def _inverse_length(y: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(jnp.sum(y * y, axis=1, keepdims=True) + UNIT_EPS)


def _load(x_ref, reach_ref, before) -> tuple[jax.Array, jax.Array]:
    """(inputs with those before them, zero at padding; reach of the run's tokens)."""
    before_x, before_reach = before
    x = jnp.concatenate([before_x[0].astype(F32), x_ref[0].astype(F32)], axis=0)
    reach = jnp.concatenate([before_reach[0], reach_ref[0]], axis=0)
    return jnp.where(reach >= 0, x, 0.0), reach[HALO:]


def _forward_kernel(operands, y_ref, *, silu, unit):
    x_ref, reach_ref, before, w_ref, bias_ref = operands
    extended, reach = _load(x_ref, reach_ref, before)
    bias = None if bias_ref is None else bias_ref[...]
    y, _ = _sums(extended, reach, w_ref[...], bias, y_ref.shape[1])
    y = y * jax.nn.sigmoid(y) if silu else y
    y = _by_head(lambda y: y * _inverse_length(y), y) if unit else y
    y_ref[0] = jnp.where(reach >= 0, y, 0.0).astype(y_ref.dtype)


def _backward_kernel(operands, dx_ref, sums_ref, later_ref, *, silu, unit):
    x_ref, reach_ref, before, w_ref, bias_ref, dy_ref = operands
    count, taps = dx_ref.shape[1], w_ref.shape[0]

    @pl.when(pl.program_id(2) == 0)
    def _():
        later_ref[...] = jnp.zeros_like(later_ref)
        sums_ref[...] = jnp.zeros_like(sums_ref)

    extended, reach = _load(x_ref, reach_ref, before)
    bias = None if bias_ref is None else bias_ref[...]
    total, seen = _sums(extended, reach, w_ref[...], bias, count)
    gate = jax.nn.sigmoid(total) if silu else jnp.ones_like(total)
    y, d = total * gate, jnp.where(reach >= 0, dy_ref[0].astype(F32), 0.0)

    def through_length(y, d):
        inverse = _inverse_length(y)
        u = y * inverse
        return (d - u * jnp.sum(d * u, axis=1, keepdims=True)) * inverse

    d = _by_head(through_length, y, d) if unit else d
    d = d * (gate + y * (1.0 - gate)) if silu else d

    # What each tap's sums ask of the inputs `back` tokens before them, this run's and the next's.
    dx = d * w_ref[taps - 1 :, :]
    for i in range(taps - 1):
        back = taps - 1 - i
        asked = jnp.where(reach >= back, d, 0.0) * w_ref[i : i + 1, :]
        place = slice(i * HALO, (i + 1) * HALO)
        whole = jnp.concatenate([asked, later_ref[place]], axis=0)
        dx = dx + _shifted(whole, back, count)
        later_ref[place] = asked[:HALO]
    dx_ref[0] = jnp.where(reach >= 0, dx, 0.0).astype(dx_ref.dtype)
    rows = [jnp.sum(d * x, axis=0, keepdims=True) for x in seen]
    rows += [] if bias_ref is None else [jnp.sum(d, axis=0, keepdims=True)]
    sums_ref[0] += jnp.concatenate(rows, axis=0)


def _call(kernel, x_BTD, w_WD, bias_D, reach_BT1, extra, outputs, out_specs, scratch, *, reverse,
          name, interpret):  # fmt: skip
    """Runs the kernel over rows, channels and runs of tokens; extra operands are of tokens."""
    batch, length, width = x_BTD.shape
    channels = max(n for n in range(LANES, MOST_CHANNELS + 1, LANES) if width % n == 0)
    steps = length // TOKENS

    def at(t):
        return steps - 1 - t if reverse else t

    def run(width, own):
        index = (lambda b, c, t: (b, at(t), c)) if own else (lambda b, c, t: (b, at(t), 0))
        return pl.BlockSpec((1, TOKENS, width), index)

    def halo(width, own):
        def index(b, c, t):
            # Before a row's first tokens there are none: its reach says to ignore these.
            return b, jnp.maximum(at(t) * (TOKENS // HALO) - 1, 0), c if own else 0

        return pl.BlockSpec((1, HALO, width), index)

    def weights(count):
        return pl.BlockSpec((count, channels), lambda b, c, t: (0, c))

    bias = None if bias_D is None else bias_D.astype(F32)[None]
    operands = (x_BTD, reach_BT1, (x_BTD, reach_BT1), w_WD.astype(F32), bias, *extra)
    tokens = run(channels, True)
    in_specs = (
        tokens, run(1, False), (halo(channels, True), halo(1, False)), weights(w_WD.shape[0]),
        None if bias is None else weights(1), *[tokens] * len(extra),
    )  # fmt: skip
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(batch, width // channels, steps),
        in_specs=[in_specs],
        out_specs=out_specs(tokens, channels),
        out_shape=outputs,
        scratch_shapes=scratch(channels),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
    )(operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _core(x_BTD, w_WD, bias_D, reach_BT1, silu, unit, interpret) -> Any:
    return _call(
        functools.partial(_forward_kernel, silu=silu, unit=unit),
        x_BTD, w_WD, bias_D, reach_BT1, (),
        jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),
        lambda tokens, channels: tokens,
        lambda channels: [],
        reverse=False, name="convolution_forward", interpret=interpret,
    )  # fmt: skip


def _core_forward(x_BTD, w_WD, bias_D, reach_BT1, silu, unit, interpret):
    kept = (x_BTD, w_WD, bias_D, reach_BT1)
    return _core(*kept, silu, unit, interpret), kept


def _core_backward(silu, unit, interpret, kept, dy_BTD):
    x_BTD, w_WD, bias_D, reach_BT1 = kept
    batch, _, width = x_BTD.shape
    taps = w_WD.shape[0]
    sums = taps + (bias_D is not None)
    dx_BTD, sums_BSD = _call(
        functools.partial(_backward_kernel, silu=silu, unit=unit),
        x_BTD, w_WD, bias_D, reach_BT1, (dy_BTD,),
        (
            jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),
            jax.ShapeDtypeStruct((batch, sums, width), F32),
        ),
        lambda tokens, channels: (
            tokens, pl.BlockSpec((1, sums, channels), lambda b, c, t: (b, 0, c))
        ),
        lambda channels: [pltpu.VMEM((max(1, taps - 1) * HALO, channels), F32)],
        reverse=True, name="convolution_backward", interpret=interpret,
    )  # fmt: skip
    sums_SD = jnp.sum(sums_BSD, axis=0)
    dbias_D = None if bias_D is None else sums_SD[-1].astype(bias_D.dtype)
    return dx_BTD, sums_SD[:taps].astype(w_WD.dtype), dbias_D, None


_core.defvjp(_core_forward, _core_backward)


def short_convolution(
    x_BTD: jax.Array,
    w_WD: jax.Array,
    bias_D: jax.Array | None,
    reach_BT: jax.Array,
    *,
    activation: str | None,
    unit: int = 0,
    interpret: Any = False,
) -> jax.Array:
    """y_t = act(bias + sum_i w_i * x_(t - X + i)) over the tokens that t sees; y in x's dtype.

    Args:
      x_BTD: bfloat16 or float32; D a multiple of `LANES`, W up to `MAX_TAPS`.
      w_WD, bias_D: any float dtype; bias None for none.
      reach_BT: int32, how many of the X tokens before it a token sees: 0 for a document's first,
        -1 for padding, whose output is 0 and which counts as a zero input.
      activation: "silu" or None.
      unit: scale each so many channels of y, `LANES`, to unit length; 0 for none.
      interpret: run in Pallas' interpreter, on any machine: True or `pltpu.InterpretParams`.
    """
    length = x_BTD.shape[1]
    missing = ((0, 0), (0, -length % TOKENS))
    x_BTD = jnp.pad(x_BTD, (*missing, (0, 0)))
    reach_BT1 = jnp.pad(reach_BT.astype(F32), missing, constant_values=-1)[..., None]
    y_BTD: Any = _core(x_BTD, w_WD, bias_D, reach_BT1, activation == "silu", unit, interpret)
    return y_BTD[:, :length]

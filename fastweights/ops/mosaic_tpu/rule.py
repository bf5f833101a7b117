"""The recurrent rules through the TPU kernels, under one hand-written gradient.

The algebra is that of `chunked.py`, which is the twin on other machines.

Shapes as in `blocks.py`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fastweights.ops.chunked import MIN_LOG_DECAY
from fastweights.ops.mosaic_tpu import blocks
from fastweights.ops.mosaic_tpu.backward import gate_gradients, scan_backward
from fastweights.ops.mosaic_tpu.blocks import BF16, F32, Form
from fastweights.ops.mosaic_tpu.forward import scan_forward
from fastweights.ops.mosaic_tpu.support import LANES

CHUNKS = 4  # of a grid step: a state kept every 256 tokens is a quarter of q, k and v


class _Residuals(NamedTuple):
    inputs: Any
    document_BT: jax.Array | None
    gates: blocks.Gates
    saved: Any  # forward.Saved


def _run(inputs, state_BGKV, document_BT, form, save, interpret):
    q, k, v, g, beta = inputs
    shape = (*v.shape[:2], state_BGKV.shape[1])
    gates = blocks.make_gates(g, beta, document_BT, shape, form)
    out = scan_forward(q, k, v, gates, state_BGKV, form, save=save, interpret=interpret)
    return (out.o_BTGV, out.state_BGKV), gates, out.saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _core(inputs, state_BGKV, document_BT, form, interpret) -> Any:
    return _run(inputs, state_BGKV, document_BT, form, False, interpret)[0]


def _core_forward(inputs, state_BGKV, document_BT, form, interpret):
    out, gates, saved = _run(inputs, state_BGKV, document_BT, form, True, interpret)

    def named(tree):
        # For remat policies: kept, they spare the backward pass the forward kernel.
        return jax.tree.map(lambda x: checkpoint_name(x, "memory_saved"), tree)

    return named(out), _Residuals(inputs, document_BT, gates, named(saved))


def _core_backward(form, interpret, residuals: _Residuals, cotangents):
    (q, k, v, g, _), document_BT, gates, saved = residuals
    do, dS = cotangents
    out = scan_backward(q, k, v, gates, saved, do, dS, form, interpret=interpret)

    def shared(gradient_BTX):
        if gradient_BTX.shape == q.shape:
            return gradient_BTX
        parts = gradient_BTX.reshape(*q.shape[:2], q.shape[2] // form.key_dim, -1, form.key_dim)
        return jnp.sum(parts, axis=3).reshape(q.shape).astype(q.dtype)

    dg, dbeta = gate_gradients(out, form)
    if dg is not None:
        dg = jnp.where(g > MIN_LOG_DECAY, dg, 0.0)
        if document_BT is not None:
            # Zero but for rounding: the decay of a first token reaches nothing.
            begins = jnp.diff(document_BT, axis=1, prepend=0) > 0
            dg = jnp.where(begins[..., None], 0.0, dg)
    gradients = (shared(out.dq_BTX), shared(out.dk_BTX), out.dv_BTX, dg, dbeta)
    return gradients, out.dstate_BGKV, None


_core.defvjp(_core_forward, _core_backward)


def core(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    g_BTG: jax.Array | None,
    beta_BTG: jax.Array | None,
    initial_state_BGKV: jax.Array,
    document_BT: jax.Array | None,
    *,
    scale: float,
    chunk_size: int = 64,
    chunks: int = CHUNKS,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `reference.core`; the state in float32.

    Further args:
      chunk_size: 64 or 128.
      chunks: of a grid step; the gradient keeps one state a step and makes the others again.
      interpret: run in Pallas' interpreter, on any machine: True or `pltpu.InterpretParams`.
    """
    batch, length, heads, key_dim = q_BTHK.shape
    value_heads, value_dim = v_BTGV.shape[2:]
    wide_key, wide_value = key_dim + -key_dim % LANES, value_dim + -value_dim % LANES
    wide = any(x.dtype == F32 for x in (q_BTHK, k_BTHK, v_BTGV))
    room = blocks.room_for_heads(wide_key, wide_value, chunk_size, wide)
    together = blocks.count_heads(heads, value_heads, room)
    form = Form(
        chunk=chunk_size,
        chunks=min(chunks, -(-length // chunk_size)),
        heads=together,
        keys=max(1, together * heads // value_heads),
        key_dim=wide_key,
        value_dim=wide_value,
        scale=scale,
        gated=g_BTG is not None,
        delta=beta_BTG is not None,
        packed=document_BT is not None,
        wide=wide,
    )

    def pad(x, mode="constant"):
        widths = [(0, 0), (0, -length % form.tokens)] + [(0, 0)] * (x.ndim - 2)
        if x.ndim == 4:
            widths[3] = (0, -x.shape[3] % LANES)
        x = jnp.pad(x, widths, mode=mode) if any(high for _, high in widths) else x
        return x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x

    dtype = F32 if wide else BF16
    q, k, v = (pad(x.astype(dtype)) for x in (q_BTHK, k_BTHK, v_BTGV))
    g, beta = (None if x is None else pad(x.astype(F32)) for x in (g_BTG, beta_BTG))
    document = None if document_BT is None else pad(document_BT, "edge")
    widths = [(0, 0), (0, 0), (0, -key_dim % LANES), (0, -value_dim % LANES)]
    state = jnp.pad(initial_state_BGKV, widths)
    out: Any = _core((q, k, v, g, beta), state, document, form, interpret)
    o = out[0].reshape(batch, -1, value_heads, form.value_dim)[:, :length, :, :value_dim]
    return o.astype(v_BTGV.dtype), out[1][:, :, :key_dim, :value_dim]

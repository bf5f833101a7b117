"""The recurrent rules through the Hopper kernels, under one hand-written gradient.

The algebra is that of `chunked.py`, which is the twin on other machines. Here the work is cut into
kernels (`gates`, `inverse`, `forward`, `backward_scan`, `backward_local`) and, for few heads, the
passes of `pieces`. Behind them XLA sums the gradients of shared query/key heads.

Shapes: B batch, T tokens, H query/key heads, G value heads, K key dim, V value dim, N chunks of 64.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fastweights.ops.chunked import MIN_LOG_DECAY
from fastweights.ops.mosaic_gpu import gates as gating
from fastweights.ops.mosaic_gpu import pieces as piecing
from fastweights.ops.mosaic_gpu.backward_local import local_gradients
from fastweights.ops.mosaic_gpu.backward_scan import scan_backward
from fastweights.ops.mosaic_gpu.forward import scan_forward
from fastweights.ops.mosaic_gpu.inverse import gated_inverse
from fastweights.ops.mosaic_gpu.support import TILE
from fastweights.ops.mosaic_gpu.tiles import BF16, CHUNK, F32, is_wide


class _Prepared(NamedTuple):
    """What both passes use: None without delta (A) or with one piece (plan, transitions)."""

    gates: gating.Gates
    A_BGNCC: Any
    plan: Any
    transitions: Any


class _Residuals(NamedTuple):
    inputs: Any
    document_BT: jax.Array | None
    prepared: _Prepared
    saved: Any  # forward.Saved


def _run(inputs, state_BGVK, document_BT, scale, pieces, save, simulate):
    q, k, v, g, beta = inputs
    batch, length, value_heads, _ = v.shape
    g_BTG = jnp.zeros((batch, length, value_heads), F32) if g is None else g
    gates = gating.make_gates(g_BTG, beta, document_BT, simulate=simulate)
    A = stretch_BGNC = plan = transitions = None
    if beta is not None:
        A, stretch_BGNC = gated_inverse(k, gates, simulate=simulate)
    states = state_BGVK[:, :, None]
    if pieces > 1:
        plan = piecing.make_plan(gates, pieces, stretch_BGNC)
        ends = piecing.final_states(k, v, A, gates, state_BGVK, plan, simulate=simulate)
        transitions = _transitions(k, A, gates, plan, simulate)
        states = piecing.combine(
            ends, transitions, plan, state_BGVK, reverse=False, simulate=simulate
        )
    forward = scan_forward(q, k, v, A, gates, states, scale=scale, save=save, simulate=simulate)
    out = forward.o_BTGV, forward.state_BGVK
    return out, _Prepared(gates, A, plan, transitions), forward.saved


def _transitions(k_BTHK, A_BGNCC, gates, plan, simulate):
    batch, heads, pieces = plan.exact_BGP.shape
    if pieces == 2:  # nothing passes through a whole piece but at the row's ends
        nothing = jnp.zeros((batch, heads, pieces, *[k_BTHK.shape[-1]] * 2), BF16)
        return piecing.Transitions(nothing, nothing)
    return piecing.final_states(k_BTHK, None, A_BGNCC, gates, None, plan, simulate=simulate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _core(inputs, state_BGVK, document_BT, scale, pieces, simulate) -> Any:
    return _run(inputs, state_BGVK, document_BT, scale, pieces, False, simulate)[0]


def _core_forward(inputs, state_BGVK, document_BT, scale, pieces, simulate):
    out, prepared, saved = _run(inputs, state_BGVK, document_BT, scale, pieces, True, simulate)

    def named(tree):
        # For remat policies: kept, they spare the backward pass the first two kernels.
        return jax.tree.map(lambda x: checkpoint_name(x, "memory_saved"), tree)

    return named(out), _Residuals(inputs, document_BT, named(prepared), named(saved))


def _core_backward(scale, pieces, simulate, residuals: _Residuals, cotangents):
    (q, k, v, g, beta), document_BT, prepared, saved = residuals
    gates, A, plan, transitions = prepared
    do, dS = cotangents
    scan = functools.partial(
        scan_backward, q, k, do, A, saved.scores_BGNCC, gates,
        pieces=pieces, scale=scale, simulate=simulate,
    )  # fmt: skip
    ends = dS[:, :, None]
    if plan is not None:
        heads_of_pieces = scan(dS, plan.head_BGP)
        ends = piecing.combine(
            heads_of_pieces, transitions, plan, dS, reverse=True, simulate=simulate
        )
    dv, dstates, dS_initial = scan(ends)
    local = local_gradients(
        q, k, do, v if beta is None else saved.u_BTGV, None if beta is None else dv,
        saved.states_BGNVK, dstates, gates, scale=scale, simulate=simulate,
    )  # fmt: skip

    def shared(gradient_BTGK):
        grouped = gradient_BTGK.reshape(*q.shape[:3], -1, q.shape[3])
        return jnp.sum(grouped, axis=3, dtype=F32).astype(q.dtype)

    dg, dbeta = gating.gradients(
        local.felt_JBGNC, local.written_JBGNC, local.kept_JBGNC, local.dot_JBGNC, gates.beta_BGNC,
        simulate=simulate,
    )  # fmt: skip
    if g is None:
        dg = None
    else:
        dg = jnp.where(g >= MIN_LOG_DECAY, dg, 0.0)
        if document_BT is not None:
            # Zero but for rounding: the decay of a first token reaches nothing.
            dg = jnp.where(gating.begins(document_BT)[..., None], 0.0, dg)
    return (shared(local.dq_BTGK), shared(local.dk_BTGK), dv, dg, dbeta), dS_initial, None


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
    pieces: int | None = None,
    simulate: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `reference.core`; q, k and v in bfloat16, the state in float32.

    Further args:
      pieces: into how many pieces a row is cut; None chooses (`pieces.count_pieces`).
      simulate: run in Pallas' simulator, on any machine.
    """
    batch, length, _, key_dim = q_BTHK.shape
    value_heads, value_dim = v_BTGV.shape[2:]
    if pieces is None:
        pieces = piecing.count_pieces(batch * value_heads, -(-length // CHUNK))
        if is_wide(key_dim):  # the kernels for pieces have no room for these
            pieces = 1

    def pad(x, mode="constant"):
        widths = [(0, 0), (0, -x.shape[1] % (CHUNK * pieces))] + [(0, 0)] * (x.ndim - 2)
        if x.ndim == 4:
            widths[3] = (0, -x.shape[3] % TILE)
        return jnp.pad(x, widths, mode=mode) if any(high for _, high in widths) else x

    # The kernels read gates in float32, whatever a caller has them in.
    gates = jax.tree.map(lambda x: x.astype(F32), (g_BTG, beta_BTG))
    inputs: Any = jax.tree.map(pad, (q_BTHK, k_BTHK, v_BTGV, *gates))
    document_BT = None if document_BT is None else pad(document_BT, "edge")
    state_BGVK = jnp.swapaxes(initial_state_BGKV, -1, -2)
    widths = [(0, 0), (0, 0), (0, -value_dim % TILE), (0, -key_dim % TILE)]
    out: Any = _core(inputs, jnp.pad(state_BGVK, widths), document_BT, scale, pieces, simulate)
    o, state = out
    state = jnp.swapaxes(state[:, :, :value_dim, :key_dim], -1, -2)
    return o[:, :length, :, :value_dim], state

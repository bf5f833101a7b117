"""The rules' forward pass on a TPU: outputs and final state, in one walk along each row.

The state stays in VMEM in float32. What the gradient needs is stored on the way: the inverse, and
the state before each grid step. All products are nearly float32 (`blocks.dot_split`): with several
heads side by side the matrix units have room for it, and near-identical keys need it.

Shapes as in `blocks.py`; S steps, each `Form.chunks` chunks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fastweights.ops.mosaic_tpu import blocks
from fastweights.ops.mosaic_tpu.blocks import (
    F32,
    NT,
    TN,
    Form,
    Gates,
    Read,
    dot_split,
    each,
    stack,
    times,
)
from fastweights.ops.mosaic_tpu.inverse import unit_lower_inverses


class Saved(NamedTuple):
    """What the gradient needs, or refs to it, or blocks; float32.

    Attributes:
      states_BSGKV: the state before each step.
      inverse_BJTC: (I + strictly_lower(diag(beta) K K^T))^-1, a step's heads in lanes; None without
        error correction.
    """

    states_BSGKV: Any
    inverse_BJTC: Any


class Forward(NamedTuple):
    """Results in v's dtype and in float32, or refs to them, or their blocks."""

    o_BTGV: Any
    state_BGKV: Any
    saved: Saved | None


def corrected(vs, reads, inverses, gates: Read, form: Form) -> list[jax.Array]:
    """U of each head: the values less what the state holds of them (`reads`, K S)."""
    if not form.delta:
        return vs
    us = each(lambda v, a, x: v - times(a, x), vs, gates.read_C1, reads)
    us = each(lambda beta, x: beta * x, gates.beta_C1, us)
    dot = functools.partial(dot_split, wide=form.wide)
    return each(lambda X, D, x: dot(X * D, x), inverses, gates.within_CC, us)


def next_states(ks, us, states, gates: Read, form: Form) -> list[jax.Array]:
    """Args: a key head's keys for each value head."""
    written = each(times, gates.write_C1, us)
    written = each(functools.partial(dot_split, axes=TN, wide=form.wide), ks, written)
    return each(lambda c, S, x: times(c, S) + x, gates.keep_11, states, written)


def _kernel(operands, results: Forward, now_ref, *, form: Form) -> None:
    q_ref, k_ref, v_ref, gate_refs, before_ref = operands
    saved = results.saved
    step, steps = pl.program_id(2), pl.num_programs(2)
    heads, K, V, C = range(form.heads), form.key_dim, form.value_dim, form.chunk
    of_key = [form.key_of(h) for h in heads]
    dot = functools.partial(dot_split, wide=form.wide)

    @pl.when(step == 0)
    def _():
        now_ref[...] = before_ref[0]

    if saved is not None:
        saved.states_BSGKV[0, 0] = now_ref[...]

    def chunk(n, _):
        at = pl.ds(pl.multiple_of(n * C, C), C)
        gates = blocks.read_gates(gate_refs, at, n, form)
        # Keys are below queries without error correction too: for less work the compiler's schedule
        # is longer (docs/kernels.md).
        ks = [k_ref[0, at, i * K : (i + 1) * K] for i in range(form.keys)]
        qks = [stack(q_ref[0, at, i * K : (i + 1) * K], k) for i, k in enumerate(ks)]
        pairs = each(lambda qk, k: dot(qk, k, NT), qks, ks)  # Q K^T above K K^T
        states = [now_ref[h] for h in heads]
        reads = [dot(qks[i], S) for i, S in zip(of_key, states, strict=True)]
        vs = [v_ref[0, at, h * V : (h + 1) * V].astype(F32) for h in heads]
        inverses = []
        if form.delta:
            inverses = _inverses([pairs[i][C:] for i in of_key], gates.beta_C1, form)
        if saved is not None:
            for h, X in enumerate(inverses):
                saved.inverse_BJTC[0, 0, at, h * C : (h + 1) * C] = X
        us = corrected(vs, [x[C:] for x in reads], inverses, gates, form)
        scores = [pairs[i][:C] * D for i, D in zip(of_key, gates.within_CC, strict=True)]
        inner = each(dot, scores, us)
        outputs = each(lambda a, x, y: times(a, x[:C]) + y, gates.read_C1, reads, inner)
        states = next_states([ks[i] for i in of_key], us, states, gates, form)
        for h in heads:
            o_ref = results.o_BTGV
            o_ref[0, at, h * V : (h + 1) * V] = (form.scale * outputs[h]).astype(o_ref.dtype)
            now_ref[h] = states[h]
        return 0

    jax.lax.fori_loop(0, form.chunks, chunk, 0)

    @pl.when(step == steps - 1)
    def _():
        results.state_BGKV[0] = now_ref[...]


def _inverses(grams: list[jax.Array], betas: list[jax.Array], form: Form) -> list[jax.Array]:
    size = form.chunk
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (size, size), i) for i in range(2))
    Ls = each(lambda gram, beta: jnp.where(row > lane, beta * gram, 0.0), grams, betas)
    return unit_lower_inverses(Ls, wide=form.wide)


def scan_forward(
    q_BTX: jax.Array,
    k_BTX: jax.Array,
    v_BTX: jax.Array,
    gates: Gates,
    state_BGKV: jax.Array,
    form: Form,
    *,
    save: bool,
    interpret: Any,
) -> Forward:
    """Args: heads side by side in the last axis; T a multiple of `form.tokens`; a float32 state."""
    batch, length, _ = v_BTX.shape
    value_heads = state_BGKV.shape[1]
    head_blocks, steps = value_heads // form.heads, length // form.tokens
    groups = value_heads * form.key_dim // q_BTX.shape[2]
    spec = blocks.specs(form, groups, steps, reverse=False)

    def single(*shape):
        return jax.ShapeDtypeStruct(shape, F32)

    like_v = jax.ShapeDtypeStruct(v_BTX.shape, v_BTX.dtype)
    saved = saved_specs = None
    if save:
        states = single(batch, steps, *state_BGKV.shape[1:])
        saved, saved_specs = Saved(states, None), Saved(spec.kept, None)
        if form.delta:
            inverse = single(batch, head_blocks, length, form.heads * form.chunk)
            saved = Saved(states, inverse)
            saved_specs = Saved(spec.kept, spec.inverse)
    return blocks.call(
        _kernel,
        form,
        (batch, head_blocks, steps),
        (q_BTX, k_BTX, v_BTX, gates, state_BGKV),
        (spec.keys, spec.keys, spec.values, spec.gates, spec.states),
        Forward(like_v, single(*state_BGKV.shape), saved),
        Forward(spec.values, spec.states, saved_specs),
        [pltpu.VMEM((form.heads, form.key_dim, form.value_dim), F32)],
        name="rule_forward",
        interpret=interpret,
    )

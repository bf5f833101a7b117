"""The rules' gradient on a TPU, in one walk along each row from its end.

A grid step makes the states and corrected values of its chunks again from the state that was kept,
then goes through the chunks backwards with the state's gradient in VMEM in float32. Products are
nearly float32 (`blocks.dot_split`): a gate's gradient is a difference of their sums, and one
rounded to bfloat16 would lose it. Gradients of the value heads of a query/key head are summed
before they are stored, and those of the gates taken from numbers that were never rounded.

Shapes as in `blocks.py`.
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
    dot_split,
    each,
    stack,
    times,
)
from fastweights.ops.mosaic_tpu.forward import Saved, corrected, next_states


class Backward(NamedTuple):
    """Gradients, and the sums that those of the gates are made of. Or refs to them, or blocks.

    Attributes:
      dq_BTX, dk_BTX: a head for each key head of each head block, in q's dtype if that is every
        one, else in float32.
      dv_BTX: in v's dtype.
      dstate_BGKV: float32.
      columns_BJTF: per token and head of the block: what the decays up to it are felt by, what the
        decays after it are, and the gradient of beta; those that there are.
      rows_BJNGX: what the scores of a token as a key take from the first of these; with decay.
      kept_BJNGX: sums by the factor on the whole state, one a value channel; with decay.
    """

    dq_BTX: Any
    dk_BTX: Any
    dv_BTX: Any
    dstate_BGKV: Any
    columns_BJTF: Any
    rows_BJNGX: Any
    kept_BJNGX: Any


def _sum_lanes(*terms: Any) -> jax.Array:
    """Of arrays of any width, row by row; equal widths are added before they are summed."""
    by_width: dict[int, jax.Array] = {}
    for x in terms:
        if x is not None:
            width = x.shape[1]
            by_width[width] = by_width[width] + x if width in by_width else x
    sums = [jnp.sum(x, axis=1, keepdims=True) for x in by_width.values()]
    return functools.reduce(jnp.add, sums)


def _kernel(operands, results: Backward, states_ref, us_ref, dnow_ref, *, form: Form) -> None:
    q_ref, k_ref, v_ref, gate_refs, saved, do_ref, dend_ref = operands
    step, steps = pl.program_id(2), pl.num_programs(2)
    heads, K, V, C = range(form.heads), form.key_dim, form.value_dim, form.chunk
    of_key = [form.key_of(h) for h in heads]
    dot = functools.partial(dot_split, wide=form.wide)

    @pl.when(step == 0)
    def _():
        dnow_ref[...] = dend_ref[0]

    def tokens(n):
        return pl.ds(pl.multiple_of(n * C, C), C)

    def keys(ref, at):
        return [ref[0, at, i * K : (i + 1) * K] for i in range(form.keys)]

    def values(ref, at):
        return [ref[0, at, h * V : (h + 1) * V] for h in heads]

    def inverses(at):
        if not form.delta:
            return []
        return [saved.inverse_BJTC[0, 0, at, h * C : (h + 1) * C] for h in heads]

    def again(n, _):
        at = tokens(n)
        gates = blocks.read_gates(gate_refs, at, n, form)
        ks, vs = keys(k_ref, at), [v.astype(F32) for v in values(v_ref, at)]
        k_of, states = [ks[i] for i in of_key], [states_ref[n, h] for h in heads]
        reads = each(dot, k_of, states) if form.delta else []
        us = corrected(vs, reads, inverses(at), gates, form)
        states = next_states(k_of, us, states, gates, form)
        for h in heads:
            us_ref[at, h * V : (h + 1) * V] = us[h]
            states_ref[n + 1, h] = states[h]
        return 0

    states_ref[0] = saved.states_BSGKV[0, 0]
    jax.lax.fori_loop(0, form.chunks, again, 0)

    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (C, C), i) for i in range(2))

    def chunk(i, _):
        n = form.chunks - 1 - i
        at = tokens(n)
        gates = blocks.read_gates(gate_refs, at, n, form)
        a, b, beta, keep, within = (
            gates.read_C1, gates.write_C1, gates.beta_C1, gates.keep_11, gates.within_CC
        )  # fmt: skip
        qs, ks, vs = keys(q_ref, at), keys(k_ref, at), values(v_ref, at)
        us = [us_ref[at, h * V : (h + 1) * V] for h in heads]
        q_of, k_of = [qs[i] for i in of_key], [ks[i] for i in of_key]
        dos = values(do_ref, at)
        # The scale goes into factors, for a scaled bfloat16 gradient would be rounded once more.
        read_out = [times(x, form.scale) for x in a]
        scaled = [form.scale * D for D in within]
        states = [states_ref[n, h] for h in heads]
        dstates = [dnow_ref[h] for h in heads]
        qks = each(stack, qs, ks)
        pairs = each(lambda qk, k: dot(qk, k, NT), qks, ks)
        qk = [pairs[i][:C] for i in of_key]

        # Through the outputs and the next state to the corrected values, and on to the values.
        scores = each(jnp.multiply, qk, scaled)
        dus = each(lambda P, do: dot(P, do, TN), scores, dos)
        dus = each(lambda x, b, k, dS: x + times(b, dot(k, dS)), dus, b, k_of, dstates)
        if form.delta:
            ys = each(lambda X, D, du: dot(X * D, du, TN), inverses(at), within, dus)
            dvs = each(jnp.multiply, beta, ys)
        else:
            ys, dvs = [None] * form.heads, dus

        # Per value head: by scores and by reads of the state.
        both = dos if not form.delta else each(stack, [x.astype(F32) for x in dos], ys)
        from_state = each(lambda x, S: dot(x, S, NT), both, states)
        from_values = each(lambda do, u: dot(do, u, NT), dos, us)
        dscores = each(jnp.multiply, from_values, scaled)
        dq_read = each(lambda r, x: r * x[:C], read_out, from_state)
        dk_write = each(lambda b, u, dS: times(b, dot(u, dS, NT)), b, us, dstates)
        dq = each(lambda ds, k, x: dot(ds, k) + x, dscores, k_of, dq_read)
        dk = each(lambda ds, q, x: dot(ds, q, TN) + x, dscores, q_of, dk_write)
        crossing = each(jnp.multiply, dscores, qk)
        felt = each(lambda x, q: x * q.astype(F32), dq_read, q_of)
        dbeta: list[Any] = []
        if form.delta:
            gram = [pairs[i][C:] for i in of_key]
            dL = each(lambda y, u, D: -dot(y, u, NT) * D, ys, us, within)
            dL = [jnp.where(row > lane, x, 0.0) for x in dL]
            dk_read = each(lambda a, x: -times(a, x[C:]), a, from_state)
            errors = each(lambda x, k: x * k.astype(F32), dk_read, k_of)
            dbeta = each(
                lambda y, v, dL, gram, e: _sum_lanes(y * v.astype(F32), dL * gram, e),
                ys, vs, dL, gram, errors,
            )  # fmt: skip
            dgram = each(jnp.multiply, beta, dL)
            dk = each(lambda x, dG, k: x + dot(dG, k) + dot(dG, k, TN), dk, dgram, k_of)
            dk = each(lambda x, beta, r: x + beta * r, dk, beta, dk_read)
            crossing = each(lambda x, dG, gram: x + dG * gram, crossing, dgram, gram)
            felt = each(lambda x, beta, e: x + beta * e, felt, beta, errors)

        # The state before the chunk.
        reads = each(lambda r, do: r * do.astype(F32), read_out, dos)
        if form.delta:
            reads = each(lambda x, a, dv: stack(x, -times(a, dv)), reads, a, dvs)
        sides = [(qks if form.delta else qs)[i] for i in of_key]
        dbefore = each(lambda side, x: dot(side, x, TN), sides, reads)
        dbefore = each(lambda x, c, dS: x + times(c, dS), dbefore, keep, dstates)

        for h in heads:
            dnow_ref[h] = dbefore[h]
            dv_ref = results.dv_BTX
            dv_ref[0, at, h * V : (h + 1) * V] = dvs[h].astype(dv_ref.dtype)
        for ref, parts in ((results.dq_BTX, dq), (results.dk_BTX, dk)):
            for i in range(form.keys):
                mine = [x for x, j in zip(parts, of_key, strict=True) if i == j]
                total = functools.reduce(jnp.add, mine)
                ref[0, at, i * K : (i + 1) * K] = total.astype(ref.dtype)

        columns = []
        if form.gated:
            # The diagonal, whose exponent is 0, is left out: it would drown all else under strong
            # decay.
            crossing = [jnp.where(row > lane, x, 0.0) for x in crossing]
            columns += each(_sum_lanes, felt, crossing)
            columns += each(lambda x, k: _sum_lanes(x * k.astype(F32)), dk_write, k_of)
            for h in heads:
                by_key = jnp.sum(crossing[h], axis=0, keepdims=True)
                results.rows_BJNGX[0, 0, n, h : h + 1] = by_key
                kept = jnp.sum(dstates[h] * states[h], axis=0, keepdims=True)
                results.kept_BJNGX[0, 0, n, h : h + 1] = times(keep[h], kept)
        columns += dbeta
        if columns:
            place = jax.lax.broadcasted_iota(jnp.int32, (C, len(columns)), 1)
            block = jnp.zeros((C, len(columns)), F32)
            for i, x in enumerate(columns):
                block = jnp.where(place == i, x, block)
            results.columns_BJTF[0, 0, at] = block
        return 0

    jax.lax.fori_loop(0, form.chunks, chunk, 0)

    @pl.when(step == steps - 1)
    def _():
        results.dstate_BGKV[0] = dnow_ref[...]


def scan_backward(
    q_BTX: jax.Array,
    k_BTX: jax.Array,
    v_BTX: jax.Array,
    gates: Gates,
    saved: Saved,
    do_BTX: jax.Array,
    dend_BGKV: jax.Array,
    form: Form,
    *,
    interpret: Any,
) -> Backward:
    """Args: as in `scan_forward`, what it saved, and the gradients of its two results."""
    batch, length, _ = v_BTX.shape
    value_heads = dend_BGKV.shape[1]
    head_blocks, steps = value_heads // form.heads, length // form.tokens
    groups = value_heads * form.key_dim // q_BTX.shape[2]
    spec = blocks.specs(form, groups, steps, reverse=True)
    chunks = length // form.chunk

    def of(*shape, dtype=F32):
        return jax.ShapeDtypeStruct(shape, dtype)

    whole = form.heads % groups == 0
    of_keys = of(
        batch, length, head_blocks * form.keys * form.key_dim, dtype=q_BTX.dtype if whole else F32
    )
    features = form.heads * (2 * form.gated + form.delta)

    def at(s):
        return steps - 1 - s

    keys = pl.BlockSpec((1, form.tokens, form.keys * form.key_dim), lambda b, j, s: (b, at(s), j))
    columns = columns_spec = rows = rows_spec = kept = kept_spec = None
    if features:
        columns = of(batch, head_blocks, length, features)
        columns_spec = pl.BlockSpec((1, 1, form.tokens, features), lambda b, j, s: (b, j, at(s), 0))

    def per_chunk(width):
        block = (1, 1, form.chunks, form.heads, width)
        array = of(batch, head_blocks, chunks, form.heads, width)
        return array, pl.BlockSpec(block, lambda b, j, s: (b, j, at(s), 0, 0))

    if form.gated:
        (rows, rows_spec), (kept, kept_spec) = per_chunk(form.chunk), per_chunk(form.value_dim)
    like_v = of(*v_BTX.shape, dtype=v_BTX.dtype)
    saved_spec = Saved(spec.kept, spec.inverse if form.delta else None)
    return blocks.call(
        _kernel,
        form,
        (batch, head_blocks, steps),
        (q_BTX, k_BTX, v_BTX, gates, saved, do_BTX, dend_BGKV),
        (spec.keys, spec.keys, spec.values, spec.gates, saved_spec, spec.values, spec.states),
        Backward(of_keys, of_keys, like_v, of(*dend_BGKV.shape), columns, rows, kept),
        Backward(keys, keys, spec.values, spec.states, columns_spec, rows_spec, kept_spec),
        [
            pltpu.VMEM((form.chunks + 1, form.heads, form.key_dim, form.value_dim), F32),
            pltpu.VMEM((form.tokens, form.heads * form.value_dim), F32),
            pltpu.VMEM((form.heads, form.key_dim, form.value_dim), F32),
        ],
        name="rule_backward",
        interpret=interpret,
    )


def gate_gradients(out: Backward, form: Form) -> tuple[jax.Array | None, jax.Array | None]:
    """(dg, dbeta), float32 [B, T, G]; None where there is no such gate."""
    if out.columns_BJTF is None:
        return None, None
    batch, head_blocks, length, _ = out.columns_BJTF.shape
    by_feature = out.columns_BJTF.reshape(
        batch, head_blocks, length // form.chunk, form.chunk, -1, form.heads
    )

    def joined(x_BJNCG):
        return x_BJNCG.transpose(0, 2, 3, 1, 4).reshape(batch, length, -1)

    dbeta = joined(by_feature[..., -1, :]) if form.delta else None
    dg = None
    if out.rows_BJNGX is not None and out.kept_BJNGX is not None:
        felt, writes = by_feature[..., 0, :], by_feature[..., 1, :]
        # A decay is felt by all reads from it on, by all writes before it and by the whole state.
        felt = felt - jnp.swapaxes(out.rows_BJNGX, -1, -2)
        onward = jnp.flip(jnp.cumsum(jnp.flip(felt, 3), axis=3), 3)
        # Its own write is left out, not subtracted: under strong decay it would drown the others.
        earlier = jnp.roll(writes, 1, axis=3).at[:, :, :, 0].set(0.0)
        before = jnp.cumsum(earlier, axis=3)
        dg = joined(onward + before + jnp.sum(out.kept_BJNGX, axis=-1)[:, :, :, None])
    return dg, dbeta

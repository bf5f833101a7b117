"""One token of every rule with one decay a head: each state element is read once and written once.

Keys and queries become columns by a transpose, and all sums are over sublanes, in float32.

Shapes: B batch, R rows of the batch of a grid step, J head blocks, H query/key heads, G value heads
(value head j reads query/key head j // (G // H)), K key dim, V value dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fastweights.ops import one_token
from fastweights.ops.mosaic_tpu.blocks import F32, MOST_HEADS, count_heads
from fastweights.ops.mosaic_tpu.support import VMEM_LIMIT

STATE_BYTES = 2**21  # of a grid step; in and out, each twice, they are a sixth of the memory


def update_state(
    q_B1HK: jax.Array,
    k_B1HK: jax.Array,
    v_B1GV: jax.Array,
    g_B1G: jax.Array | None,
    beta_B1G: jax.Array | None,
    state_BGKV: jax.Array,
    *,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """(o_B1GV in v's dtype, new state), without a gradient.

    The new state takes the old one's memory if nothing else needs that.

    Args:
      q_B1HK, k_B1HK, v_B1GV: bfloat16 or float32; K and V multiples of 8.
      g_B1G, beta_B1G: float32 or narrower, or None.
      state_BGKV: float32.
    """
    batch, _, key_heads, K = q_B1HK.shape
    value_heads, V = v_B1GV.shape[2:]
    heads = count_heads(key_heads, value_heads, MOST_HEADS)
    keys = max(1, heads * key_heads // value_heads)
    most = max(1, STATE_BYTES // (4 * heads * K * V))
    rows = max(n for n in range(1, min(most, batch) + 1) if batch % n == 0)
    blocks = value_heads // heads
    gates = [None if x is None else x.astype(F32) for x in (g_B1G, beta_B1G)]

    def kernel(operands, o_ref, new_ref):
        q_ref, k_ref, v_ref, g_ref, beta_ref, state_ref = operands

        def row(b, _):
            def column(ref, i):
                """A key head's vector down the state's rows, in every lane."""
                x = ref[b, 0, i : i + 1, :].astype(F32)
                return jnp.broadcast_to(x, (V, K)).T

            q = k = None
            for h in range(heads):
                if h * keys % heads < keys:  # the first that reads this key head
                    q, k = (column(ref, h * keys // heads) for ref in (q_ref, k_ref))
                S, v = state_ref[b, h], v_ref[b, 0, h : h + 1, :].astype(F32)
                if g_ref is not None:
                    S = jnp.exp(g_ref[b, 0, :, h : h + 1]) * S
                if beta_ref is not None:
                    read = jnp.sum(k * S, axis=0, keepdims=True)
                    v = beta_ref[b, 0, :, h : h + 1] * (v - read)
                S = S + k * v
                o = scale * jnp.sum(q * S, axis=0, keepdims=True)
                o_ref[b, 0, h : h + 1, :] = o.astype(o_ref.dtype)
                new_ref[b, h] = S
            return 0

        jax.lax.fori_loop(0, rows, row, 0)

    def vectors(count, width):
        return pl.BlockSpec((rows, 1, count, width), lambda b, j: (b, j, 0, 0))

    def key_block(x):
        # A key head whose value heads lie in several blocks is there for each of them.
        x = x.reshape(batch, key_heads // keys, keys, K)
        return jnp.repeat(x, blocks * keys // key_heads, axis=1)

    gate, state = vectors(1, heads), pl.BlockSpec((rows, heads, K, V), lambda b, j: (b, j, 0, 0))
    operands = (
        key_block(q_B1HK),
        key_block(k_B1HK),
        v_B1GV.reshape(batch, blocks, heads, V),
        *(None if x is None else x.reshape(batch, blocks, 1, heads) for x in gates),
        state_BGKV,
    )
    given = len(jax.tree.leaves(operands))
    o, new = pl.pallas_call(
        kernel,
        name="rule_decode",
        grid=(batch // rows, blocks),
        in_specs=[
            (vectors(keys, K), vectors(keys, K), vectors(heads, V),
             *(None if x is None else gate for x in gates), state)
        ],
        out_specs=(vectors(heads, V), state),
        out_shape=(
            jax.ShapeDtypeStruct((batch, blocks, heads, V), v_B1GV.dtype),
            jax.ShapeDtypeStruct(state_BGKV.shape, F32),
        ),
        input_output_aliases={given - 1: 1},
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_LIMIT
        ),
    )(operands)  # fmt: skip
    return o.reshape(v_B1GV.shape), new


def _update(inputs, scale, interpret):
    return update_state(*inputs, scale=scale, interpret=interpret)


def core(
    q_B1HK: jax.Array,
    k_B1HK: jax.Array,
    v_B1GV: jax.Array,
    g_B1G: jax.Array | None,
    beta_B1G: jax.Array | None,
    state_BGKV: jax.Array,
    *,
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """`reference.core` at T = 1, with the gradient of that; arguments as in `update_state`."""
    inputs = (q_B1HK, k_B1HK, v_B1GV, g_B1G, beta_B1G, state_BGKV)
    return one_token.with_gradient(_update)(inputs, scale, interpret)

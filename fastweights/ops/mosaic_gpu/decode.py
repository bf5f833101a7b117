"""One token of every rule with one decay a head: each state element is read once and written once.

A block is one warpgroup with 64 columns of one head's state (32 of a wide one) in registers, so
nothing is shared and nothing waits but for memory. The four warps lie side by side along V, and K
is spread over a thread's registers and eight lanes: sums over K are additions and three shuffles,
in float32.

Shapes: B batch, H query/key heads, G value heads (value head j reads query/key head j // (G // H)),
K key dim, V value dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from fastweights.ops import one_token
from fastweights.ops.mosaic_gpu.support import TILE
from fastweights.ops.mosaic_gpu.tiles import F32, call, digits, plgpu


def _layouts(width: int) -> tuple[Any, Any, Any]:
    """Of 8 x width entries of the state, and of a vector along its rows and along its columns.

    A warp has a quarter of the columns, a lane row l // 4 and a quarter of those.
    """
    state = plgpu.Layout.TILED(
        plgpu.Tiling(((8, width), (width // 4,), (width // 16,))),
        warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1,
    )  # fmt: skip
    return state, state.reduce(1), state.reduce(0)


def update_state(
    q_B1HK: jax.Array,
    k_B1HK: jax.Array,
    v_B1GV: jax.Array,
    g_B1G: jax.Array | None,
    beta_B1G: jax.Array | None,
    state_BGKV: jax.Array,
    *,
    scale: float,
    simulate: bool,
) -> tuple[jax.Array, jax.Array]:
    """(o_B1GV in v's dtype, new state), without a gradient.

    The new state takes the old one's memory if nothing else needs that, as when a jitted function
    owns it or was given it by donation; otherwise XLA copies it first.

    Args:
      q_B1HK, k_B1HK, v_B1GV: bfloat16 or float32; K a multiple of 8 up to 256, V of 64.
      g_B1G, beta_B1G: float32 or narrower, or None.
      state_BGKV: float32.
    """
    batch, _, heads, key_dim = q_B1HK.shape
    value_heads, value_dim = v_B1GV.shape[2:]
    width = TILE if key_dim <= 128 else TILE // 2  # columns of the state a block
    of_state, of_keys, of_values = _layouts(width)
    shape = (key_dim, width)

    def body(block, me, operands, results, scratch):
        del me, scratch
        q_ref, k_ref, v_ref, state_ref, *gate_refs = operands
        b, h, part = digits(block, batch, value_heads, value_dim // width)
        shared_head = jax.lax.div(h, jnp.int32(value_heads // heads))
        columns = pl.ds(part * width, width)
        state = state_ref.at[b, h, :, columns]

        def load(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False).astype(F32)

        def along_keys(ref):
            x = load(ref.at[b, 0, shared_head], of_keys)
            return jax.lax.broadcast_in_dim(x, shape, [0])

        # All that is read, before the first use: a block waits for memory once.
        S = load(state, of_state)
        q, k, v = along_keys(q_ref), along_keys(k_ref), load(v_ref.at[b, 0, h, columns], of_values)
        gates = [ref[b, 0, h] for ref in gate_refs]
        if g_B1G is not None:
            S = S * jnp.exp(gates[0])
        if beta_B1G is not None:
            v = gates[-1] * (v - jnp.sum(k * S, axis=0))
        S = S + k * jax.lax.broadcast_in_dim(v, shape, [1])
        state[...] = S
        o = scale * jnp.sum(q * S, axis=0)
        results[0].at[b, 0, h, columns][...] = o.astype(v_B1GV.dtype)

    state_ref = jax.new_ref(state_BGKV)
    gates = [None if x is None else x.astype(F32) for x in (g_B1G, beta_B1G)]
    operands = [q_B1HK, k_B1HK, v_B1GV, state_ref, *gates]
    (o_B1GV,) = call(
        body,
        [x for x in operands if x is not None],
        name="decode",
        out_type=(jax.ShapeDtypeStruct(v_B1GV.shape, v_B1GV.dtype),),
        blocks=batch * value_heads * (value_dim // width),
        threads=1,
        scratch=[],
        simulate=simulate,
        guard_stores=False,
    )
    return o_B1GV, jax.freeze(state_ref)


def _update(inputs, scale, simulate):
    return update_state(*inputs, scale=scale, simulate=simulate)


def core(
    q_B1HK: jax.Array,
    k_B1HK: jax.Array,
    v_B1GV: jax.Array,
    g_B1G: jax.Array | None,
    beta_B1G: jax.Array | None,
    state_BGKV: jax.Array,
    *,
    scale: float,
    simulate: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`reference.core` at T = 1, with the gradient of that; arguments as in `update_state`."""
    inputs = (q_B1HK, k_B1HK, v_B1GV, g_B1G, beta_B1G, state_BGKV)
    return one_token.with_gradient(_update)(inputs, scale, simulate)

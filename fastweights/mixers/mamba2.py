"""Mamba-2 (letter `N`): a state space with one decay a head, which is gated linear attention.

Dao and Gu 2024 (arXiv:2405.21060), sections 5 to 7. In the terms of this package B is the key, C
the query and dt x the value, with grouped B and C as query/key heads:
S_t = e^{g_t} S_{t-1} + B_t (dt_t x_t)^T, y_t = S_t^T C_t + D x_t, with dt = softplus(a + dt_bias)
and g = -exp(A_log) dt, where a is a projection of the stream to one number a head. The output is
out(norm(y * silu(z))): the gate comes before the norm, which runs over the heads of one group.

Shapes: as in `recurrent.py`; V is the head dim of the paper, K its state size, H its groups.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights import ops
from fastweights.errors import check
from fastweights.mixers.decay import initial_log_rate, initial_step_bias
from fastweights.mixers.layers import Linear
from fastweights.mixers.norms import GatedRMSNorm
from fastweights.mixers.recurrent import RecurrentConfig, RecurrentMixer


@dataclasses.dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """Options of `Mamba2`, beside those of every recurrent mixer.

    `num_heads` times `value_head_dim` is the inner width, twice the model width as published;
    `head_dim` is the state size, `num_qk_heads` the number of groups.

    Attributes:
      num_qk_heads: as there, but 1 by default: all heads share B and C.
      time_step_limit: least and largest step dt.
    """

    num_qk_heads: int = 1
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    def __post_init__(self):
        super().__post_init__()
        limit = tuple(self.time_step_limit)
        check(
            len(limit) == 2 and 0 <= limit[0] < limit[1],
            f"Mamba2Config.time_step_limit is {limit}; give two numbers, 0 <= least < largest.",
        )
        object.__setattr__(self, "time_step_limit", limit)


class Step(nnx.Module):
    """dt_BTG = softplus(x W + dt_bias) between its limits, and g_BTG = -exp(A_log) dt <= 0.

    Both in at least float32, and the vectors too whatever the parameter dtype.
    """

    def __init__(self, d_model: int, config: Mamba2Config, *, dtype, param_dtype, rngs: nnx.Rngs):
        acc, shape = jnp.promote_types(param_dtype, jnp.float32), (config.num_heads,)
        self.limit = config.time_step_limit
        self.proj = Linear(
            d_model,
            config.num_heads,
            logical_axes=("embed", None),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.A_log = nnx.Param(initial_log_rate(rngs.params(), shape, acc), logical_axes=(None,))
        self.dt_bias = nnx.Param(initial_step_bias(rngs.params(), shape, acc), logical_axes=(None,))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        a_BTG = self.proj(x_BTD, accumulate=True)
        dt_BTG = jax.nn.softplus(a_BTG + self.dt_bias[...][None, None])
        dt_BTG = jnp.clip(dt_BTG, *self.limit)
        return dt_BTG, -jnp.exp(self.A_log[...])[None, None] * dt_BTG


class GroupedReadOut(nnx.Module):
    """RMSNorm of the gated values over each group of heads, and the projection to the stream."""

    def __init__(
        self,
        d_model: int,
        config: Mamba2Config,
        *,
        norm_eps: float,
        dtype,
        param_dtype,
        residual_scale: float,
        rngs: nnx.Rngs,
    ):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.groups, self.has_gate = config.qk_heads, config.output_gate
        width = config.num_heads * config.value_dim
        self.norm = GatedRMSNorm(
            (self.groups, width // self.groups), eps=norm_eps, param_dtype=param_dtype
        )
        if self.has_gate:
            self.gate = Linear(d_model, width, logical_axes=("embed", "heads"), **kinds)
        self.out = Linear(
            width, d_model, logical_axes=("heads", "embed"), scale=residual_scale, **kinds
        )

    def __call__(self, o_BTGV: jax.Array, x_BTD: jax.Array) -> jax.Array:
        o_BTX = o_BTGV.reshape(*x_BTD.shape[:2], math.prod(o_BTGV.shape[2:]))
        gate_BTX = self.gate(x_BTD) if self.has_gate else None
        return self.out(jax.checkpoint(self._gated_norm)(o_BTX, gate_BTX))

    def _gated_norm(self, o_BTX: jax.Array, gate_BTX: jax.Array | None) -> jax.Array:
        if gate_BTX is not None:
            o_BTX = o_BTX * jax.nn.silu(gate_BTX.astype(o_BTX.dtype))
        grouped = (*o_BTX.shape[:2], self.groups, o_BTX.shape[2] // self.groups)
        return self.norm(o_BTX.reshape(grouped)).reshape(o_BTX.shape)


class Mamba2(RecurrentMixer):
    """Gated linear attention with steps, skip and biased convolution; see `RecurrentMixer`."""

    config: Mamba2Config
    conv_bias: ClassVar[bool] = True

    def __init__(self, d_model, config, *, dtype, param_dtype, norm_eps, rngs, residual_scale=1.0):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(d_model, config, norm_eps=norm_eps, residual_scale=residual_scale, **kinds)
        self.step = Step(d_model, config, **kinds)
        acc = jnp.promote_types(param_dtype, jnp.float32)
        self.D = nnx.Param(jnp.ones((config.num_heads,), acc), logical_axes=(None,))

    def make_read_out(self, d_model: int, **kinds: Any) -> Any:
        return GroupedReadOut(d_model, self.config, **kinds)

    def memory(self, x_BTD, q_BTHK, k_BTHK, v_BTGV, segment_ids_BT, state) -> tuple[Any, Any]:
        dt_BTG, g_BTG = self.step(x_BTD)
        v_BTGV = v_BTGV.astype(dt_BTG.dtype)
        o_BTGV, state = ops.gated_linear_attention(
            q_BTHK,
            k_BTHK,
            # As narrow as keys, or no kernel takes it.
            (dt_BTG[..., None] * v_BTGV).astype(k_BTHK.dtype),
            g_BTG,
            scale=1.0,
            initial_state=state,
            segment_ids=segment_ids_BT,
            **self.op_options,
        )
        # Wide until after the norm, which divides by what may be small.
        return o_BTGV.astype(v_BTGV.dtype) + self.D[...][None, None, :, None] * v_BTGV, state

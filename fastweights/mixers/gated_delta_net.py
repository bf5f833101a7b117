"""Gated DeltaNet (letter `G`): the delta rule with a decay that each token sets.

Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464), as in the published Qwen3-Next and Qwen3.5 models:
S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T, o_t = S_t^T q_t / sqrt(K),
with unit-length q and k, g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), where a and b
are projections of x, one number a value head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights import ops
from fastweights.mixers.delta_net import WriteStrength
from fastweights.mixers.layers import Linear
from fastweights.mixers.recurrent import RecurrentConfig, RecurrentMixer


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(RecurrentConfig):
    """Options of `GatedDeltaNet`, beside those of every recurrent mixer.

    Attributes:
      allow_neg_eigval: beta in (0, 2) instead of (0, 1); see `DeltaNetConfig`.
    """

    allow_neg_eigval: bool = False


class LogDecay(nnx.Module):
    """g_BTG = -exp(A_log) softplus(x W + dt_bias) <= 0, in at least float32.

    A starts uniform in (0.01, 16) and the step softplus(dt_bias) log-uniform in [1e-3, 0.1], the
    Mamba-2 start (arXiv:2405.21060): from nearly no decay to a memory of a few tokens.
    Both vectors are float32 whatever the parameter dtype: bfloat16 would round slow decays to none.
    """

    def __init__(self, d_model: int, num_heads: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        acc = jnp.promote_types(param_dtype, jnp.float32)
        self.proj = Linear(
            d_model,
            num_heads,
            logical_axes=("embed", None),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        rate = jax.random.uniform(rngs.params(), (num_heads,), acc, 0.01, 16.0)
        self.A_log = nnx.Param(jnp.log(rate), logical_axes=(None,))
        step = jnp.exp(
            jax.random.uniform(rngs.params(), (num_heads,), acc, math.log(1e-3), math.log(0.1))
        )
        # The inverse of softplus, in the form that keeps its digits for small steps.
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)), logical_axes=(None,))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        a_BTG = self.proj(x_BTD, accumulate=True)
        rate_G, bias_G = jnp.exp(self.A_log[...]), self.dt_bias[...]
        return -rate_G[None, None] * jax.nn.softplus(a_BTG + bias_G[None, None])


class GatedDeltaNet(RecurrentMixer):
    """The gated delta rule; the protocol is that of `RecurrentMixer`."""

    config: GatedDeltaNetConfig

    def __init__(self, d_model, config, *, dtype, param_dtype, norm_eps, rngs, residual_scale=1.0):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(d_model, config, norm_eps=norm_eps, residual_scale=residual_scale, **kinds)
        self.beta = WriteStrength(
            d_model, config.num_heads, double=config.allow_neg_eigval, **kinds
        )
        self.decay = LogDecay(d_model, config.num_heads, **kinds)

    def memory(self, x_BTD, q_BTHK, k_BTHK, v_BTGV, segment_ids_BT, state) -> tuple[Any, Any]:
        return ops.gated_delta_rule(
            ops.l2_normalize(q_BTHK),
            ops.l2_normalize(k_BTHK),
            v_BTGV,
            self.decay(x_BTD),
            self.beta(x_BTD),
            initial_state=state,
            segment_ids=segment_ids_BT,
            **self.op_options,
        )

"""Kimi Delta Attention (letter `K`): the delta rule with a decay for each key channel.

Kimi Team 2025 (arXiv:2510.26692), section 4:
S_t = (I - beta_t k_t k_t^T) diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t / sqrt(K),
with unit-length q and k, beta = sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias), where b is a
projection of x to one number a value head, and a one of low rank to one number a key channel. The
read-out is normalised by head and gated by the sigmoid of another projection of low rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights import ops
from fastweights.mixers.decay import initial_log_rate, initial_step_bias
from fastweights.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from fastweights.mixers.layers import LowRank
from fastweights.mixers.projections import ReadOut


@dataclasses.dataclass(frozen=True)
class KimiDeltaAttentionConfig(GatedDeltaNetConfig):
    """Options of `KimiDeltaAttention`: those of `GatedDeltaNetConfig`.

    The rank of both low-rank projections is `head_dim`, as published.
    """


class ChannelLogDecay(nnx.Module):
    """g_BTGK = -exp(A_log) softplus(x W_down W_up + dt_bias) <= 0, in at least float32.

    A_log is one number a head and dt_bias one a channel; both start as in Gated DeltaNet, so that a
    head has channels of long and of short memory, and both are float32 whatever the parameter
    dtype.
    """

    def __init__(
        self, d_model: int, num_heads: int, head_dim: int, *, dtype, param_dtype, rngs: nnx.Rngs
    ):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        acc = jnp.promote_types(param_dtype, jnp.float32)
        self.proj = LowRank(d_model, head_dim, num_heads * head_dim, **kinds)
        self.A_log = nnx.Param(
            initial_log_rate(rngs.params(), (num_heads,), acc), logical_axes=(None,)
        )
        self.dt_bias = nnx.Param(
            initial_step_bias(rngs.params(), (num_heads, head_dim), acc),
            logical_axes=(None, None),
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        bias_GK = self.dt_bias[...]
        a_BTGK = self.proj(x_BTD, accumulate=True).reshape(*x_BTD.shape[:2], *bias_GK.shape)
        rate_G1 = jnp.exp(self.A_log[...])[:, None]
        return -rate_G1[None, None] * jax.nn.softplus(a_BTGK + bias_GK[None, None])


class KimiDeltaAttention(GatedDeltaNet):
    """The delta rule with a decay per key channel; the protocol is that of `RecurrentMixer`."""

    config: KimiDeltaAttentionConfig
    rule: ClassVar[Callable] = staticmethod(ops.kimi_delta_rule)

    def make_decay(self, d_model: int, **kinds: Any) -> Any:
        return ChannelLogDecay(d_model, self.config.num_heads, self.config.head_dim, **kinds)

    def make_read_out(self, d_model: int, **kinds: Any) -> Any:
        c = self.config
        return ReadOut(
            d_model,
            c.num_heads,
            c.value_dim,
            gate=c.output_gate,
            gate_rank=c.head_dim,
            gate_activation=jax.nn.sigmoid,
            **kinds,
        )

"""Gated DeltaNet (letter `G`): the delta rule with a decay that each token sets.

Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464), as in the published Qwen3-Next and Qwen3.5 models:
S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T, o_t = S_t^T q_t / sqrt(K),
with unit-length q and k, g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), where a and b
are projections of x, one number a value head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights import ops
from fastweights.errors import check
from fastweights.mixers.decay import initial_log_rate, initial_step_bias
from fastweights.mixers.delta_net import WriteStrength
from fastweights.mixers.layers import Linear
from fastweights.mixers.recurrent import RecurrentConfig, RecurrentMixer


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(RecurrentConfig):
    """Options of `GatedDeltaNet`, beside those of every recurrent mixer.

    Attributes:
      allow_neg_eigval: beta in (0, 2) instead of (0, 1); see `DeltaNetConfig`.
      norm_eps: epsilon of the read-out's norm; 0 takes the model's.
    """

    allow_neg_eigval: bool = False
    norm_eps: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check(
            self.norm_eps >= 0,
            f"{type(self).__name__}.norm_eps is {self.norm_eps}; give a positive number, or 0 for "
            "the model's.",
        )

    @property
    def unit_heads(self) -> dict[str, int]:
        return dict.fromkeys(("q", "k"), self.head_dim)


class LogDecay(nnx.Module):
    """g_BTG = -exp(A_log) softplus(x W + dt_bias) <= 0, in at least float32.

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
        self.A_log = nnx.Param(
            initial_log_rate(rngs.params(), (num_heads,), acc), logical_axes=(None,)
        )
        self.dt_bias = nnx.Param(
            initial_step_bias(rngs.params(), (num_heads,), acc), logical_axes=(None,)
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        a_BTG = self.proj(x_BTD, accumulate=True)
        rate_G, bias_G = jnp.exp(self.A_log[...]), self.dt_bias[...]
        return -rate_G[None, None] * jax.nn.softplus(a_BTG + bias_G[None, None])


class GatedDeltaNet(RecurrentMixer):
    """The gated delta rule; the protocol is that of `RecurrentMixer`."""

    config: GatedDeltaNetConfig
    rule: ClassVar[Callable] = staticmethod(ops.gated_delta_rule)

    def __init__(self, d_model, config, *, dtype, param_dtype, norm_eps, rngs, residual_scale=1.0):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm_eps = config.norm_eps or norm_eps
        super().__init__(d_model, config, norm_eps=norm_eps, residual_scale=residual_scale, **kinds)
        self.beta = WriteStrength(
            d_model, config.num_heads, double=config.allow_neg_eigval, **kinds
        )
        self.decay = self.make_decay(d_model, **kinds)

    def make_decay(self, d_model: int, **kinds: Any) -> Any:
        """The module from x to the rule's log decays."""
        return LogDecay(d_model, self.config.num_heads, **kinds)

    def memory(self, x_BTD, q_BTHK, k_BTHK, v_BTGV, segment_ids_BT, state) -> tuple[Any, Any]:
        return self.rule(
            q_BTHK,
            k_BTHK,
            v_BTGV,
            self.decay(x_BTD),
            self.beta(x_BTD),
            initial_state=state,
            segment_ids=segment_ids_BT,
            **self.op_options,
        )

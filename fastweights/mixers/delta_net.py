"""DeltaNet (letter `D`): a memory that corrects itself before it writes.

Schlag et al. 2021 (arXiv:2102.11174) and Yang et al. 2024 (arXiv:2406.06484):
S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, o_t = S_t^T q_t / sqrt(K).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from fastweights import ops
from fastweights.mixers.layers import Linear
from fastweights.mixers.recurrent import FeatureMapConfig, RecurrentMixer


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig(FeatureMapConfig):
    """Options of `DeltaNet`, beside those of every mixer with a feature map.

    Attributes:
      l2_norm: scale q and k, behind the feature map, to unit length, so that beta = 1 replaces a
        key's value exactly. Without it the memory grows wherever beta |k|^2 exceeds 2.
      allow_neg_eigval: beta in (0, 2) instead of (0, 1), so that a transition can reflect
        (Grazzi et al. 2024, arXiv:2411.12537).
    """

    l2_norm: bool = True
    allow_neg_eigval: bool = False

    @property
    def unit_heads(self) -> dict[str, int]:
        # With the projection where no feature map comes between.
        direct = self.l2_norm and self.feature_map == "identity"
        return dict.fromkeys(("q", "k"), self.head_dim) if direct else {}


class WriteStrength(nnx.Module):
    """beta_BTG = sigmoid(x W), doubled on request, in at least float32."""

    def __init__(self, d_model: int, num_heads: int, *, double: bool, dtype, param_dtype, rngs):
        # One column a head: too narrow to cut, so it is replicated over the heads' mesh axis.
        self.proj = Linear(
            d_model,
            num_heads,
            logical_axes=("embed", None),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.double = double

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        beta_BTG = jax.nn.sigmoid(self.proj(x_BTD, accumulate=True))
        return 2 * beta_BTG if self.double else beta_BTG


class DeltaNet(RecurrentMixer):
    """The delta rule without decay; the protocol is that of `RecurrentMixer`."""

    config: DeltaNetConfig

    def __init__(self, d_model, config, *, dtype, param_dtype, norm_eps, rngs, residual_scale=1.0):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(d_model, config, norm_eps=norm_eps, residual_scale=residual_scale, **kinds)
        self.beta = WriteStrength(
            d_model, config.num_heads, double=config.allow_neg_eigval, **kinds
        )

    def memory(self, x_BTD, q_BTHK, k_BTHK, v_BTGV, segment_ids_BT, state) -> tuple[Any, Any]:
        phi = self.config.phi.apply
        q_BTHK, k_BTHK = phi(q_BTHK), phi(k_BTHK)
        if self.config.l2_norm and not self.config.unit_heads:
            q_BTHK, k_BTHK = ops.l2_normalize(q_BTHK), ops.l2_normalize(k_BTHK)
        return ops.delta_rule(
            q_BTHK,
            k_BTHK,
            v_BTGV,
            self.beta(x_BTD),
            initial_state=state,
            segment_ids=segment_ids_BT,
            **self.op_options,
        )

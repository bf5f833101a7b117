"""Linear attention (letter `L`): keys add to a memory, queries read it.

Katharopoulos et al. 2020 (arXiv:2006.16236): S_t = S_{t-1} + phi(k_t) v_t^T and
o_t = S_t^T phi(q_t), divided by phi(q_t) . sum phi(k) when normalised.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from fastweights import ops
from fastweights.errors import check
from fastweights.mixers.recurrent import FeatureMapConfig, RecurrentMixer


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(FeatureMapConfig):
    """Options of `LinearAttention`, beside those of every mixer with a feature map.

    Attributes:
      normalize: divide by the running normaliser (needs features whose products are not negative).
    """

    feature_map: str = "elu1"
    normalize: bool = False

    def __post_init__(self):
        super().__post_init__()
        check(
            not (self.normalize and self.feature_map == "identity"),
            "LinearAttentionConfig.normalize is True with feature_map 'identity', whose normaliser "
            "can cross zero; set normalize=False or a positive map such as 'elu1'.",
        )


class LinearAttention(RecurrentMixer):
    """Kernelised linear attention; the protocol is that of `RecurrentMixer`."""

    config: LinearAttentionConfig

    def memory(self, x_BTD, q_BTHK, k_BTHK, v_BTGV, segment_ids_BT, state) -> tuple[Any, Any]:
        del x_BTD
        phi = self.config.phi.apply
        return ops.linear_attention(
            phi(q_BTHK),
            phi(k_BTHK),
            v_BTGV,
            normalize=self.config.normalize,
            initial_state=state,
            segment_ids=segment_ids_BT,
            **self.op_options,
        )

    def init_state(self, batch: int) -> Any:
        """S_BGKV, with the normaliser z_BGK beside it when normalised."""
        S_BGKV = super().init_state(batch)
        return (
            (S_BGKV, jnp.zeros(S_BGKV.shape[:3], S_BGKV.dtype)) if self.config.normalize else S_BGKV
        )

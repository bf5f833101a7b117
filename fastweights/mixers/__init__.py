"""Layers that move information between tokens, all under one protocol.

A mixer is an NNX module with
  `__call__(x_BTD, *, segment_ids_BT=None, positions_BT=None, cache=None) -> (y_BTD, cache)` and
  `init_cache(batch, max_length, dtype)`.
With a cache a call continues the cached document from its first real token on; prefill and decode
in any split give what one call gives. `MIXERS` maps a pattern letter to its module and options.
"""

from __future__ import annotations

import dataclasses

from fastweights.mixers.attention import (
    Attention,
    AttentionConfig,
    WindowAttention,
    WindowAttentionConfig,
)
from fastweights.mixers.delta_net import DeltaNet, DeltaNetConfig
from fastweights.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from fastweights.mixers.kimi_delta_attention import KimiDeltaAttention, KimiDeltaAttentionConfig
from fastweights.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from fastweights.mixers.mamba import Mamba, MambaConfig
from fastweights.mixers.mamba2 import Mamba2, Mamba2Config
from fastweights.mixers.s4 import S4, S4Config

MIXERS = {
    "A": (Attention, AttentionConfig),
    "W": (WindowAttention, WindowAttentionConfig),
    "L": (LinearAttention, LinearAttentionConfig),
    "D": (DeltaNet, DeltaNetConfig),
    "G": (GatedDeltaNet, GatedDeltaNetConfig),
    "K": (KimiDeltaAttention, KimiDeltaAttentionConfig),
    "N": (Mamba2, Mamba2Config),
    "S": (S4, S4Config),
    "M": (Mamba, MambaConfig),
}


@dataclasses.dataclass(frozen=True)
class MixerConfigs:
    """The options of each letter; letters that a pattern does not use are ignored."""

    A: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    W: WindowAttentionConfig = dataclasses.field(default_factory=WindowAttentionConfig)
    L: LinearAttentionConfig = dataclasses.field(default_factory=LinearAttentionConfig)
    D: DeltaNetConfig = dataclasses.field(default_factory=DeltaNetConfig)
    G: GatedDeltaNetConfig = dataclasses.field(default_factory=GatedDeltaNetConfig)
    K: KimiDeltaAttentionConfig = dataclasses.field(default_factory=KimiDeltaAttentionConfig)
    N: Mamba2Config = dataclasses.field(default_factory=Mamba2Config)
    S: S4Config = dataclasses.field(default_factory=S4Config)
    M: MambaConfig = dataclasses.field(default_factory=MambaConfig)


__all__ = [
    "MIXERS",
    "S4",
    "Attention",
    "AttentionConfig",
    "DeltaNet",
    "DeltaNetConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "KimiDeltaAttention",
    "KimiDeltaAttentionConfig",
    "LinearAttention",
    "LinearAttentionConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Config",
    "MambaConfig",
    "MixerConfigs",
    "S4Config",
    "WindowAttention",
    "WindowAttentionConfig",
]

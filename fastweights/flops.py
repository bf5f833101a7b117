"""Parameters, floating-point operations and bytes of state, from the config alone.

Nothing here builds or compiles a model. Compilers' own counts are not used: they see the body of
a loop once.

Shapes: D model width, H query heads, G value heads, K key dim (features, where a map makes more of
them), V value dim, W convolution taps.

What one token costs in the forward pass (a multiply and an add are 2):
  matrix products     2 a parameter, the head included and the embedding lookup not; of experts
                      those that the token goes through
  softmax attention   4 H K a key seen; causal, so the mean over a document of length T, and at most
                      the window
  linear attention    4 G K V: one write and one read of the state; the same for Mamba-2
  delta rules         8 G K V: one decay, none or one a channel, one prediction, one write, one read
  Mamba               6 E N for E channels of N states: decay, write and read
  S4                  8 D N: rotation and decay of N / 2 complex states, write, read; 20 D N with a
                      low-rank part
  short convolution   2 a tap and channel
The backward pass costs twice the forward one. Recurrent mixers are counted in their recurrent form:
what a chunked form computes on top is overhead and no work. Recomputed activations, norms and
activation functions are not counted either.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp

from fastweights.errors import check
from fastweights.model import ModelConfig

INT32_BYTES = 4
STATE_SPACES = frozenset("SM")

# Dense bfloat16 FLOP/s by a part of `jax.Device.device_kind`, from the makers' data sheets; the
# first match counts. PCIe and NVL cards clock lower than the SXM ones and have no entry.
_PEAKS = (
    ("PCIe", None),
    ("NVL", None),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU7x", 1153.5e12),  # a chip is two devices
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s; None where it is not known, never a guess."""
    return next((peak for name, peak in _PEAKS if name in device_kind), None)


# Bytes/s between a device and its memory, from the same sheets.
_BANDWIDTHS = (
    ("PCIe", None),
    ("NVL", None),
    ("H100", 3.35e12),
    ("H200", 4.8e12),
    ("A100-SXM4-80GB", 2.039e12),
    ("A100-SXM4-40GB", 1.555e12),
    ("TPU v5 lite", 0.819e12),
    ("TPU v5e", 0.819e12),
    ("TPU v5p", 2.765e12),
    ("TPU v5", 2.765e12),
    ("TPU v6 lite", 1.64e12),
    ("TPU v6e", 1.64e12),
    ("TPU7x", 3.69e12),
)


def peak_bandwidth(device_kind: str) -> float | None:
    """Memory bandwidth of one device in bytes/s; None where it is not known, never a guess."""
    return next((peak for name, peak in _BANDWIDTHS if name in device_kind), None)


@dataclasses.dataclass(frozen=True)
class _Mixer:
    """Counts of one mixer layer: parameters in matrices and outside, and its short convolution."""

    matrix: int
    other: int
    conv_channels: int
    conv_size: int

    @property
    def params(self) -> int:
        return self.matrix + self.other


def _state_space(config: ModelConfig, letter: str) -> _Mixer:
    c: Any = getattr(config.mixers, letter)
    D, N = config.d_model, c.d_state
    if letter == "S":
        # A, B, C and the low-rank part of each channel, its step and its skip.
        system = D * (N * (4 if c.mode == "dplr" else 3) + 2)
        return _Mixer(D * D * (2 if c.output_gate else 1), system, 0, 0)
    E, rank = c.channels(D), c.rank(D)
    matrix = 3 * D * E + 2 * rank * E + 2 * N * E
    # A, D and the bias of the step; taps and bias of the convolution.
    taps = c.conv_size + 1 if c.conv_size else 0
    return _Mixer(matrix, E * (N + 2 + taps), E, c.conv_size)


def _mixer(config: ModelConfig, letter: str) -> _Mixer:
    if letter in STATE_SPACES:
        return _state_space(config, letter)
    c: Any = getattr(config.mixers, letter)
    D, qkv = config.d_model, sum(c.qkv_dims.values())
    width = c.num_heads * (c.head_dim if letter in "AW" else c.value_dim)
    matrix = D * (qkv + width * (2 if c.output_gate else 1))
    other = c.conv_size * qkv
    if letter in "AW":
        other += sum(c.qk_norm_dims.values())
    else:
        other += width if letter == "N" else c.value_dim
    if letter in "DGK":
        matrix += D * c.num_heads
    if letter in "GN":
        matrix += D * c.num_heads
        other += 2 * c.num_heads
    if letter == "K":
        # Decay and gate go through head_dim numbers.
        channels, rank = c.num_heads * c.head_dim, c.head_dim
        matrix += rank * (D + channels)
        matrix += rank * (D + width) - D * width if c.output_gate else 0
        other += c.num_heads + channels
    if letter == "N":
        # The skip, and the convolution's biases.
        other += c.num_heads + (qkv if c.conv_size else 0)
    return _Mixer(matrix, other, qkv, c.conv_size)


def _mlp(config: ModelConfig, layer: int, *, active: bool = False) -> int:
    """Parameters of the MLP of a layer; `active`: only those that a token meets."""
    kind = config.mlp_kind(layer)
    if kind == "moe":
        return config.moe.params(config.d_model, active=active)
    return 3 * config.d_model * config.mlp_width if kind == "swiglu" else 0


def _decoder(config: ModelConfig) -> int:
    """Parameters of the decoder's matrices."""
    return 0 if config.decoder == "none" else 2 * config.d_model**2


def active_params(config: ModelConfig) -> int:
    """Parameters that one token meets: all but those of the experts it does not go through."""
    idle = sum(_mlp(config, i) - _mlp(config, i, active=True) for i in range(config.num_layers))
    return param_counts(config)["total"] - idle


def param_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part.

    Returns:
      "embed", "mixer_<letter>" for each letter of the pattern (all its layers together), "mlp"
      (experts included), "norms" (those on the residual stream), "decoder", "head" (0 when tied)
      and "total".
    """
    D, letters = config.d_model, config.layout.letters
    counts = {"embed": config.vocab_size * D}
    for letter, layers in collections.Counter(letters).items():
        counts[f"mixer_{letter}"] = layers * _mixer(config, letter).params
    counts["mlp"] = sum(_mlp(config, i) for i in range(len(letters)))
    counts["norms"] = D * (len(letters) * (1 if config.mlp == "none" else 2) + 1)
    counts["decoder"] = _decoder(config) + (2 * D if config.decoder != "none" else 0)
    counts["head"] = 0 if config.tie_embeddings else config.vocab_size * D
    return counts | {"total": sum(counts.values())}


def _mean_keys(length: int, window: int | None) -> float:
    """Keys that a token of a causal document of `length` tokens sees on average."""
    reach = length if window is None else min(length, window)
    return (reach * (reach + 1) / 2 + (length - reach) * reach) / length


def _memory_flops(config: ModelConfig, letter: str, length: int) -> float:
    """Forward FLOPs a token of the memory itself, projections not counted."""
    c: Any = getattr(config.mixers, letter)
    if letter == "S":
        return (20 if c.mode == "dplr" else 8) * config.d_model * c.d_state
    if letter == "M":
        return 6 * c.channels(config.d_model) * c.d_state
    if letter in "AW":
        return 4 * c.num_heads * c.head_dim * _mean_keys(length, getattr(c, "window", None))
    return (4 if letter in "LN" else 8) * c.num_heads * c.state_key_dim * c.value_dim


def forward_flops_per_token(config: ModelConfig, length: int) -> float:
    """Forward FLOPs a token, averaged over one document of `length` tokens."""
    check(length >= 1, f"FLOPs are asked for a length of {length} tokens; give at least 1.")
    letters = config.layout.letters
    mlps = sum(_mlp(config, i, active=True) for i in range(len(letters)))
    flops = 2.0 * (config.vocab_size * config.d_model + mlps + _decoder(config))
    for letter, layers in collections.Counter(letters).items():
        mixer = _mixer(config, letter)
        conv = 2 * mixer.conv_size * mixer.conv_channels
        flops += layers * (2 * mixer.matrix + conv + _memory_flops(config, letter, length))
    return flops


def train_flops_per_token(config: ModelConfig, length: int) -> float:
    """Forward and backward FLOPs a token: three times the forward ones."""
    return 3 * forward_flops_per_token(config, length)


def _layer_bytes(config: ModelConfig, letter: str, slots: int, dtype: str) -> dict[str, int]:
    """Bytes of memory of one layer and sequence by part: "state", "conv" (inputs) and "kv"."""
    c: Any = getattr(config.mixers, letter)
    size = jnp.dtype(dtype).itemsize
    mixer = _mixer(config, letter)
    conv = max(mixer.conv_size - 1, 0) * mixer.conv_channels * size
    if letter in "AW":
        return {"state": 0, "conv": conv, "kv": 2 * slots * c.kv_heads * c.head_dim * size}
    if letter in STATE_SPACES:
        channels = c.channels(config.d_model) if letter == "M" else config.d_model
        state = channels * c.d_state
    else:
        state = c.num_heads * c.state_key_dim * c.value_dim
        if letter == "L" and c.normalize:
            state += c.num_heads * c.state_key_dim
    width = jnp.promote_types(config.dtype, jnp.float32).itemsize
    return {"state": state * width, "conv": conv, "kv": 0}


def layer_bytes(
    config: ModelConfig, letter: str, context_length: int, dtype: str | None = None
) -> dict[str, int]:
    """Bytes in which one layer remembers one sequence of `context_length` tokens.

    Recurrent states are float32; convolution inputs, keys and values are of `dtype`, the compute
    dtype by default. A window holds no more tokens than the context has. Bookkeeping is left out.

    Returns:
      Bytes of the recurrent "state", of the inputs that the short convolution reaches back to
      ("conv") and of keys and values ("kv").
    """
    check(context_length >= 0, f"context_length is {context_length}; give a number of tokens.")
    window = getattr(getattr(config.mixers, letter), "window", context_length)
    return _layer_bytes(config, letter, min(window, context_length), dtype or config.dtype)


def state_bytes(
    config: ModelConfig, context_length: int, dtype: str | None = None
) -> dict[str, int]:
    """Bytes that one sequence of `context_length` tokens has to be remembered in.

    Returns:
      Bytes by letter (all its layers together, counted as `layer_bytes` does) and "total".
    """
    counts = {
        letter: layers * sum(layer_bytes(config, letter, context_length, dtype).values())
        for letter, layers in collections.Counter(config.layout.letters).items()
    }
    return counts | {"total": sum(counts.values())}


def cache_bytes(
    config: ModelConfig, batch: int, max_length: int, dtype: str | None = None
) -> dict[str, int]:
    """Bytes of `HybridLM.init_cache(batch, max_length, dtype)`, bookkeeping included.

    Returns:
      Bytes by letter (all its layers together) and "total".
    """
    counts = {}
    for letter, layers in collections.Counter(config.layout.letters).items():
        slots = getattr(getattr(config.mixers, letter), "window", max_length)
        row = sum(_layer_bytes(config, letter, slots, dtype or config.dtype).values())
        if letter in "AW":
            # A document id a slot; position and document a row.
            row += INT32_BYTES * (slots + 2)
        # Full attention writes at one index that all rows share.
        counts[letter] = layers * (batch * row + (INT32_BYTES if letter == "A" else 0))
    return counts | {"total": sum(counts.values())}


def decode_bytes(config: ModelConfig, batch: int, context_length: int) -> dict[str, int]:
    """Bytes that one step of decoding must move, at `context_length` tokens a sequence.

    Parameters are read once for the batch: matrices in the compute dtype, the rest in its own; of
    an untied embedding the batch's rows alone, of experts as many as its tokens can meet. Recurrent
    states and convolution inputs are read and written, keys and values of the context read and
    those of one token written.

    Returns:
      "parameters", "state", "kv" and "total".
    """
    check(batch >= 1, f"decode_bytes is asked for {batch} sequences; give at least 1.")
    D, letters = config.d_model, config.layout.letters
    mixers = [_mixer(config, letter) for letter in letters]
    matrices = config.vocab_size * D + sum(mixer.matrix for mixer in mixers)
    for layer in range(len(letters)):
        matrices += _mlp(config, layer, active=True)
        if config.mlp_kind(layer) == "moe":
            met = min(config.moe.num_experts, batch * config.moe.top_k)
            matrices += 3 * D * config.moe.dim * (met - config.moe.top_k)
    if not config.tie_embeddings:
        matrices += batch * D
    others = param_counts(config)["norms"] + sum(mixer.other for mixer in mixers)
    counts = {
        "parameters": matrices * jnp.dtype(config.dtype).itemsize
        + others * jnp.dtype(config.param_dtype).itemsize,
        "state": 0,
        "kv": 0,
    }
    for letter in letters:
        held = layer_bytes(config, letter, context_length)
        counts["state"] += batch * 2 * (held["state"] + held["conv"])
        counts["kv"] += batch * (held["kv"] + layer_bytes(config, letter, 1)["kv"])
    return counts | {"total": sum(counts.values())}

"""Mamba-2: one projection for gate, values, keys, queries and steps; plain norm weights, no MLP."""

from __future__ import annotations

import math
from typing import Any

from fastweights import mixers
from fastweights.errors import check
from fastweights.interop.family import Context, Family
from fastweights.interop.fields import Fields
from fastweights.interop.tensors import (
    MAMBA_NAMES,
    Kernels,
    Layer,
    Pieces,
    Same,
    Shaped,
    Table,
    Taps,
    outer,
)
from fastweights.model import ModelConfig


def read(fields: Fields, tied: bool) -> ModelConfig:
    """The model that a config describes; `tied` says whether the head is the embedding."""
    fields.only(hidden_act=("silu",), use_bias=(False,), use_conv_bias=(True,))
    width, heads = fields.integer("hidden_size", 4096), fields.integer("num_heads", 128)
    head_dim, expand = fields.integer("head_dim", 64), fields.integer("expand", 2)
    check(
        heads * head_dim == expand * width,
        f"{fields.owner} has num_heads {heads} x head_dim {head_dim}, which is not expand "
        f"{expand} x hidden_size {width}; they must agree.",
    )
    limit = fields.tree.get("time_step_limit", [0.0, math.inf])
    check(
        isinstance(limit, list) and [isinstance(t, (int, float)) for t in limit] == [True, True],
        f"{fields.owner} has time_step_limit={limit!r}; it must be a list of two numbers.",
    )
    return ModelConfig(
        vocab_size=fields.integer("vocab_size", 32768),
        d_model=width,
        num_layers=fields.integer("num_hidden_layers", 64),
        pattern="N",
        mlp="none",
        tie_embeddings=tied,
        norm="plain",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        mixers=mixers.MixerConfigs(
            N=mixers.Mamba2Config(
                num_heads=heads,
                num_qk_heads=fields.integer("n_groups", 8),
                head_dim=fields.integer("state_size", 128),
                value_head_dim=head_dim,
                conv_size=fields.integer("conv_kernel", 4),
                time_step_limit=(float(limit[0]), float(limit[1])),
            )
        ),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model."""
    c = config.mixers.N
    inner = c.num_heads * c.value_dim
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_heads": c.num_heads,
        "head_dim": c.value_dim,
        "n_groups": c.qk_heads,
        "state_size": c.head_dim,
        "expand": inner / config.d_model if inner % config.d_model else inner // config.d_model,
        "conv_kernel": c.conv_size,
        "time_step_limit": [
            t if t != math.inf else {"__float__": "Infinity"} for t in c.time_step_limit
        ],
        "layer_norm_epsilon": config.norm_eps,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": config.tie_embeddings,
    }


def table(config: ModelConfig, context: Context) -> Table:
    """Every tensor."""
    D, c = config.d_model, config.mixers.N
    G, inner, shared = c.num_heads, c.num_heads * c.value_dim, c.qk_heads * c.head_dim
    yield from outer(config, context.norm, names=MAMBA_NAMES)
    for i in range(config.num_layers):
        layer = Layer(config.layout, i)
        yield layer("norm.weight", (D,), "mixer_norm.scale", context.norm)
        # Values are called x there, keys B and queries C.
        parts = (inner, inner, shared, shared, G)
        yield layer(
            "mixer.in_proj.weight",
            (sum(parts), D),
            [
                "mixer.read_out.gate.kernel",
                *(f"mixer.qkv.{name}.kernel" for name in "vkq"),
                "mixer.step.proj.kernel",
            ],
            Kernels(parts),
        )
        channels, shape = parts[1:4], (sum(parts[1:4]), 1, c.conv_size)
        taps = [f"mixer.qkv.conv_{name}" for name in "vkq"]
        yield layer("mixer.conv1d.weight", shape, taps, Taps(channels))
        biases = [f"mixer.qkv.conv_bias_{name}" for name in "vkq"]
        yield layer("mixer.conv1d.bias", shape[:1], biases, Pieces(channels))
        yield layer("mixer.A_log", (G,), "mixer.step.A_log", Same())
        yield layer("mixer.dt_bias", (G,), "mixer.step.dt_bias", Same())
        yield layer("mixer.D", (G,), "mixer.D", Same())
        grouped = Shaped((inner,), (c.qk_heads, inner // c.qk_heads))
        yield layer("mixer.norm.weight", (inner,), "mixer.read_out.norm.scale", grouped)
        yield layer("mixer.out_proj.weight", (D, inner), "mixer.read_out.out.kernel", Kernels((D,)))


FAMILY = Family(
    name="Mamba-2",
    model_types=("mamba2",),
    letters="N",
    prefix="backbone.",
    centred=False,
    tied_by_default=False,
    read=read,
    write=write,
    table=table,
)

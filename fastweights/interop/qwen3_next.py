"""Qwen3-Next: Qwen3.5's layers with a mixture of experts, its projections fused by key head."""

from __future__ import annotations

from typing import Any

from fastweights.interop import qwen3_5
from fastweights.interop.family import Context, Family
from fastweights.interop.fields import Fields
from fastweights.interop.tensors import Kernels, Layer, Table, outer, swiglu
from fastweights.mixers.experts import ExpertsConfig
from fastweights.model import ModelConfig


def read(fields: Fields, tied: bool) -> ModelConfig:
    """The model that a config describes; `tied` says whether the head is the embedding."""
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    dense = {i for i in range(layers) if (i + 1) % step}
    dense |= {i for i in fields.indices("mlp_only_layers") if i < layers}
    moe = ExpertsConfig(
        num_experts=fields.integer("num_experts", 512),
        top_k=fields.integer("num_experts_per_tok", 10),
        dim=fields.integer("moe_intermediate_size", 512),
        shared_dim=fields.integer("shared_expert_intermediate_size", 512),
        normalize=fields.flag("norm_topk_prob", True),
        dense_layers=tuple(sorted(dense)),
    )
    mlp_dim = fields.integer("intermediate_size", 5632)
    return qwen3_5.read_hybrid(fields, tied, mlp="moe", mlp_dim=mlp_dim, moe=moe)


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model."""
    moe = config.moe
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": config.mlp_width,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.dim,
        "shared_expert_intermediate_size": moe.shared_dim,
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe.dense_layers),
        **qwen3_5.write_hybrid(config),
    }


def table(config: ModelConfig, context: Context) -> Table:
    """Every tensor."""
    yield from outer(config, context.norm)
    for i, letter in enumerate(config.layout.letters):
        layer = Layer(config.layout, i)
        yield from qwen3_5.norms(layer, config, context)
        if config.mlp_kind(i) == "moe":
            yield from experts(layer, config)
        else:
            yield from swiglu(layer, config.d_model, config.mlp_width)
        if letter == "A":
            yield from qwen3_5.attention(layer, config, context)
        else:
            yield from gated_delta_net(layer, config, context)


def gated_delta_net(layer: Layer, config: ModelConfig, context: Context) -> Table:
    """Each key head's rows of [q, k, v, z] and of [b, a] lie together."""
    D, c = config.d_model, config.mixers.G
    H, each = c.qk_heads, c.num_heads // c.qk_heads
    sizes = (c.head_dim, c.head_dim, each * c.value_dim, each * c.value_dim)
    yield layer(
        "linear_attn.in_proj_qkvz.weight",
        (H * sum(sizes), D),
        [*(f"mixer.qkv.{name}.kernel" for name in "qkv"), "mixer.read_out.gate.kernel"],
        Kernels(sizes, groups=H),
    )
    yield layer(
        "linear_attn.in_proj_ba.weight",
        (2 * c.num_heads, D),
        ("mixer.beta.proj.kernel", "mixer.decay.proj.kernel"),
        Kernels((each, each), groups=H),
    )
    yield from qwen3_5.delta_memory(layer, config, context)


def experts(layer: Layer, config: ModelConfig) -> Table:
    """Router, experts and the shared expert with its gate."""
    D, c = config.d_model, config.moe
    E, F = c.num_experts, c.dim
    yield layer("mlp.gate.weight", (E, D), "mlp.router.kernel", Kernels((E,)))
    shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    for e in range(E):
        for role, shape in shapes.items():
            yield layer(
                f"mlp.experts.{e}.{role}_proj.weight",
                shape,
                f"mlp.{role}.kernel",
                Kernels(shape[:1]),
                expert=e,
            )
    if c.shared_dim:
        yield from swiglu(layer, D, c.shared_dim, at="mlp.shared_expert", to="mlp.shared")
        yield layer(
            "mlp.shared_expert_gate.weight", (1, D), "mlp.shared_gate.kernel", Kernels((1,))
        )


FAMILY = Family(
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    letters="GA",
    prefix="model.",
    centred=True,
    read=read,
    write=write,
    table=table,
)

"""Qwen3.5 (dense text): Gated DeltaNet and gated attention, zero-centred norms.

Published as `qwen3_5_text`, or inside `qwen3_5` with a vision tower beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastweights import mixers
from fastweights.errors import UserError
from fastweights.interop.family import Context, Family
from fastweights.interop.fields import Fields, layer_types, shortest_pattern
from fastweights.interop.tensors import Kernels, Layer, Same, Table, Taps, outer, swiglu
from fastweights.model import ModelConfig


def read(fields: Fields, tied: bool) -> ModelConfig:
    """The model that a config describes; `tied` says whether the head is the embedding."""
    fields.only(output_gate_type=("swish", "silu"))
    return read_hybrid(
        fields, tied, mlp="swiglu", mlp_dim=fields.integer("intermediate_size", 12288)
    )


def read_hybrid(fields: Fields, tied: bool, **more: Any) -> ModelConfig:
    """What Qwen3.5 and Qwen3-Next share."""
    fields.only(
        hidden_act=("silu",),
        attention_bias=(False,),
        attention_dropout=(0.0, None),
        attn_output_gate=(True,),
        use_sliding_window=(False, None),
    )
    head_dim = fields.integer("head_dim", 256)
    letters = fields.layer_letters()
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        d_model=fields.integer("hidden_size"),
        num_layers=len(letters),
        pattern=shortest_pattern(letters),
        tie_embeddings=tied,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        mixers=mixers.MixerConfigs(
            G=mixers.GatedDeltaNetConfig(
                num_heads=fields.integer("linear_num_value_heads", 32),
                num_qk_heads=fields.integer("linear_num_key_heads", 16),
                head_dim=fields.integer("linear_key_head_dim", 128),
                value_head_dim=fields.integer("linear_value_head_dim", 128),
                conv_size=fields.integer("linear_conv_kernel_dim", 4),
            ),
            A=mixers.AttentionConfig(
                num_heads=fields.integer("num_attention_heads"),
                num_kv_heads=fields.integer("num_key_value_heads"),
                head_dim=head_dim,
                qk_norm=True,
                output_gate=True,
                **fields.rope(head_dim, 0.25),
            ),
        ),
        **more,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": config.mlp_width,
        **write_hybrid(config),
    }


def write_hybrid(config: ModelConfig) -> dict[str, Any]:
    """What Qwen3.5 and Qwen3-Next share."""
    g, a = config.mixers.G, config.mixers.A
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "layer_types": layer_types(config.layout.letters),
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "linear_num_value_heads": g.num_heads,
        "linear_num_key_heads": g.qk_heads,
        "linear_key_head_dim": g.head_dim,
        "linear_value_head_dim": g.value_dim,
        "linear_conv_kernel_dim": g.conv_size,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": a.rope_theta,
            "partial_rotary_factor": a.rope_fraction,
        },
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": config.tie_embeddings,
    }


def table(config: ModelConfig, context: Context) -> Table:
    """Every tensor."""
    yield from outer(config, context.norm)
    for i, letter in enumerate(config.layout.letters):
        layer = Layer(config.layout, i)
        yield from norms(layer, config, context)
        yield from swiglu(layer, config.d_model, config.mlp_width)
        if letter == "A":
            yield from attention(layer, config, context)
        else:
            yield from gated_delta_net(layer, config, context)


def norms(layer: Layer, config: ModelConfig, context: Context) -> Table:
    """The two norms on the residual stream."""
    D = config.d_model
    yield layer("input_layernorm.weight", (D,), "mixer_norm.scale", context.norm)
    yield layer("post_attention_layernorm.weight", (D,), "mlp_norm.scale", context.norm)


def attention(layer: Layer, config: ModelConfig, context: Context) -> Table:
    """Gated attention: the query projection holds [query | gate] of each head in turn."""
    D, c = config.d_model, config.mixers.A
    H, J, K = c.num_heads, c.kv_heads, c.head_dim
    yield layer(
        "self_attn.q_proj.weight",
        (2 * H * K, D),
        ("mixer.qkv.q.kernel", "mixer.gate.kernel"),
        Kernels((K, K), groups=H),
    )
    yield layer("self_attn.k_proj.weight", (J * K, D), "mixer.qkv.k.kernel", Kernels((J * K,)))
    yield layer("self_attn.v_proj.weight", (J * K, D), "mixer.qkv.v.kernel", Kernels((J * K,)))
    yield layer("self_attn.o_proj.weight", (D, H * K), "mixer.out.kernel", Kernels((D,)))
    yield layer("self_attn.q_norm.weight", (K,), "mixer.q_norm.scale", context.head_norm)
    yield layer("self_attn.k_norm.weight", (K,), "mixer.k_norm.scale", context.head_norm)


def gated_delta_net(layer: Layer, config: ModelConfig, context: Context) -> Table:
    """Gated DeltaNet with one projection for q, k and v."""
    D, c = config.d_model, config.mixers.G
    G, V = c.num_heads, c.num_heads * c.value_dim
    dims = tuple(c.qkv_dims.values())
    kernels = [f"mixer.qkv.{name}.kernel" for name in "qkv"]
    yield layer("linear_attn.in_proj_qkv.weight", (sum(dims), D), kernels, Kernels(dims))
    yield layer("linear_attn.in_proj_z.weight", (V, D), "mixer.read_out.gate.kernel", Kernels((V,)))
    yield layer("linear_attn.in_proj_b.weight", (G, D), "mixer.beta.proj.kernel", Kernels((G,)))
    yield layer("linear_attn.in_proj_a.weight", (G, D), "mixer.decay.proj.kernel", Kernels((G,)))
    yield from delta_memory(layer, config, context)


def delta_memory(layer: Layer, config: ModelConfig, context: Context) -> Table:
    """Convolution, decay, norm and output of Gated DeltaNet."""
    D, c = config.d_model, config.mixers.G
    G, V, W = c.num_heads, c.value_dim, c.conv_size
    dims = tuple(c.qkv_dims.values())
    shape = (sum(dims), W, 1) if context.mlx else (sum(dims), 1, W)
    taps = [f"mixer.qkv.conv_{name}" for name in "qkv"]
    yield layer("linear_attn.conv1d.weight", shape, taps, Taps(dims, last=context.mlx))
    yield layer("linear_attn.A_log", (G,), "mixer.decay.A_log", Same(), wide=True)
    yield layer("linear_attn.dt_bias", (G,), "mixer.decay.dt_bias", Same())
    yield layer("linear_attn.norm.weight", (V,), "mixer.read_out.norm.scale", Same(), wide=True)
    yield layer(
        "linear_attn.out_proj.weight", (D, G * V), "mixer.read_out.out.kernel", Kernels((D,))
    )


def unwrap(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config with a vision tower."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise UserError(f"config.json has text_config={text!r}; it must be an object.")
    return text


FAMILY = Family(
    name="Qwen3.5",
    model_types=("qwen3_5_text", "qwen3_5"),
    letters="GA",
    prefix="model.",
    centred=True,
    read=read,
    write=write,
    table=table,
    unwrap=unwrap,
)

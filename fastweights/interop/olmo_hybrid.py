"""OLMo-Hybrid: Gated DeltaNet with beta in (0, 2), and attention whose layers norm their outputs.

Norm weights are plain; q and k of attention are normed over all heads together.
"""

from __future__ import annotations

from typing import Any

from fastweights import mixers
from fastweights.interop.family import Context, Family
from fastweights.interop.fields import Fields, layer_types, shortest_pattern
from fastweights.interop.tensors import Kernels, Layer, Same, Table, Taps, outer, swiglu
from fastweights.model import ModelConfig

READ_OUT_EPS = 1e-5  # fixed in the published code, whatever rms_norm_eps says


def read(fields: Fields, tied: bool) -> ModelConfig:
    """The model that a config describes; `tied` says whether the head is the embedding."""
    fields.only(hidden_act=("silu",), attention_bias=(False,), attention_dropout=(0.0, None))
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    key_heads = fields.integer("linear_num_key_heads", heads)
    key_dim = fields.integer("linear_key_head_dim", max(1, int(0.75 * width / key_heads)))
    head_dim = fields.integer("head_dim", max(1, width // heads))
    letters = fields.layer_letters()
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        d_model=width,
        num_layers=len(letters),
        pattern=shortest_pattern(letters),
        mlp_dim=fields.integer("intermediate_size"),
        tie_embeddings=tied,
        norm="plain",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        post_norm="A",
        mixers=mixers.MixerConfigs(
            G=mixers.GatedDeltaNetConfig(
                num_heads=fields.integer("linear_num_value_heads", heads),
                num_qk_heads=key_heads,
                head_dim=key_dim,
                value_head_dim=fields.integer("linear_value_head_dim", 2 * key_dim),
                conv_size=fields.integer("linear_conv_kernel_dim", 4),
                allow_neg_eigval=fields.flag("linear_allow_neg_eigval", True),
                norm_eps=READ_OUT_EPS,
            ),
            A=mixers.AttentionConfig(
                num_heads=heads,
                num_kv_heads=fields.integer("num_key_value_heads", heads),
                head_dim=head_dim,
                qk_norm=True,
                qk_norm_over="row",
                **fields.rope(head_dim, 1.0),
            ),
        ),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model."""
    g, a = config.mixers.G, config.mixers.A
    usual = a.head_dim == config.d_model // a.num_heads
    return {
        **({} if usual else {"head_dim": a.head_dim}),
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "layer_types": layer_types(config.layout.letters),
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.kv_heads,
        "linear_num_value_heads": g.num_heads,
        "linear_num_key_heads": g.qk_heads,
        "linear_key_head_dim": g.head_dim,
        "linear_value_head_dim": g.value_dim,
        "linear_conv_kernel_dim": g.conv_size,
        "linear_allow_neg_eigval": g.allow_neg_eigval,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": a.rope_theta if a.rope_fraction else None,
        },
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 65_536,
        "tie_word_embeddings": config.tie_embeddings,
    }


def table(config: ModelConfig, context: Context) -> Table:
    """Every tensor."""
    yield from outer(config, context.norm)
    for i, letter in enumerate(config.layout.letters):
        layer = Layer(config.layout, i)
        yield from swiglu(layer, config.d_model, config.mlp_width)
        if letter == "A":
            yield from attention(layer, config, context, i)
        else:
            yield from gated_delta_net(layer, config, context, i)


def attention(layer: Layer, config: ModelConfig, context: Context, i: int) -> Table:
    """Attention and the norms behind it and behind the MLP."""
    D, c = config.d_model, config.mixers.A
    dims = c.qkv_dims
    for name, dim in dims.items():
        yield layer(
            f"self_attn.{name}_proj.weight", (dim, D), f"mixer.qkv.{name}.kernel", Kernels((dim,))
        )
    yield layer("self_attn.o_proj.weight", (D, dims["q"]), "mixer.out.kernel", Kernels((D,)))
    for name, dim in c.qk_norm_dims.items():
        yield layer(f"self_attn.{name}_norm.weight", (dim,), f"mixer.{name}_norm.scale", Same())
    # transformers, saving, gives this norm the name that Gated DeltaNet's layers have for theirs.
    name = "post_attention_layernorm.weight"
    if f"layers.{i}.{name}" not in context.shapes:
        name = "feedforward_layer_norm.weight"
    yield layer(name, (D,), "mixer_norm.scale", context.norm)
    yield layer("post_feedforward_layernorm.weight", (D,), "mlp_norm.scale", context.norm)


def gated_delta_net(layer: Layer, config: ModelConfig, context: Context, i: int) -> Table:
    """Gated DeltaNet and the norms before it and before the MLP."""
    D, c = config.d_model, config.mixers.G
    G, V, W = c.num_heads, c.num_heads * c.value_dim, c.conv_size
    yield layer("attention_layer_norm.weight", (D,), "mixer_norm.scale", context.norm)
    yield layer("feedforward_layer_norm.weight", (D,), "mlp_norm.scale", context.norm)
    dims = tuple(c.qkv_dims.values())
    for name, dim in c.qkv_dims.items():
        yield layer(
            f"linear_attn.{name}_proj.weight", (dim, D), f"mixer.qkv.{name}.kernel", Kernels((dim,))
        )
    names = [f"linear_attn.{name}_conv1d.weight" for name in "qkv"]
    shapes = [(dim, 1, W) for dim in dims]
    # transformers, saving, cuts the joined convolution into thirds, whatever its parts are.
    stored = [context.shapes.get(f"layers.{i}.{name}", (0,)) for name in names]
    rows = [shape[0] for shape in stored]
    if sum(rows) == sum(dims) and stored == [(n, 1, W) for n in rows]:
        shapes = stored
    yield layer(names, shapes, [f"mixer.qkv.conv_{name}" for name in "qkv"], Taps(dims))
    yield layer("linear_attn.b_proj.weight", (G, D), "mixer.beta.proj.kernel", Kernels((G,)))
    yield layer("linear_attn.a_proj.weight", (G, D), "mixer.decay.proj.kernel", Kernels((G,)))
    yield layer("linear_attn.g_proj.weight", (V, D), "mixer.read_out.gate.kernel", Kernels((V,)))
    yield layer("linear_attn.A_log", (G,), "mixer.decay.A_log", Same(), wide=True)
    yield layer("linear_attn.dt_bias", (G,), "mixer.decay.dt_bias", Same())
    yield layer("linear_attn.o_norm.weight", (c.value_dim,), "mixer.read_out.norm.scale", Same())
    yield layer("linear_attn.o_proj.weight", (D, V), "mixer.read_out.out.kernel", Kernels((D,)))


FAMILY = Family(
    name="OLMo-Hybrid",
    model_types=("olmo_hybrid",),
    letters="GA",
    prefix="model.",
    centred=False,
    read=read,
    write=write,
    table=table,
)

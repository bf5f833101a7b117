"""Mamba: a selective scan between its projections; plain norm weights, no MLP."""

from __future__ import annotations

from typing import Any

from fastweights import mixers
from fastweights.interop.family import Context, Family
from fastweights.interop.fields import Fields
from fastweights.interop.tensors import MAMBA_NAMES, Kernels, Layer, Same, Table, Taps, outer
from fastweights.model import ModelConfig


def read(fields: Fields, tied: bool) -> ModelConfig:
    """The model that a config describes; `tied` says whether the head is the embedding."""
    fields.only(hidden_act=("silu",), use_bias=(False,), use_conv_bias=(True,))
    rank = fields.tree.get("time_step_rank", "auto")
    return ModelConfig(
        vocab_size=fields.integer("vocab_size", 50280),
        d_model=fields.integer("hidden_size", 768),
        num_layers=fields.integer("num_hidden_layers", 32),
        pattern="M",
        mlp="none",
        tie_embeddings=tied,
        norm="plain",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        mixers=mixers.MixerConfigs(
            M=mixers.MambaConfig(
                d_state=fields.integer("state_size", 16),
                expand=fields.integer("expand", 2),
                conv_size=fields.integer("conv_kernel", 4),
                dt_rank=0 if rank == "auto" else fields.integer("time_step_rank"),
            )
        ),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model."""
    c = config.mixers.M
    return {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "state_size": c.d_state,
        "expand": c.expand,
        "conv_kernel": c.conv_size,
        "time_step_rank": c.rank(config.d_model),
        "layer_norm_epsilon": config.norm_eps,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": config.tie_embeddings,
    }


def table(config: ModelConfig, context: Context) -> Table:
    """Every tensor."""
    D, c = config.d_model, config.mixers.M
    E, N, R = c.channels(D), c.d_state, c.rank(D)
    yield from outer(config, context.norm, names=MAMBA_NAMES)
    for i in range(config.num_layers):
        layer = Layer(config.layout, i)
        yield layer("norm.weight", (D,), "mixer_norm.scale", context.norm)
        into = ("mixer.inputs.x.kernel", "mixer.gate.kernel")
        yield layer("mixer.in_proj.weight", (2 * E, D), into, Kernels((E, E)))
        yield layer("mixer.conv1d.weight", (E, 1, c.conv_size), "mixer.inputs.conv_x", Taps((E,)))
        yield layer("mixer.conv1d.bias", (E,), "mixer.inputs.conv_bias_x", Same())
        yield layer(
            "mixer.x_proj.weight",
            (R + 2 * N, E),
            [f"mixer.{name}.kernel" for name in ("dt_down", "B", "C")],
            Kernels((R, N, N)),
        )
        yield layer("mixer.dt_proj.weight", (E, R), "mixer.dt_up.kernel", Kernels((E,)))
        yield layer("mixer.dt_proj.bias", (E,), "mixer.dt_bias", Same())
        yield layer("mixer.A_log", (E, N), "mixer.A_log", Same())
        yield layer("mixer.D", (E,), "mixer.D", Same())
        yield layer("mixer.out_proj.weight", (D, E), "mixer.out.kernel", Kernels((D,)))


FAMILY = Family(
    name="Mamba",
    model_types=("mamba",),
    letters="M",
    prefix="backbone.",
    centred=False,
    tied_by_default=True,
    read=read,
    write=write,
    table=table,
)

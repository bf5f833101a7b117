"""What a run prints before its first step: devices, sizes, work and memory."""

import importlib.metadata
from typing import Any

import jax

from fastweights import flops, pattern
from fastweights.config import Config
from fastweights.training.state import Blueprint


def describe(
    config: Config, mesh: jax.sharding.Mesh, blueprint: Blueprint, compiled: Any, seconds: float
) -> str:
    """The banner; memory comes from the compiled step, FLOPs from the config."""
    device = jax.devices()[0]
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    layout = pattern.expand(config.model.pattern, config.model.num_layers)
    parts = flops.param_counts(config.model)
    total = parts.pop("total")
    tokens = config.batch_size * config.data.length
    per_token = flops.train_flops_per_token(config.model, config.data.length)
    group = f"{layout.num_groups} x {layout.group}" + (f" + {layout.tail}" if layout.tail else "")
    lines = {
        "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform}), mesh {axes}, "
        f"{jax.process_count()} process(es), jax {importlib.metadata.version('jax')}",
        "layers": f"{layout.letters} ({group}), attention share "
        f"{pattern.attention_share(layout.letters):.0%}",
        "parameters": f"{total:,} = " + " + ".join(f"{k} {v:,}" for k, v in parts.items() if v),
        "work": f"{config.steps:,} steps x {tokens:,} tokens = {config.steps * tokens:,} tokens, "
        f"{per_token / 1e6:.3f} MFLOPs a token",
        "memory": f"{memory(compiled)} a device",
        "compile": f"{seconds:.1f} s",
    }
    return "\n".join(f"{name:>10}  {text}" for name, text in lines.items())


def memory(compiled: Any) -> str:
    """Bytes of a compiled step by kind, in MB."""
    stats = compiled.memory_analysis()
    if stats is None:
        return "not reported by this backend"
    # The donated state is both argument and output: count it once.
    kinds = {
        "state and batch": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "new outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
    }
    return ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in kinds.items())

"""Memory without running anything: of training from the compiler, of caches from the config.

    python scripts/memory_table.py training [--mixers GM] [--lengths 2048 8192]
    python scripts/memory_table.py cache --config configs/qwen3_5.py:size=27b

`training` compiles forward and backward of one mixer on a packed row (batch 1, width 512, float32)
and prints what XLA sets aside for it, in float32 arrays of [B, T, D]. `cache` prints in what one
sequence is remembered at each context length, beside a twin whose layers are all attention.
"""

import argparse
import dataclasses
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights import cli, flops, mixers
from fastweights import config as config_lib
from fastweights.errors import check
from fastweights.model import ModelConfig

WIDTH = 512
# The inner width is the model's; Mamba and Mamba-2 take twice that, as published.
OPTIONS: dict[str, dict[str, Any]] = {
    **{letter: dict(num_heads=8, head_dim=64) for letter in "LDGK"},
    "N": dict(num_heads=16, head_dim=64, value_head_dim=64),
    "M": {},
    "S": {},
}
PARTS = {"state": "state", "conv": "convolution inputs", "kv": "keys and values"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("table", choices=("training", "cache"))
    parser.add_argument("--mixers", default="".join(OPTIONS), help="letters for training")
    parser.add_argument("--config", default="configs/qwen3_5.py:size=27b", help="for cache")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens")
    args, overrides = cli.parse(parser, argv)
    for length in args.lengths or ():
        check(length >= 1, f"--lengths has {length}; give numbers of tokens, 1 or more.")
    if args.table == "training":
        check(not overrides, f"the training table takes no overrides, got {overrides}.")
        for letter in args.mixers:
            check(letter in OPTIONS, f"mixer '{letter}' is not one of {', '.join(OPTIONS)}.")
        device = jax.devices()[0]
        print(
            f"{device.device_kind} ({platform.machine()}), jax {jax.__version__}, float32, "
            f"{time.strftime('%Y-%m-%d')}"
        )
        show(training_table(args.mixers, args.lengths or [2048, 8192]))
    else:
        config = config_lib.load(args.config, overrides).model
        show(cache_table(config, args.lengths or [4096, 32_768, 262_144]))
    return 0


def training_table(letters: str, lengths: list[int]) -> list[list[str]]:
    rows = [["mixer", *(f"T = {length:,}" for length in lengths), "bytes, last over first"]]
    for letter in letters:
        found = [training_bytes(letter, length) for length in lengths]
        arrays = [f"{n / array_bytes(t):.1f}" for n, t in zip(found, lengths, strict=True)]
        rows.append([f"`{letter}`", *arrays, f"{found[-1] / found[0]:.2f}"])
    return rows


def array_bytes(length: int) -> int:
    """Bytes of one float32 [1, T, D]."""
    return 4 * length * WIDTH


def training_bytes(letter: str, length: int) -> int:
    """Bytes of temporaries in the compiled gradient of one mixer on a packed row."""
    gradient, shapes = mixer_gradient(letter, length)
    return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def mixer_gradient(letter: str, length: int, **options: Any):
    """(gradient of parameters and inputs as a function, shapes of its arguments)."""
    mixer_class, config_class = mixers.MIXERS[letter]
    config = config_class(**OPTIONS.get(letter, {}) | options)
    kinds: dict[str, Any] = dict(dtype=jnp.float32, param_dtype=jnp.float32, norm_eps=1e-6)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: mixer_class(WIDTH, config, rngs=nnx.Rngs(0), **kinds))
    )

    def loss(params, x_BTD, segment_ids_BT):
        y_BTD, _ = nnx.merge(graphdef, params)(x_BTD, segment_ids_BT=segment_ids_BT)
        return jnp.sum(jnp.square(y_BTD))

    x_BTD = jax.ShapeDtypeStruct((1, length, WIDTH), jnp.float32)
    segment_ids_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.grad(loss, argnums=(0, 1)), (nnx.to_pure_dict(state), x_BTD, segment_ids_BT)


def cache_table(config: ModelConfig, lengths: list[int]) -> list[list[str]]:
    rows = [["layers", "what", "a layer", *(f"{length:,} tokens" for length in lengths)]]
    letters = config.layout.letters
    for letter in sorted(set(letters), key=letters.index):
        layers = letters.count(letter)
        found = [flops.layer_bytes(config, letter, length) for length in lengths]
        for part, name in PARTS.items():
            if found[-1][part]:
                fixed = found[0][part] == found[-1][part]
                each = human(found[-1][part]) if fixed else "grows"
                total = [human(layers * parts[part]) for parts in found]
                rows.append([f"{layers} `{letter}`", name, each, *total])
    totals = [flops.state_bytes(config, length)["total"] for length in lengths]
    rows.append(["", "total", "", *map(human, totals)])
    if "A" in letters:
        twin = dataclasses.replace(config, pattern="A")
        alone, all_of_them = (
            [flops.state_bytes(c, length)["A"] for length in lengths] for c in (config, twin)
        )
        rows.append(["", "all layers attention", "", *map(human, all_of_them)])
        for name, given in (("keys and values", alone), ("total", totals)):
            ratios = [f"{a / b:.2f}" for a, b in zip(all_of_them, given, strict=True)]
            rows.append(["", f"over {name}", "", *ratios])
    return rows


def human(count: int) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.4g} {unit}"
    return f"{count} B"


def show(rows: list[list[str]]) -> None:
    """Prints a table, headings first, as Markdown."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    for row in ruled:
        print("| " + " | ".join(map(str.ljust, row, widths)) + " |", flush=True)


if __name__ == "__main__":
    cli.run(main)

"""Times the training step of a config on random tokens: tokens/s, MFU, peak memory.

    python scripts/bench_train.py --config configs/qwen3_5.py:size=0.8b --config.batch_size=4 \\
        --config.model.remat=dots [--implementation chunked]

The step is the one that `train.py` compiles, on one document a row. `--implementation` sets the
form of every recurrent mixer, for a comparison. MFU counts the FLOPs of `flops.py`: 3 times the
forward pass.
"""

import argparse
import dataclasses
import time

import jax
import numpy as np

from fastweights import cli, flops, sharding
from fastweights import config as config_lib
from fastweights.errors import check
from fastweights.training import banner, optim
from fastweights.training.state import init_state, make_blueprint
from fastweights.training.step import compile_step, place_batch

WARMUP = 2


def with_implementation(config: config_lib.Config, name: str) -> config_lib.Config:
    """The config with one form for every recurrent mixer of its pattern."""
    letters = sorted(set(config.model.pattern) - set("AW"))
    return config_lib.override(
        config, [f"model.mixers.{letter}.implementation={name}" for letter in letters]
    )


def make_batch(config: config_lib.Config, mesh: jax.sharding.Mesh):
    shape = (config.batch_size, config.data.length)
    rng = np.random.default_rng(0)
    return place_batch(
        {
            "tokens": rng.integers(0, config.model.vocab_size, shape, np.int32),
            "targets": rng.integers(0, config.model.vocab_size, shape, np.int32),
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
        },
        mesh,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Times a training step.")
    parser.add_argument("--config", required=True, help="config file, path.py or path.py:arg")
    parser.add_argument("--steps", type=int, default=10, help="steps timed, after two unmeasured")
    parser.add_argument(
        "--implementation",
        help="form of every recurrent mixer of the pattern, which all must know it",
    )
    args, overrides = cli.parse(parser, None)
    check(args.steps >= 1, f"--steps is {args.steps}; use 1 or more.")
    config = config_lib.load(args.config, overrides)
    if args.implementation:
        config = with_implementation(config, args.implementation)
    config = dataclasses.replace(config, steps=WARMUP + args.steps)

    mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(config.batch_size // config.accum_steps, mesh, config.data.length)
    tx = optim.make_optimizer(config.optim, config.steps)
    blueprint = make_blueprint(config.model, tx, mesh)
    started = time.perf_counter()
    compiled = compile_step(config, blueprint, tx, mesh)
    print(banner.describe(config, mesh, blueprint, compiled, time.perf_counter() - started))
    with jax.set_mesh(mesh):
        state = init_state(config.model, tx, blueprint, config.seed)
        batch = make_batch(config, mesh)
        for _ in range(WARMUP):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(state)
        started = time.perf_counter()
        for _ in range(args.steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - started) / args.steps

    tokens = config.batch_size * config.data.length
    work = tokens * flops.train_flops_per_token(config.model, config.data.length)
    peak = flops.peak_flops(jax.devices()[0].device_kind)
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    print(
        f"{1e3 * seconds:.1f} ms a step, {tokens / seconds:,.0f} tokens/s"
        + (f", MFU {work / seconds / peak / jax.device_count():.1%}" if peak else "")
        + (f", peak memory {used / 1e9:.1f} GB" if used else "")
        + f", loss {float(metrics['loss']):.3f}, {time.strftime('%Y-%m-%d')}"
    )
    return 0


if __name__ == "__main__":
    cli.run(main)

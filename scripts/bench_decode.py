"""Times decoding against context length: a hybrid and its all-attention twin, interleaved.

    python scripts/bench_decode.py --config configs/qwen3_5.py:size=0.8b [--batches 1,16,64]

Weights are random and the context is taken as read: a cache's contents do not change what a step
costs. The twin has the config's own attention in every layer. `bytes` is what a step must move
(`flops.decode_bytes`), `floor` the share of the memory bandwidth that this amounts to (the device's
data sheet, or --bandwidth in bytes/s; "-" where neither is known), `slower` the loss of speed
against the first context. Times are medians of bursts. --prefill_length N also times reading N
tokens in chunks.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from fastweights import cli, config, flops
from fastweights.errors import check
from fastweights.generation import Engine
from fastweights.generation.weights import for_decoding, join, unrolled
from fastweights.model import ModelConfig, abstract_model

CONTEXTS = "2560,16384,65536,262144"


def numbers(name: str, text: str) -> list[int]:
    """A comma-separated list of positive whole numbers."""
    found = [int(item) if item.strip().isdigit() else 0 for item in text.split(",")]
    check(min(found) >= 1, f"--{name} is '{text}'; give whole numbers above 0, such as 1,16.")
    return found


def twin(model: ModelConfig) -> ModelConfig:
    """The same model with attention in every layer."""
    check(
        "A" in model.pattern,
        f"the pattern {model.pattern} has no A whose options its twin could take; use a hybrid.",
    )
    return dataclasses.replace(model, pattern="A")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _normal(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return 0.02 * jax.random.normal(jax.random.key(0), shape, dtype)


def random_params(model: ModelConfig):
    """As an `Engine` keeps them, each array from the same numbers: a program that starts all layers
    as training does takes longer to compile than all that is timed. In the compute dtype, for a
    large model fits but once."""
    narrow = unrolled(dataclasses.replace(model, param_dtype=model.dtype))
    shapes = abstract_model(narrow)[1]
    return join(for_decoding(narrow, jax.tree.map(lambda x: _normal(x.shape, x.dtype), shapes)))


def filled_cache(engine: Engine, context: int):
    """Caches as after `context` tokens, keys and values all zero."""

    def fill(path, leaf):
        match path[-1].key:
            case "index" | "position":
                return jnp.full_like(leaf, context)
            case "slot_document":
                return jnp.broadcast_to((jnp.arange(leaf.shape[1]) < context)[None], leaf.shape) * 1
            case _:
                return leaf

    return jax.tree_util.tree_map_with_path(fill, engine.fresh_cache())


class Case:
    """One model, batch and context, compiled; `time()` runs a burst."""

    def __init__(self, model: ModelConfig, params, batch: int, context: int, steps: int, runs: int):
        # One burst more than is timed, for the first is a rehearsal.
        self.engine = Engine(
            model,
            params,
            rows=batch,
            prompt_length=context,
            new_tokens=steps * (runs + 1),
            chunk=1,
            burst=steps,
        )
        self.engine.compile_decode()
        self.bytes = flops.decode_bytes(model, batch, context)["total"]
        self.batch, self.context, self.steps = batch, context, steps

    def fill(self) -> None:
        """Makes the caches."""
        self.start, self.seconds = 0, []
        self.cache = filled_cache(self.engine, self.context)
        self.logits = jnp.zeros((self.batch, self.engine.config.vocab_size), jnp.float32)

    def time(self) -> None:
        before = self.engine.timing.decode_seconds
        self.cache, self.logits, _ = self.engine.decode(self.cache, self.logits, self.start)
        if self.start:
            self.seconds.append((self.engine.timing.decode_seconds - before) / self.steps)
        self.start += self.steps


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", required=True, help="config file, path.py or path.py:arg")
    parser.add_argument("--contexts", default=CONTEXTS, help="tokens before the timed ones")
    parser.add_argument("--batches", default="1", help="sequences at a time")
    parser.add_argument("--steps", type=int, default=32, help="tokens of a burst")
    parser.add_argument("--runs", type=int, default=5, help="bursts timed")
    parser.add_argument("--bandwidth", type=float, help="bytes/s of the memory")
    parser.add_argument("--prefill_length", type=int, default=0, help="tokens to read (0: none)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens prefill reads at a time")
    args, overrides = cli.parse(parser, argv)
    contexts, batches = (numbers(n, getattr(args, n)) for n in ("contexts", "batches"))
    for name in ("steps", "runs"):
        check(getattr(args, name) >= 1, f"--{name} is {getattr(args, name)}; use 1 or more.")
    given = args.bandwidth
    check(given is None or given > 0, f"--bandwidth is {given}; give bytes/s, such as 4.8e12.")
    hybrid = config.load(args.config, overrides).model
    models = {"hybrid": unrolled(hybrid), "twin": unrolled(twin(hybrid))}
    params = {name: random_params(model) for name, model in models.items()}
    kind = jax.devices()[0].device_kind
    bandwidth = args.bandwidth or flops.peak_bandwidth(kind)

    letters = {name: model.layout.letters for name, model in models.items()}
    print(f"{kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}; {hybrid.dtype}; {letters}",
          flush=True)  # fmt: skip
    if args.prefill_length:
        print(prefill_line(models["hybrid"], params["hybrid"], args.prefill_length, args.chunk))
    print(f"{'batch':>5} {'context':>8} {'model':>7} {'ms a step':>10} {'tokens/s':>10} "
          f"{'bytes':>15} {'floor':>6} {'slower':>7}")  # fmt: skip
    taken = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    slots = args.steps * (args.runs + 1)

    def compiled(point: tuple[int, int]) -> dict[str, Case]:
        batch, context = point
        fitting = fit(models, taken, batch, context + slots, limit)
        sizes = (batch, context, args.steps, args.runs)
        return {name: Case(models[name], params[name], *sizes) for name in fitting}

    points = [(batch, context) for batch in batches for context in contexts]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(compiled, points))
    first: dict[tuple[int, str], float] = {}
    for (batch, context), cases in zip(points, found, strict=True):
        for name, seconds, moved in measured(cases, args.runs):
            slower = 1 - first.setdefault((batch, name), seconds) / seconds
            floor = f"{moved / bandwidth / seconds:6.1%}" if bandwidth else f"{'-':>6}"
            print(
                f"{batch:>5} {context:>8} {name:>7} {1e3 * seconds:>10.3f} "
                f"{batch / seconds:>10.1f} {moved:>15,} {floor} {slower:>7.1%}",
                flush=True,
            )
        for name in models:
            if name not in fit(models, taken, batch, context + slots, limit):
                print(f"{batch:>5} {context:>8} {name:>7}  the caches do not fit")
    return 0


def measured(cases: dict[str, Case], runs: int) -> list[tuple[str, float, int]]:
    """(name, median seconds a step, bytes a step) of cases that take turns, and frees them."""
    for case in cases.values():
        case.fill()
    for _ in range(runs + 1):
        for case in cases.values():
            case.time()
    found = [(name, float(np.median(x.seconds)), x.bytes) for name, x in cases.items()]
    cases.clear()
    return found


def fit(
    models: dict[str, ModelConfig], taken: int, batch: int, slots: int, limit: int | None
) -> list[str]:
    """The models whose caches fit beside those before them and `taken` bytes, with a tenth spare.

    All, where the device does not tell its `limit`.
    """
    found = []
    for name, model in models.items():
        needed = flops.cache_bytes(model, batch, slots)["total"]
        if limit is None or taken + needed <= 0.9 * limit:
            found.append(name)
            taken += needed
    return found


def prefill_line(model: ModelConfig, params, length: int, chunk: int) -> str:
    """Reads `length` random tokens twice; the second time counts."""
    engine = Engine(model, params, rows=1, prompt_length=length, new_tokens=1, chunk=chunk)
    prompt = np.random.default_rng(0).integers(0, model.vocab_size, length)
    engine.prefill([prompt])
    before = engine.timing.prefill_seconds
    engine.prefill([prompt])
    speed = length / (engine.timing.prefill_seconds - before)
    return f"prefill of {length} tokens, {engine.chunk} at a time: {speed:,.0f} tokens/s"


if __name__ == "__main__":
    cli.run(main)

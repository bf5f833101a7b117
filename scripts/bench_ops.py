"""Times the recurrent rules against the token-by-token scan, in one run and interleaved.

    python scripts/bench_ops.py          # the gated delta rule at both standard shapes
    python scripts/bench_ops.py --rules all --shapes 1x1024x4x64 --implementations chunked scan

Times are medians over runs that take turns, so that a busy machine slows all alike. `speedup` is
the reference's time over the row's; `temp` is what XLA sets aside for forward + gradients.
"""

import argparse
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from fastweights import ops

RULES = {
    "gated_delta_rule": (ops.gated_delta_rule, "qkvgb"),
    "kimi_delta_rule": (ops.kimi_delta_rule, "qkvcb"),
    "delta_rule": (ops.delta_rule, "qkvb"),
    "gated_linear_attention": (ops.gated_linear_attention, "qkvg"),
    "linear_attention": (ops.linear_attention, "qkv"),
}


def parse_shape(text: str) -> tuple[int, int, int, int]:
    try:
        batch, length, heads, dim = (int(part) for part in text.split("x"))
    except ValueError:
        message = f"a shape is BxTxHxD such as 1x4096x4x64, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
    return batch, length, heads, dim


def make_inputs(shape: tuple[int, int, int, int]) -> dict[str, jax.Array]:
    batch, length, heads, dim = shape
    rng = np.random.default_rng(0)

    def normal(*dims):
        return jnp.asarray(rng.standard_normal(dims), jnp.float32)

    return {
        "q": ops.l2_normalize(normal(batch, length, heads, dim)),
        "k": ops.l2_normalize(normal(batch, length, heads, dim)),
        "v": normal(batch, length, heads, dim),
        "g": -jax.nn.softplus(normal(batch, length, heads)),
        "c": -jax.nn.softplus(normal(batch, length, heads, dim)),
        "b": jax.nn.sigmoid(normal(batch, length, heads)),
    }


def make_calls(rule: str, implementation: str, chunk_size: int):
    """Jitted (forward, forward + all gradients) with cotangents on output and final state."""
    function, _ = RULES[rule]

    def forward(*inputs):
        return function(*inputs, implementation=implementation, chunk_size=chunk_size)

    def loss(inputs):
        o, S = forward(*inputs)
        return jnp.sum(o * o) + jnp.sum(S * S)

    return jax.jit(forward), jax.jit(lambda *inputs: jax.value_and_grad(loss)(inputs))


def seconds(call, inputs) -> float:
    """Time of one call. Another just before takes up the memory that the last form gave back."""
    jax.block_until_ready(call(*inputs))
    start = time.perf_counter()
    jax.block_until_ready(call(*inputs))
    return time.perf_counter() - start


def bench(rule: str, shape, implementations: list[str], chunk_size: int, runs: int) -> None:
    arrays = make_inputs(shape)
    inputs = tuple(arrays[name] for name in RULES[rule][1])
    names = ["reference", *(name for name in implementations if name != "reference")]
    calls, memory = {}, {}
    for name in names:
        forward, gradients = make_calls(rule, name, chunk_size)
        compiled = gradients.lower(*inputs).compile()
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
        calls[name] = (forward, compiled)
        for call in calls[name]:
            jax.block_until_ready(call(*inputs))
    times = {name: ([], []) for name in names}
    for _ in range(runs):
        for name in names:
            for taken, call in zip(times[name], calls[name], strict=True):
                taken.append(1e3 * seconds(call, inputs))
    base = [float(np.median(taken)) for taken in times["reference"]]
    for name in names:
        fwd, both = (float(np.median(taken)) for taken in times[name])
        print(
            f"{rule:<24}{'x'.join(map(str, shape)):<16}{name:<12}"
            f"{fwd:>9.1f}{base[0] / fwd:>9.1f}{both:>11.1f}{base[1] / both:>9.1f}"
            f"{memory[name] / 2**20:>11.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the recurrent rules.")
    parser.add_argument(
        "--rules",
        nargs="+",
        default=["gated_delta_rule"],
        metavar="RULE",
        choices=[*RULES, "all"],
        help="'all' or names of rules",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shape,
        metavar="BxTxHxD",
        default=[(1, 4096, 4, 64), (1, 2048, 8, 128)],
    )
    parser.add_argument(
        "--implementations",
        nargs="+",
        default=["chunked", "scan"],
        choices=["chunked", "scan", "auto", "reference"],
    )
    parser.add_argument("--chunk_size", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()

    device = jax.devices()[0]
    print(
        f"{device.device_kind} ({platform.machine()}), {len(jax.devices())} device(s), "
        f"jax {jax.__version__}, float32, {time.strftime('%Y-%m-%d')}, median of {args.runs} runs"
    )
    print(
        f"{'rule':<24}{'B x T x H x D':<16}{'form':<12}"
        f"{'fwd ms':>9}{'speedup':>9}{'fwd+grad':>11}{'speedup':>9}{'temp MiB':>11}"
    )
    for rule in RULES if "all" in args.rules else args.rules:
        for shape in args.shapes:
            bench(rule, shape, args.implementations, args.chunk_size, args.runs)


if __name__ == "__main__":
    main()

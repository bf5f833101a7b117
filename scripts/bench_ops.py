"""Times the recurrent rules against the token-by-token scan, in one run and interleaved.

    python scripts/bench_ops.py          # the gated delta rule at both standard shapes
    python scripts/bench_ops.py --rules all --shapes 1x4096x4x64

A shape is BxTxHxD: heads of that width, or H D channels for Mamba (16 states each) and S4 (64);
`mamba2` is gated linear attention with one query/key head for all value heads. Times are medians
over runs that take turns, so that a busy machine slows all alike. `speedup` is the reference's time
over the row's; `temp` is what XLA sets aside for forward + gradients.
"""

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastweights import cli, ops
from fastweights.errors import check
from fastweights.ops.hippo import legs_pairs

MAMBA_STATES, S4_STATES = 16, 64
Shape = tuple[int, int, int, int]


class Normal:
    """float32 arrays of standard normal numbers."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, *dims: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(dims), jnp.float32)


def heads(names: str, *, key_heads: int | None = None) -> Callable[[Shape], tuple]:
    """Makes the inputs `names`: q, k, v, log decays a head (g) or key channel (c), and beta (b)."""

    def make(shape: Shape) -> tuple:
        batch, length, count, dim = shape
        normal, qk = Normal(), key_heads or count
        found = {
            "q": ops.l2_normalize(normal(batch, length, qk, dim)),
            "k": ops.l2_normalize(normal(batch, length, qk, dim)),
            "v": normal(batch, length, count, dim),
            "g": -jax.nn.softplus(normal(batch, length, count)),
            "c": -jax.nn.softplus(normal(batch, length, count, dim)),
            "b": jax.nn.sigmoid(normal(batch, length, count)),
        }
        return tuple(found[name] for name in names)

    return make


def mamba(shape: Shape) -> tuple:
    """x, dt, A, B and C of a selective scan."""
    batch, length, count, dim = shape
    normal, channels = Normal(), count * dim
    rates_N = -jnp.arange(1.0, MAMBA_STATES + 1)
    return (
        normal(batch, length, channels),
        jax.nn.softplus(normal(batch, length, channels) - 4),
        jnp.broadcast_to(rates_N[None], (channels, MAMBA_STATES)),
        normal(batch, length, MAMBA_STATES),
        normal(batch, length, MAMBA_STATES),
    )


def s4(shape: Shape) -> tuple:
    """x, dt, A, B, C and P of a state space in diagonal-plus-low-rank form."""
    batch, length, count, dim = shape
    normal, channels = Normal(), count * dim
    A_DP, P_DP, B_DP = (
        jnp.broadcast_to(jnp.asarray(x, jnp.complex64)[None], (channels, S4_STATES // 2))
        for x in legs_pairs(S4_STATES)
    )
    C_DP = jax.lax.complex(normal(*B_DP.shape), normal(*B_DP.shape))
    dt_D = jnp.exp(jnp.linspace(np.log(1e-3), np.log(0.1), channels))
    return normal(batch, length, channels), dt_D, A_DP, B_DP, C_DP, P_DP


def state_space(x, dt, A, B, C, P, **options: Any):
    return ops.state_space(x, dt, A, B, C, P=P, discretization="bilinear", **options)


class Rule(NamedTuple):
    """An op of positional inputs, how to make them, and its forms beside the reference."""

    function: Callable
    inputs: Callable[[Shape], tuple]
    forms: tuple[str, ...] = ("chunked", "scan")


RULES = {
    "gated_delta_rule": Rule(ops.gated_delta_rule, heads("qkvgb")),
    "kimi_delta_rule": Rule(ops.kimi_delta_rule, heads("qkvcb")),
    "delta_rule": Rule(ops.delta_rule, heads("qkvb")),
    "gated_linear_attention": Rule(ops.gated_linear_attention, heads("qkvg")),
    "mamba2": Rule(ops.gated_linear_attention, heads("qkvg", key_heads=1)),
    "linear_attention": Rule(ops.linear_attention, heads("qkv")),
    "selective_scan": Rule(ops.selective_scan, mamba, ("auto", "chunked", "scan")),
    "state_space": Rule(state_space, s4, ("convolution", "scan")),
}


def parse_shape(text: str) -> Shape:
    try:
        batch, length, heads, dim = (int(part) for part in text.split("x"))
        if min(batch, length, heads, dim) < 1:
            raise ValueError
    except ValueError:
        message = f"a shape is BxTxHxD such as 1x4096x4x64, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
    return batch, length, heads, dim


def make_calls(rule: str, implementation: str, chunk_size: int):
    """Jitted (forward, forward + all gradients) with cotangents on output and final state."""
    function = RULES[rule].function

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


def bench(rule: str, shape: Shape, chunk_size: int, runs: int) -> None:
    inputs = RULES[rule].inputs(shape)
    names = ["reference", *RULES[rule].forms]
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


def main(argv: list[str] | None = None) -> int:
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
    parser.add_argument("--chunk_size", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(argv)
    check(args.runs >= 1, f"--runs is {args.runs}; use 1 or more.")

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
            bench(rule, shape, args.chunk_size, args.runs)
    return 0


if __name__ == "__main__":
    cli.run(main)

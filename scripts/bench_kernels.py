"""Times the Hopper kernels on one GPU, in one run with cuDNN attention, our own XLA form and, where
it can be imported, fla's forward.

    python scripts/bench_kernels.py [--rows S1 S2] [--out results/kernels_h200.txt]

A time is that of CALLS calls in a loop inside one jit (each waits for a number of the last one's
outputs), divided by CALLS, median of RUNS: what starting a program costs the host stays out. Of our
XLA form, up to a hundred times as long, a tenth as many. Milliseconds; inputs bfloat16 from a
normal distribution, q and k of length 1, gates log(sigmoid(normal + 3)) unless said.
"""

import argparse
import concurrent.futures
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fastweights import cli, errors, ops
from fastweights.ops import chunked, reference
from fastweights.ops.mosaic_gpu import decode, rule, support
from fastweights.ops.mosaic_gpu import gates as gating
from fastweights.ops.mosaic_gpu.backward_local import local_gradients
from fastweights.ops.mosaic_gpu.backward_scan import scan_backward
from fastweights.ops.mosaic_gpu.forward import scan_forward
from fastweights.ops.mosaic_gpu.inverse import gated_inverse

CALLS, RUNS = 50, 5
DIM = 128
Inputs = tuple[Any, ...]


class Row(NamedTuple):
    """B x T with H query/key and G value heads; `must` and `goal` are (forward, both) in ms."""

    name: str
    shape: tuple[int, int, int, int]
    must: tuple[float, float]
    goal: tuple[float, float]
    gates: str | None = "mild"  # "slow" hardly decay; "fresh" are those of a new layer
    delta: bool = True
    documents: int = 0


ROWS = (
    Row("S1", (8, 4096, 16, 16), (0.34, 1.24), (0.25, 0.90)),
    Row("S2", (1, 32768, 16, 16), (0.40, 1.25), (0.28, 0.95)),
    # Some heads of a fresh layer hardly decay, so it is held to the exact split's bounds.
    Row("S2, fresh layer", (1, 32768, 16, 16), (0.55, 2.0), (0.40, 1.3), gates="fresh"),
    Row("S3", (1, 16384, 16, 32), (0.42, 1.5), (0.28, 1.0)),
    Row("S2 without decay", (1, 32768, 16, 16), (0.55, 2.0), (0.40, 1.3), gates="slow"),
    Row("delta rule S1", (8, 4096, 16, 16), (0.36, 1.3), (0.25, 0.90), gates=None),
    Row("no delta S1", (8, 4096, 16, 16), (0.30, 1.0), (0.20, 0.7), delta=False),
    Row("packed S1", (8, 4096, 16, 16), (0.374, 1.364), (0.275, 0.99), documents=25),
)

ALSO_XLA = ("S1", "S2")
ALSO_PEER = ("S1", "S2", "S3")
ATTENTION = "cuDNN attention S1"
CONVOLUTION = "short convolution"
PEER, XLA = "fla", "XLA form"
DECODE = Row("decode step, batch 64", (64, 1, 16, 32), (0.10, 0.10), (0.075, 0.075))


def make(row: Row) -> tuple[Inputs, jax.Array | None, jax.Array]:
    """Inputs, document numbers, cotangent of the output."""
    B, T, H, G = row.shape
    rng = np.random.default_rng(0)
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    def unit(x):
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    q, k = unit(normal(B, T, H, DIM)), unit(normal(B, T, H, DIM))
    v = normal(B, T, G, DIM).astype(jnp.bfloat16)
    if row.gates == "fresh":
        rate = jnp.exp(jax.random.uniform(next(keys), (G,), minval=0.0, maxval=np.log(16.0)))
        step = jnp.exp(
            jax.random.uniform(next(keys), (G,), minval=np.log(1e-3), maxval=np.log(0.1))
        )
        g = -rate * jax.nn.softplus(normal(B, T, G) + jnp.log(jnp.expm1(step)))
    else:
        g = jax.nn.log_sigmoid(normal(B, T, G) + 3.0) * (1e-4 if row.gates == "slow" else 1.0)
    beta = jax.nn.sigmoid(normal(B, T, G))
    document = None
    if row.documents:
        cuts = np.zeros((B, T), np.int32)
        for line in cuts:
            line[1 + rng.choice(T - 1, row.documents - 1, replace=False)] = 1
        document = jnp.asarray(np.cumsum(cuts, axis=1), jnp.int32)
    do = normal(B, T, G, DIM).astype(jnp.bfloat16)
    return (q, k, v, g if row.gates else None, beta if row.delta else None), document, do


def zeros_before(v: jax.Array) -> jax.Array:
    """The state of a call without an initial one."""
    B, _, G, V = v.shape
    return jnp.zeros((B, G, DIM, V), jnp.float32)


class Chain(NamedTuple):
    """A compiled program of so many calls."""

    run: Callable[[], Any]
    calls: int

    def median(self) -> float:
        """Milliseconds of one of its calls, after one run to warm up."""
        jax.block_until_ready(self.run())
        taken = []
        for _ in range(RUNS):
            start = time.perf_counter()
            jax.block_until_ready(self.run())
            taken.append(1e3 * (time.perf_counter() - start) / self.calls)
        return float(np.median(taken))


def chained(call: Callable, inputs: Inputs, slow: bool = False) -> Chain:
    """Calls of call(*inputs) -> a number; `slow` for those of which fewer will do."""
    calls = CALLS // 10 if slow else CALLS

    def run(inputs):
        def body(_, number):
            # Behind the barrier no input is known to be the same in every turn.
            fresh, _ = lax.optimization_barrier((inputs, number))
            return call(*fresh)

        return lax.fori_loop(0, calls, body, jnp.float32(0))

    compiled = jax.jit(run).lower(inputs).compile()
    return Chain(functools.partial(compiled, inputs), calls)


def steps(step: Callable, inputs: Inputs, state: jax.Array) -> Any:
    """(last output, state) of CALLS tokens, each from the state that the last one left."""
    o = jnp.zeros_like(inputs[2])
    return lax.fori_loop(0, CALLS, lambda _, x: step(*inputs, x[1]), (o, state))


def step_time(step: Callable, inputs: Inputs) -> float:
    """Time of step(*inputs) -> (output, state), where the state is the last input and donated."""
    run = jax.jit(functools.partial(steps, step), donate_argnums=1)
    state = [inputs[-1].copy()]

    def again():
        o, state[0] = run(inputs[:-1], state[0])
        return o, state[0]

    return Chain(again, CALLS).median()


def corner(*tree: Any) -> jax.Array:
    """A number that needs every array of a tree, so that none is optimised away."""
    return sum(
        (x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(tree)), jnp.float32(0)
    )


def with_gradients(op: Callable, do: jax.Array) -> Callable:
    """inputs -> (output, gradients of all inputs)."""

    def run(*inputs):
        o, pull = jax.vjp(op, *inputs)
        return o, pull(do)

    return run


def chained_both(
    op: Callable, inputs: Inputs, do: jax.Array, slow: bool = False
) -> tuple[Chain, Chain]:
    """(forward, forward and backward) of op(*inputs) -> output, as programs to be timed."""
    both = with_gradients(op, do)
    return (
        chained(lambda *x: corner(op(*x)), inputs, slow),
        chained(lambda *x: corner(both(*x)), inputs, slow),
    )


def temporaries(op: Callable, inputs: Inputs, do: jax.Array) -> float:
    """GB that XLA sets aside for forward and backward, results not counted."""
    compiled = jax.jit(with_gradients(op, do)).lower(*inputs).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1e9  # type: ignore[union-attr]


def print_decode(say: Callable[[str], None]) -> None:
    """One token: the kernel and the XLA form, and the state read and written over the time."""
    inputs, _, _ = make(DECODE)
    inputs = (*inputs, zeros_before(inputs[2]))
    scale = DIM**-0.5
    moved = 2 * inputs[-1].nbytes
    taken = step_time(functools.partial(decode.core, scale=scale), inputs)
    say(
        f"{DECODE.name:<22}{taken:>9.3f}{DECODE.must[0]:>7.2f}{DECODE.goal[0]:>7.3f}"
        f"   {moved / 1e6:.0f} MB, {moved / taken / 1e9:.2f} TB/s"
    )
    xla = step_time(lambda *x: reference.core(*x, None, scale=scale), inputs)
    say(f"{'  our XLA form':<22}{xla:>9.3f}{'':>14}   {xla / taken:.1f} times as long")


def convolution() -> tuple[Callable, Inputs, jax.Array]:
    """(op, inputs, cotangent): four taps with SiLU on 4 x 4096 tokens of 2048 channels."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, do = (jax.random.normal(key, (4, 4096, 2048), jnp.bfloat16) for key in keys[:2])
    taps = jax.random.normal(keys[2], (4, 2048), jnp.bfloat16)
    return lambda x, w: ops.short_convolution(x, w)[0], (x, taps), do


def fla_forward(row: Row) -> float | None:
    """Milliseconds of fla's Triton kernels on the same inputs, forward alone; None without fla."""
    try:
        import torch  # type: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import (  # type: ignore[reportMissingImports]
            chunk_gated_delta_rule,
        )
    except ImportError:
        return None
    inputs, _, _ = make(row)
    q, k, v, g, beta = (torch.from_dlpack(x) for x in inputs)
    if q.shape[2] != v.shape[2]:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))

    def run():
        with torch.no_grad():
            for _ in range(CALLS):
                out = chunk_gated_delta_rule(q, k, v, g, beta, scale=DIM**-0.5)
        torch.cuda.synchronize()
        return jnp.float32(out[0].float()[0, 0, 0, 0].item())

    return Chain(run, CALLS).median()


def kernels(document: jax.Array | None, *inputs: Any) -> jax.Array:
    return rule.core(*inputs, zeros_before(inputs[2]), document, scale=DIM**-0.5)[0]


def xla_form(document: jax.Array | None, *inputs: Any) -> jax.Array:
    state = zeros_before(inputs[2])
    return chunked.core(*inputs, state, document, scale=DIM**-0.5, chunk_size=64)[0]


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def print_parts(say: Callable[[str], None]) -> None:
    """Each kernel alone at S1, and the bytes it must move over its time."""
    (q, k, v, g, beta), _, do = make(ROWS[0])
    B, _, G, V = v.shape
    options = dict(simulate=False)
    gates = jax.jit(lambda g, beta: gating.make_gates(g, beta, None))(g, beta)
    A, _ = jax.jit(lambda *x: gated_inverse(*x, **options))(k, gates)
    states = jnp.zeros((B, G, 1, V, DIM), jnp.float32)

    def forward(save):
        return lambda q, k, v, A, gates, states: scan_forward(
            q, k, v, A, gates, states, scale=0.1, save=save, **options
        )

    _, _, saved = jax.jit(forward(True))(q, k, v, A, gates, states)
    u, kept, scores = saved

    def reverse(q, k, do, A, scores, gates, states):
        return scan_backward(q, k, do, A, scores, gates, states, pieces=1, scale=0.1, **options)

    dv, dstates, _ = jax.jit(reverse)(q, k, do, A, scores, gates, states)

    def local(q, k, do, u, dv, kept, dstates, gates):
        return local_gradients(q, k, do, u, dv, kept, dstates, gates, scale=0.1, **options)

    parts = (
        ("gates", lambda g, beta: gating.make_gates(g, beta, None), (g, beta)),
        ("inverse", functools.partial(gated_inverse, **options), (k, gates)),
        ("forward", forward(False), (q, k, v, A, gates, states)),
        ("forward, saving", forward(True), (q, k, v, A, gates, states)),
        ("backward scan", reverse, (q, k, do, A, scores, gates, states)),
        ("backward local", local, (q, k, do, u, dv, kept, dstates, gates)),
    )  # fmt: skip
    for name, call, inputs in parts:
        moved = sum(x.nbytes for x in jax.tree.leaves(inputs))
        moved += sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(call, *inputs))
        )
        taken = chained(lambda *x, call=call: corner(call(*x)), inputs).median()
        say(f"{name:<22}{taken:>9.3f}   {moved / 1e6:>6.0f} MB, {moved / taken / 1e9:.2f} TB/s")


def main() -> None:
    names = [*(row.name for row in ROWS), DECODE.name, CONVOLUTION, ATTENTION]
    names += [f"{XLA} {name}" for name in ALSO_XLA]
    names += [f"{PEER} {name}" for name in ALSO_PEER]
    parser = argparse.ArgumentParser(description="Times the Hopper kernels.")
    some = f"some of: {', '.join(names)}"
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help=some)
    parser.add_argument("--parts", action="store_true", help="also each kernel alone")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    errors.check(
        support.on_hopper(),
        f"The kernels run on GPUs of compute capability 9.0, and this is {jax.devices()[0]}.",
    )
    lines: list[str] = []
    times: dict[str, tuple[float, float]] = {}

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    def say_peer(name: str, mine: str, taken: tuple[float, ...]) -> None:
        ratio, shown = "", f"{taken[0]:>9.3f}{'':>14}"
        if mine in times:
            ratio = " and ".join(f"{a / b:.1f}" for a, b in zip(taken, times[mine], strict=False))
            ratio = f"   {ratio} times {mine}"
        shown += f"{taken[1]:>10.3f}{'':>14}" if len(taken) > 1 else " " * 24
        say(f"{name:<22}{shown}{ratio}")

    # Compiled side by side, and all before the first is timed: XLA tries kernels as it compiles.
    work: dict[str, tuple[Callable, Inputs, jax.Array]] = {}
    for row in ROWS:
        forms = {row.name: kernels, f"{XLA} {row.name}": xla_form}
        forms = {name: form for name, form in forms.items() if name in args.rows}
        if forms:
            inputs, document, do = make(row)
            for name, form in forms.items():
                work[name] = functools.partial(form, document), inputs, do
    if CONVOLUTION in args.rows:
        work[CONVOLUTION] = convolution()
    if ATTENTION in args.rows:
        inputs, _, do = make(ROWS[0])
        work[ATTENTION] = attention, inputs[:3], do
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda name: chained_both(*work[name], name.startswith(XLA)), work)
        programs = dict(zip(work, made, strict=True))

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    say(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}, "
        f"commit {commit or 'unknown'}; {CALLS} chained calls a jit, median of {RUNS}; ms"
    )
    say(f"{'':<22}{'forward':>9}{'must':>7}{'goal':>7}{'fwd+bwd':>10}{'must':>7}{'goal':>7}")
    for name, (forward, both) in programs.items():
        times[name] = forward.median(), both.median()
    for row in ROWS:
        if row.name in times:
            forward, both = times[row.name]
            say(
                f"{row.name:<22}{forward:>9.3f}{row.must[0]:>7.2f}{row.goal[0]:>7.2f}"
                f"{both:>10.3f}{row.must[1]:>7.2f}{row.goal[1]:>7.2f}"
            )
    if "S1" in times:
        say(f"{'  temporaries of S1':<22}{temporaries(*work['S1']):>37.2f} GB")
    if DECODE.name in args.rows:
        print_decode(say)
    if CONVOLUTION in times:
        moved = work[CONVOLUTION][1][0].nbytes
        rates = [
            f"{n * moved / t / 1e9:.2f}" for n, t in zip((2, 5), times[CONVOLUTION], strict=True)
        ]
        say_peer(CONVOLUTION, "", times[CONVOLUTION])
        say(f"{'':<22}{rates[0]} and {rates[1]} TB/s")
    if args.parts:
        print_parts(say)
    if ATTENTION in times:
        say_peer(ATTENTION, "S1", times[ATTENTION])
    for row in ROWS:
        if f"{XLA} {row.name}" in times:
            say_peer(f"{XLA} {row.name}", row.name, times[f"{XLA} {row.name}"])
        if f"{PEER} {row.name}" in args.rows:
            peer = fla_forward(row)
            if peer is None:
                say(f"{PEER} {row.name}: not measured, for fla cannot be imported")
            else:
                say_peer(f"{PEER} {row.name}", row.name, (peer,))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join([f"$ {' '.join(['python', *sys.argv])}", *lines]) + "\n")


if __name__ == "__main__":
    cli.run(main)

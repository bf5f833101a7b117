"""Checks the Hopper kernels against a float64 token-by-token reference, on one Hopper GPU.

    python scripts/check_kernels.py                           # about six minutes on an H200
    python scripts/check_kernels.py --only packed "length"    # some of the cases

Each line is one case: the error of every result and gradient as RMS(error) / RMS(reference). The
exit code is 1 if any passes its bound: 5e-3 for o and the final state, 8e-3 for dq, dk, dv and the
initial state's gradient, 2e-2 for dg and dbeta. Where keys are alike and little decays, 1.2e-2 and
for dg and dbeta 5e-2, for there storing bfloat16 between the kernels is the limit (the last column
gives the error of the same steps with float32 between them: the chunked XLA form). `gate` is the
cosine of the gradients of the gate's parameters with the true ones, at least 0.999.
"""

import argparse
import concurrent.futures
import functools
import time
import unittest.mock
from collections.abc import Callable
from typing import NamedTuple

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from fastweights import cli, errors, ops  # noqa: E402
from fastweights.ops import attention, chunked, reference  # noqa: E402
from fastweights.ops.mosaic_gpu import decode, rule, support  # noqa: E402

NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dstate")
BOUNDS = dict(o=5e-3, state=5e-3, dq=8e-3, dk=8e-3, dv=8e-3, dstate=8e-3, dg=2e-2, dbeta=2e-2)
ALIKE = dict.fromkeys(BOUNDS, 1.2e-2) | dict(dg=5e-2, dbeta=5e-2)
FULL_SIZE = (8, 4096, 16, 16, 128, 128)


class Case(NamedTuple):
    """B, T, H, G, K, V; cosine of keys with each other; shift of the gate before softplus."""

    name: str
    shape: tuple[int, int, int, int, int, int]
    cosine: float = 0.0
    shift: float = 0.0
    beta: float | None = None
    documents: int = 0
    gated: bool = True
    delta: bool = True
    pieces: int | None = None
    unwritten: bool = False  # every fourth beta is 0


S = (2, 512, 2, 2, 128, 128)
CASES = (
    Case("random", S),
    Case("decay of e^-3 a token", S, shift=3.0),
    Case("decay of e^-12 a token", S, shift=12.0),
    Case("decay of e^-40 a token", S, shift=40.0),
    Case("hardly any decay", S, shift=-8.0),
    Case("keys alike, decay", S, cosine=0.99, beta=0.95),
    Case("keys alike, no decay", S, cosine=0.99, beta=0.95, shift=-14.0),
    Case("keys alike, beta 1.9", S, cosine=0.9, beta=1.9, shift=-3.0),
    Case("some beta 0", S, unwritten=True),
    Case("packed", S, documents=12, shift=-3.0),
    Case("packed, one token each", S, documents=300, shift=-3.0),
    Case("four value heads a key head", (2, 512, 2, 8, 128, 128)),
    Case("three value heads a key head", (1, 320, 2, 6, 64, 64), documents=5),
    Case("head dims 64", (2, 512, 2, 2, 64, 64)),
    Case("head dims 96, 128", (2, 512, 2, 2, 96, 128)),
    Case("head dims 100, 60", (1, 300, 1, 2, 100, 60)),
    Case("head dims 64, 256", (1, 512, 2, 2, 64, 256)),
    Case("head dims 128, 192", (1, 512, 2, 2, 128, 192), documents=3),
    Case("head dims 256, 64", (1, 512, 2, 2, 256, 64)),
    Case("head dims 192, 256", (1, 300, 1, 2, 192, 256), documents=3),
    Case("head dims 256, no delta", (1, 512, 2, 2, 256, 128), delta=False),
    Case("delta rule", S, gated=False),
    Case("delta rule, packed", S, gated=False, documents=9),
    Case("no delta", S, delta=False),
    Case("no delta, packed", S, delta=False, documents=9, shift=-3.0),
    Case("no delta, no decay", S, delta=False, gated=False),
    *(Case(f"length {n}", (2, n, 2, 2, 128, 128)) for n in (63, 64, 65, 1000, 4096)),
    Case("one token", (3, 1, 2, 4, 128, 128)),
    Case("one token, head dims 64, 256", (3, 1, 2, 2, 64, 256)),
    Case("one token, head dims 256, 128", (3, 1, 2, 2, 256, 128)),
    Case("one token, delta rule", (3, 1, 2, 2, 128, 128), gated=False),
    Case("one token, no delta", (3, 1, 2, 2, 128, 64), delta=False),
    Case("one piece", (1, 2048, 2, 2, 128, 128), shift=-3.0, pieces=1),
    Case("pieces, decay", (1, 4096, 2, 4, 128, 128), pieces=8),
    Case("pieces, slow decay", (1, 2048, 2, 2, 128, 128), shift=-6.0, pieces=8),
    Case("two pieces, slow decay", (1, 2000, 2, 2, 128, 128), shift=-6.0, pieces=2),
    Case("pieces, packed, slow decay", (1, 2000, 2, 2, 128, 128), shift=-7.0, documents=5),
    Case("pieces, no delta", (1, 2048, 2, 2, 128, 128), shift=-6.0, delta=False, pieces=4),
    Case("pieces, no decay", (1, 2048, 2, 2, 128, 128), gated=False, pieces=4),
)


def relative(x, want) -> float:
    x, want = np.asarray(x, np.float64), np.asarray(want, np.float64)
    size = np.sqrt(np.mean(np.square(want)))
    return float(np.sqrt(np.mean(np.square(x - want))) / size) if size else float(np.abs(x).max())


def make(case: Case, seed: int = 0):
    """(inputs, document numbers, cotangents of output and state)."""
    B, T, H, G, K, V = case.shape
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def unit(x):
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    k = np.sqrt(1 - case.cosine) * normal(B, T, H, K) + np.sqrt(case.cosine) * normal(B, 1, H, K)
    g = -jax.nn.softplus(normal(B, T, G) + case.shift) if case.gated else None
    beta = jax.nn.sigmoid(normal(B, T, G)) if case.beta is None else jnp.full((B, T, G), case.beta)
    beta = beta.astype(jnp.float32).at[:, ::4].multiply(0.0 if case.unwritten else 1.0)
    inputs = (
        unit(normal(B, T, H, K)),
        unit(k),
        normal(B, T, G, V).astype(jnp.bfloat16),
        g,
        beta if case.delta else None,
        0.3 * normal(B, G, K, V),
    )
    document = None
    if case.documents:
        cuts = np.zeros((B, T), np.int32)
        for row in cuts:
            row[1 + rng.choice(T - 1, case.documents, replace=False)] = 1
        document = jnp.asarray(np.cumsum(cuts, axis=1), jnp.int32)
    return inputs, document, (normal(B, T, G, V).astype(jnp.bfloat16), normal(B, G, K, V))


def results(op: Callable, inputs, cotangents) -> Callable:
    """A compiled call -> output, final state and all gradients, by name."""

    def run(inputs, cotangents):
        out, pull = jax.vjp(op, *inputs)
        gradients = pull(jax.tree.map(lambda d, o: d.astype(o.dtype), cotangents, out))
        named = {name: x for name, x in zip(NAMES, gradients, strict=True) if x is not None}
        return {"o": out[0], "state": out[1], **named}

    compiled = jax.jit(run).lower(inputs, cotangents).compile()
    return lambda: jax.tree.map(np.asarray, compiled(inputs, cotangents))


def parameter_cosine(case: Case, inputs, got, want) -> float:
    """Cosine of the gradients of the gate's A_log and dt_bias with the true ones."""
    if not case.gated:
        return 1.0
    g = np.asarray(inputs[3], np.float64)
    by_bias = -np.asarray(jax.nn.sigmoid(jnp.log(jnp.expm1(-inputs[3]))), np.float64)

    def gradient(named):
        dg = named["dg"].astype(np.float64)
        return np.concatenate([np.sum(dg * x, axis=(0, 1)) for x in (g, by_bias)])

    found, true = gradient(got), gradient(want)
    return float(found @ true / (np.linalg.norm(found) * np.linalg.norm(true) + 1e-300))


def check(case: Case) -> tuple[bool, str]:
    """Whether the case passes, and its line."""
    inputs, document, cotangents = make(case)
    scale = case.shape[4] ** -0.5

    def kernels(*x):
        if case.shape[1] == 1:
            return decode.core(*x, scale=scale)
        return rule.core(*x, document, scale=scale, pieces=case.pieces)

    def twin(*x):
        return chunked.core(*x, document, scale=scale, chunk_size=64)

    host = jax.devices("cpu")[0]
    with jax.default_device(host):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), inputs)
        there, documents = jax.device_put((cotangents, document), host)
        want = results(lambda *x: reference.core(*x, documents, scale=scale), wide, there)()
    run = results(kernels, inputs, cotangents)
    got, again = run(), run()
    errors = {name: relative(got[name], want[name]) for name in want}
    if case.shift > 30:
        # What is left of the past is e^-40: the true gradients of g and of the initial state are
        # below the rounding of any other number, so only nothing is asked of them.
        errors |= {name: float(np.abs(got[name]).max()) for name in ("dg", "dstate")}
    alike = case.cosine > 0 and case.shift < 0
    bounds = ALIKE if alike else BOUNDS
    good = all(np.isfinite(e) and e <= bounds[name] for name, e in errors.items())
    same = all(np.array_equal(got[name], again[name]) for name in got)
    line = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
    # Where everything is forgotten at once, or nothing came before, the true gradient is nothing.
    if case.gated and case.shift < 30 and case.shape[1] > 1:
        cosine = parameter_cosine(case, inputs, got, want)
        good, line = good and cosine >= 0.999, line + f" gate {cosine:.5f}"
    if alike:
        single = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
        exact = results(twin, single, cotangents)()
        line += f" | float32 {max(relative(exact[name], want[name]) for name in want):.1e}"
    line += "" if same else " | CHANGES FROM RUN TO RUN"
    return good and same, line


def check_repeatable() -> tuple[bool, str]:
    """Full size, ten runs, bit for bit."""
    inputs, document, cotangents = make(Case("", FULL_SIZE))

    def gradients(inputs):
        out, pull = jax.vjp(lambda *x: rule.core(*x, document, scale=0.1), *inputs)
        return jax.tree.leaves((out, pull(cotangents)))

    run = jax.jit(gradients)
    first = run(inputs)
    same = all(
        bool(jnp.all(x == y)) for _ in range(10) for x, y in zip(first, run(inputs), strict=True)
    )
    return same, "ten runs, bit for bit"


def check_large(B: int, T: int, H: int) -> tuple[bool, str]:
    """The last heads of a call that passes a limit against the same heads alone."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (B, T, H, 128), jnp.bfloat16) for key in keys)
    k = k * jnp.bfloat16(128**-0.5)
    g, beta = jnp.full((B, T, H), -0.1, jnp.float32), jnp.full((B, T, H), 0.5, jnp.float32)
    state = jnp.zeros((B, H, 128, 128), jnp.float32)
    run = jax.jit(lambda *x: rule.core(*x, None, scale=0.1, pieces=1)[0][-1:, :, -2:])
    whole = run(q, k, v, g, beta, state)
    part = [x[-1:, :, -2:] for x in (q, k, v, g, beta)]
    return bool(jnp.all(whole == run(*part, state[-1:, -2:]))), "as the last heads alone"


def check_convolution(taps: int, bias: bool, packed: bool, unit: int, D: int) -> tuple[bool, str]:
    """The short convolution and its gradients against its XLA form in float32."""
    rng = np.random.default_rng(taps)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    B, T = 2, 1000
    x, dy = normal(B, T, D, dtype=jnp.bfloat16), normal(B, T, D, dtype=jnp.bfloat16)
    w, b = normal(taps, D), normal(D) if bias else None
    ids = np.cumsum(rng.random((B, T)) < 0.02, axis=1) + 1 if packed else np.ones((B, T), int)
    ids[:, 5:9] = 0 if packed else 1

    def run(x, w, b):
        return ops.short_convolution(x, w, b, segment_ids=jnp.asarray(ids), unit_heads=unit)[0]

    def everything(x, dy):
        y, pull = jax.vjp(run, x, w, b)
        return [np.asarray(a) for a in (y, *pull(dy)) if a is not None]

    got, again = everything(x, dy), everything(x, dy)
    want = everything(x.astype(jnp.float32), dy.astype(jnp.float32))
    errors = [relative(a, b) for a, b in zip(got, want, strict=True)]
    same = all(np.array_equal(a, b) for a, b in zip(got, again, strict=True))
    line = " ".join(
        f"{n} {e:.1e}" for n, e in zip(("y", "dx", "dtaps", "dbias"), errors, strict=False)
    )
    return same and max(errors[:2]) < 5e-3 and max(errors[2:]) < 1e-5, line


def check_attention() -> tuple[bool, str]:
    """Packed rows through cuDNN against float64: masks of all heads (also under vmap), masks of one
    head, these for blocks of queries."""
    rng = np.random.default_rng(0)
    B, T, H, J, K = 2, 1000, 4, 2, 128
    x = [jnp.asarray(rng.standard_normal((B, T, n, K)), jnp.bfloat16) for n in (H, J, J, H)]
    ids = jnp.asarray(np.cumsum(rng.random((B, T)) < 0.01, axis=1) + 1).at[:, 5:9].set(0)

    def everything(implementation, q, k, v, do):
        attend = functools.partial(
            ops.softmax_attention, segment_ids=ids, implementation=implementation
        )
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(do)

    want = everything("xla", *(a.astype(jnp.float64) for a in x))
    few, patch = B * T * attention.FEWEST_QUERIES, unittest.mock.patch.multiple
    found = []
    usual = attention.MASK_OF_HEADS, attention.MASK_AT_ONCE
    for heads, masks in (usual, (0, usual[1]), (0, few)):
        with patch(attention, MASK_OF_HEADS=heads, MASK_AT_ONCE=masks):
            got = everything("cudnn", *x)
        found += [relative(a, b) for a, b in zip(got, want, strict=True)]
    members = jax.vmap(functools.partial(everything, "cudnn"))(*(jnp.stack([a, -a]) for a in x))
    found += [relative(a[0], b) for a, b in zip(members, want, strict=True)]
    return max(found) < 1e-2, " ".join(f"{error:.1e}" for error in found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the Hopper kernels.")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose name has the text")
    args = parser.parse_args()
    errors.check(
        support.on_hopper(),
        f"The kernels run on GPUs of compute capability 9.0, and this is {jax.devices()[0]}; "
        "without one, make test simulates them and make test-aot compiles them.",
    )
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    start = time.time()
    calls = {case.name: functools.partial(check, case) for case in CASES}
    calls["full size"] = check_repeatable
    calls["more than 2^31 elements"] = functools.partial(check_large, 1, 2**17, 136)
    calls["more than 65,535 blocks"] = functools.partial(check_large, 4200, 64, 16)
    for taps, bias, packed, unit, channels in (
        (4, False, False, 0, 512),
        (4, True, True, 128, 512),
        (3, True, True, 0, 192),
        (1, False, True, 128, 512),
        (4, False, True, 64, 64),
    ):
        name = f"convolution, {taps} taps{', bias' * bias}{', packed' * packed}, {channels}"
        name += f", unit {unit}" if unit else ""
        calls[name] = functools.partial(check_convolution, taps, bias, packed, unit, channels)
    calls["attention"] = check_attention
    if args.only:
        calls = {n: c for n, c in calls.items() if any(text in n for text in args.only)}
        errors.check(calls, f"No case has any of {args.only} in its name; leave out --only.")
    passed = []
    # Compiling takes most of the time, and several programs compile at once.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name, (good, line) in zip(calls, pool.map(lambda f: f(), calls.values()), strict=True):
            print(f"{'ok  ' if good else 'FAIL'} {name:<48}{line}", flush=True)
            passed.append(good)
    print(f"{sum(passed)} of {len(passed)} pass, {time.time() - start:.0f} s")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    cli.run(main)

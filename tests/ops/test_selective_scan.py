"""Mamba's selective scan: values and all gradients against a token-by-token float64 oracle."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ops_oracle as oracle
import tiny_models
from fastweights import ops

TOKENS = ("x", "dt", "B", "C")
INPUTS = (*TOKENS, "A", "D", "initial_state")
PARALLEL = ("chunked", "auto", "scan")
EVERY = (*PARALLEL, "reference")


def random_inputs(seed=0, *, B=2, T=200, D=6, N=4, rate=1.0):
    """Inputs with steps around 0.1, rates around `rate` and cotangents `dy`, `dS`, in float32."""
    rng = np.random.default_rng(seed)
    x = {
        "x": rng.standard_normal((B, T, D)),
        "dt": 0.1 * rng.exponential(size=(B, T, D)),
        "B": rng.standard_normal((B, T, N)),
        "C": rng.standard_normal((B, T, N)),
        "A": -rate * rng.uniform(0.5, 2.0, size=(D, N)),
        "D": rng.standard_normal(D),
        "initial_state": rng.standard_normal((B, D, N)),
        "dy": rng.standard_normal((B, T, D)),
        "dS": rng.standard_normal((B, D, N)),
    }
    return {name: a.astype(np.float32) for name, a in x.items()}


def recurrence(x):
    """Outputs, final state and all gradients of one document per row, in NumPy."""
    x = {name: np.asarray(a, np.float64) for name, a in x.items()}
    u, dt, B, C, A = (x[name] for name in ("x", "dt", "B", "C", "A"))
    decay = np.exp(dt[..., None] * A)
    h, tape, y = x["initial_state"], [], np.zeros_like(u)
    for t in range(u.shape[1]):
        tape.append(h)
        h = decay[:, t] * h + (dt[:, t] * u[:, t])[..., None] * B[:, t, None]
        y[:, t] = np.sum(h * C[:, t, None], -1) + x["D"] * u[:, t]
    out = {"y": y, "S": h}
    d = {name: np.zeros_like(x[name]) for name in INPUTS}
    d["D"] = np.sum(x["dy"] * u, (0, 1))
    dh = x["dS"]
    for t in reversed(range(u.shape[1])):
        dy = x["dy"][:, t]
        dh = dh + dy[..., None] * C[:, t, None]
        after = decay[:, t] * tape[t] + (dt[:, t] * u[:, t])[..., None] * B[:, t, None]
        d["C"][:, t] = np.sum(after * dy[..., None], 1)
        dwrite = np.sum(dh * B[:, t, None], -1)
        dlog = dh * decay[:, t] * tape[t]
        d["x"][:, t] = dwrite * dt[:, t] + x["D"] * dy
        d["dt"][:, t] = dwrite * u[:, t] + np.sum(dlog * A, -1)
        d["B"][:, t] = np.sum(dh * (dt[:, t] * u[:, t])[..., None], 1)
        d["A"] += np.sum(dlog * dt[:, t, :, None], 0)
        dh = decay[:, t] * dh
    d["initial_state"] = dh
    return out | {f"d{name}": a for name, a in d.items()}


def packed(x, lengths):
    """Documents run apart and laid side by side; states belong to the first and the last one."""
    bounds = list(itertools.pairwise(np.cumsum([0, *lengths])))
    parts = []
    for i, (start, end) in enumerate(bounds):
        part = dict(x)
        for name in (*TOKENS, "dy"):
            part[name] = x[name][:, start:end]
        if i > 0:
            part["initial_state"] = np.zeros_like(x["initial_state"])
        if i < len(bounds) - 1:
            part["dS"] = np.zeros_like(x["dS"])
        parts.append(recurrence(part))
    out = {n: np.concatenate([p[n] for p in parts], 1) for n in ("y", "dx", "ddt", "dB", "dC")}
    out |= {name: sum(p[name] for p in parts) for name in ("dA", "dD")}
    return out | {"S": parts[-1]["S"], "dinitial_state": parts[0]["dinitial_state"]}


@functools.partial(tiny_models.quick_jit, static_argnames=("implementation", "chunk_size"))
def run(x, segment_ids=None, *, implementation="chunked", chunk_size=64):
    def call(arrays):
        return ops.selective_scan(
            *(arrays[name] for name in ("x", "dt", "A", "B", "C")),
            D=arrays["D"],
            initial_state=arrays["initial_state"],
            segment_ids=segment_ids,
            implementation=implementation,
            chunk_size=chunk_size,
        )

    (y, S), vjp = jax.vjp(call, {name: x[name] for name in INPUTS})
    (d,) = vjp((x["dy"].astype(y.dtype), x["dS"]))
    return {"y": y, "S": S} | {f"d{name}": a for name, a in d.items()}


@pytest.mark.parametrize("length", (1, 15, 63, 64, 65, 200))
@pytest.mark.parametrize("implementation", ("chunked", "auto"))
def test_chunks_at_every_length(implementation, length):
    x = random_inputs(length, T=length)
    oracle.assert_close(run(x, implementation=implementation), recurrence(x))


@pytest.mark.parametrize("length", (1, 65))
@pytest.mark.parametrize("implementation", ("scan", "reference"))
def test_other_forms(implementation, length):
    x = random_inputs(length, T=length)
    oracle.assert_close(run(x, implementation=implementation), recurrence(x))


def no_step(x):
    x["dt"][:, 10:90] = 0


def strong_decay(x):
    x["A"] *= 1000


def one_huge_step(x):
    x["dt"][:, 70] = 1e6
    x["x"][:, 70] = 1e-6


def no_decay(x):
    x["A"][:] = 0


@pytest.mark.parametrize("implementation", PARALLEL)
@pytest.mark.parametrize(
    "edge", (no_step, strong_decay, one_huge_step, no_decay), ids=lambda f: f.__name__
)
def test_edge(edge, implementation):
    x = random_inputs(3)
    edge(x)
    got = run(x, implementation=implementation)
    oracle.assert_close(got, recurrence(x))


@pytest.mark.parametrize("chunk_size", (16, 32, 128, 256))
def test_chunk_size_changes_nothing(chunk_size):
    x = random_inputs(7)
    oracle.assert_close(run(x, chunk_size=chunk_size), recurrence(x))


LAYOUTS = {
    "first_token": (1, 199),
    "last_token": (199, 1),
    "mid_chunk": (30, 70, 100),
    "chunk_edges": (64, 64, 72),
    "around_an_edge": (63, 2, 135),
    "length_one_in_a_row": (40, 1, 1, 1, 1, 156),
    "across_whole_chunks": (10, 180, 10),
}


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_equal_separate_runs(layout, implementation):
    # Slow decay, or a leak from one document into the next would drown in rounding.
    x = random_inputs(11, rate=1e-2)
    ids = np.repeat(np.arange(len(LAYOUTS[layout])) % 2 + 1, LAYOUTS[layout])
    segment_ids = np.broadcast_to(ids, (2, 200)).astype(np.int32)
    got = run(x, segment_ids, implementation=implementation)
    oracle.assert_close(got, packed(x, LAYOUTS[layout]))


PADDINGS = {
    "left": np.arange(200) < 70,
    "right": np.arange(200) >= 130,
    "interior": (np.arange(200) % 7 == 3) | ((np.arange(200) > 60) & (np.arange(200) < 135)),
    "all_but_one": np.arange(200) != 64,
}


def put(compact, padded_T, fill):
    """Spreads arrays over real tokens onto rows with padding."""
    full = np.full((compact.shape[0], len(padded_T), compact.shape[2]), fill, np.float32)
    full[:, ~padded_T] = compact
    return full


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_with_nan_changes_nothing(padding, implementation):
    padded_T = PADDINGS[padding]
    real = int(np.sum(~padded_T))
    lengths = (real,) if real == 1 else (real // 3, real - real // 3)
    x = random_inputs(13, T=real, rate=0.1)
    ids = np.where(padded_T, 0, 1)
    ids[~padded_T] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    segment_ids = np.broadcast_to(ids, (2, 200)).astype(np.int32)
    by_token = (*TOKENS, "dy")
    full = {n: put(a, padded_T, np.nan) if n in by_token else a for n, a in x.items()}
    got = run(full, segment_ids, implementation=implementation)
    want = packed(x, lengths)
    spread = ("y", "dx", "ddt", "dB", "dC")
    want = {n: put(a, padded_T, 0) if n in spread else a for n, a in want.items()}
    oracle.assert_close(got, {n: np.asarray(a, np.float64) for n, a in want.items()})
    for name in spread:
        assert np.all(np.asarray(got[name])[:, padded_T] == 0), name


def test_rows_of_padding_alone_pass_the_state_through():
    x = random_inputs(14)
    got = run(x, np.zeros((2, 200), np.int32))
    np.testing.assert_array_equal(got["S"], x["initial_state"])
    np.testing.assert_array_equal(got["dinitial_state"], x["dS"])
    assert not np.any(got["y"])


@pytest.mark.parametrize("implementation", EVERY)
def test_bfloat16(implementation):
    """Rounded inputs, float32 inside: as good as the output's own rounding."""
    x = random_inputs(3, T=130)
    narrow = {n: jnp.asarray(a, jnp.bfloat16) for n, a in x.items() if n in ("x", "B", "C", "dy")}
    got = run(x | narrow, implementation=implementation)
    want = recurrence(x | {n: np.asarray(a, np.float32) for n, a in narrow.items()})
    assert got["y"].dtype == got["dx"].dtype == got["dB"].dtype == got["dC"].dtype == jnp.bfloat16
    oracle.assert_close(got, want, 1e-2)
    for name in ("S", "ddt", "dA", "dD", "dinitial_state"):
        assert got[name].dtype == jnp.float32
        a, b = np.ravel(got[name]), np.ravel(want[name])
        assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
        # Never rounded to 16 bits on the way: far better than bfloat16 could be.
        oracle.assert_close({name: got[name]}, {name: want[name]})


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = {name: a.astype(np.float64) for name, a in random_inputs(2, T=40).items()}
        for implementation in ("chunked", "reference"):
            got = run(x, implementation=implementation)
            assert all(a.dtype == jnp.float64 for a in got.values())
            oracle.assert_close(got, recurrence(x), 1e-12)


@pytest.mark.parametrize("split", (1, 16, 37))
def test_prefill_then_decode_equals_one_run(split):
    x = random_inputs(4, T=40)
    scan = jax.jit(functools.partial(ops.selective_scan, chunk_size=16))

    def call(part, state):
        arrays = (x[n] if n == "A" else x[n][:, part] for n in ("x", "dt", "A", "B", "C"))
        return scan(*arrays, D=x["D"], initial_state=state)

    whole = call(slice(None), x["initial_state"])
    y, S = call(slice(split), x["initial_state"])
    parts = [y]
    for t in range(split, 40):
        y, S = call(slice(t, t + 1), S)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(S, whole[1], rtol=2e-5, atol=2e-5)


def loss(x, **options):
    y, S = ops.selective_scan(*(x[n] for n in ("x", "dt", "A", "B", "C")), D=x.get("D"), **options)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(S))


def test_transforms():
    """vmap, checkpoint and a gradient of some inputs alone give what the plain gradient gives."""
    x = jax.tree.map(jnp.asarray, random_inputs(5, T=20))
    x = {name: x[name] for name in INPUTS if name != "initial_state"}
    plain = jax.jit(jax.grad(loss))
    want = plain(x)
    many = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), x)
    mapped = jax.jit(jax.vmap(jax.grad(loss)))(many)
    again = jax.jit(jax.grad(jax.checkpoint(loss)))(x)
    alone = jax.jit(jax.grad(lambda a, x: loss(x | {"A": a})))(x["A"], x)
    for name, a in want.items():
        np.testing.assert_allclose(mapped[name][0], a, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(again[name], a, rtol=2e-5, atol=2e-5)
    halved = plain(jax.tree.map(lambda a: 0.5 * a, x))
    np.testing.assert_allclose(mapped["dt"][1], halved["dt"], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(alone, want["A"], rtol=2e-5, atol=2e-5)


def test_one_token_is_one_update_without_a_loop():
    x = random_inputs(1, T=1)
    jaxpr = str(jax.make_jaxpr(loss)({n: x[n] for n in INPUTS if n != "initial_state"}))
    assert "while" not in jaxpr and "scan[" not in jaxpr


def test_no_tokens():
    x = random_inputs(1, T=0)
    y, S = ops.selective_scan(
        *(x[n] for n in ("x", "dt", "A", "B", "C")), initial_state=x["initial_state"]
    )
    assert y.shape == x["x"].shape
    np.testing.assert_array_equal(S, x["initial_state"])


def test_all_states_are_never_held():
    """Forward and backward at D = 512, N = 16: linear in T and small beside B T D N numbers."""
    D, N = 512, 16

    def compiled(T):
        kinds = {n: (1, T, D if n in ("x", "dt") else N) for n in TOKENS} | {"A": (D, N), "D": (D,)}
        x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in kinds.items()}
        # Code quality changes no buffer, and compiling for it takes longer.
        value = functools.partial(loss, implementation="chunked")
        step = tiny_models.quick_jit(jax.value_and_grad(value))
        return step.lower(x).compile()

    small, large = compiled(2048), compiled(8192)
    bytes_small, bytes_large = (c.memory_analysis().temp_size_in_bytes for c in (small, large))
    assert bytes_large <= 4.4 * bytes_small
    assert bytes_large < 40 * 8192 * D * 4
    shapes = re.findall(r"f32\[([\d,]+)\]", large.as_text())
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    assert largest < 8192 * D * N / 4

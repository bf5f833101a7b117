"""S4's state space: every form against dense matrices in NumPy and a float64 recurrence."""

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
from fastweights.ops.hippo import legs, legs_pairs

SYSTEM = ("dt", "A", "B", "C", "P")
INPUTS = (*SYSTEM, "x", "D", "initial_state")
KINDS = {
    "dplr": dict(low_rank=True, discretization="bilinear"),
    "diagonal_bilinear": dict(low_rank=False, discretization="bilinear"),
    "diagonal_zoh": dict(low_rank=False, discretization="zoh"),
}


def random_inputs(kind, seed=0, *, B=2, T=200, D=4, N=8, dt=(3e-3, 0.1)):
    """A LegS system a little disturbed in every channel; float32 and complex64."""
    rng = np.random.default_rng(seed)

    def noise(*shape):
        return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)

    A, P, B_in = (np.tile(a[None], (D, 1)) for a in legs_pairs(N))
    A = A.real * rng.uniform(0.5, 2.0, A.shape) + 1j * A.imag
    x = {
        "dt": np.exp(np.linspace(*np.log(dt), D)),
        "A": A,
        "B": B_in + 0.1 * noise(*A.shape),
        "C": noise(*A.shape),
        "P": P + 0.1 * noise(*A.shape),
        "D": rng.standard_normal(D),
        "x": rng.standard_normal((B, T, D)),
        "initial_state": rng.standard_normal((B, D, N)),
        "dy": rng.standard_normal((B, T, D)),
        "dS": rng.standard_normal((B, D, N)),
    }
    if not KINDS[kind]["low_rank"]:
        del x["P"]
    return {n: a.astype(np.complex64 if np.iscomplexobj(a) else np.float32) for n, a in x.items()}


def call(arrays, segment_ids, discretization, implementation, chunk_size=64):
    return ops.state_space(
        arrays["x"],
        *(arrays[name] for name in SYSTEM[:4]),
        P=arrays.get("P"),
        D=arrays["D"],
        initial_state=arrays.get("initial_state"),
        segment_ids=segment_ids,
        discretization=discretization,
        implementation=implementation,
        chunk_size=chunk_size,
    )


@functools.partial(
    tiny_models.quick_jit, static_argnames=("discretization", "implementation", "chunk_size")
)
def _run(x, segment_ids, **options):
    arrays = {name: x[name] for name in INPUTS if name in x}
    (y, S), vjp = jax.vjp(lambda arrays: call(arrays, segment_ids, **options), arrays)
    (d,) = vjp((x["dy"].astype(y.dtype), x["dS"].astype(S.dtype)))
    return {"y": y, "S": S} | {f"d{name}": a for name, a in d.items()}


def as_real(out):
    """Complex gradients as a last axis of two, for `assert_close`."""
    out = {name: np.asarray(a) for name, a in out.items()}
    return {n: np.stack([a.real, a.imag], -1) if np.iscomplexobj(a) else a for n, a in out.items()}


def run(x, kind, segment_ids=None, *, implementation, chunk_size=64):
    return as_real(
        _run(
            x,
            segment_ids,
            discretization=KINDS[kind]["discretization"],
            implementation=implementation,
            chunk_size=chunk_size,
        )
    )


def recurrence(x, kind):
    """Token by token in float64; its values are held to dense matrices by a test of its own."""
    with jax.enable_x64(True):
        wide = {n: a.astype(np.promote_types(a.dtype, np.float64)) for n, a in x.items()}
        return run(wide, kind, implementation="reference")


def packed(x, lengths, kind):
    """Documents as rows of their own, in one batch of six times the rows.

    The first one starts from the initial state and is followed by zeros, the others start from a
    zero state that zeros in front leave as it is; the last one's final state is the row's.
    """
    rows, total = x["x"].shape[:2]
    bounds = list(itertools.pairwise(np.cumsum([0, *lengths])))
    apart = dict(x)
    for name in ("x", "dy"):
        apart[name] = np.zeros((6, rows, 200, x[name].shape[2]), np.float32)
    places = []
    for i, (start, end) in enumerate(bounds):
        places.append(
            slice(end - start) if i == 0 and len(bounds) > 1 else slice(start - end, None)
        )
        for name in ("x", "dy"):
            apart[name][i, :, places[-1]] = x[name][:, start:end]
    for name, i in (("initial_state", 0), ("dS", len(bounds) - 1)):
        apart[name] = np.zeros((6, *x[name].shape), np.float32)
        apart[name][i] = x[name]
    if len(bounds) == 1:
        # Nothing stands in front of a single document but its state.
        apart["x"], apart["dy"] = (apart[n][:, :, -total:] for n in ("x", "dy"))
    by_row = ("x", "dy", "initial_state", "dS")
    flat = {n: a.reshape(-1, *a.shape[2:]) if n in by_row else a for n, a in apart.items()}
    out = recurrence(flat, kind)
    for name in ("y", "dx"):
        split = out[name].reshape(6, rows, *out[name].shape[1:])
        out[name] = np.concatenate([split[i, :, place] for i, place in enumerate(places)], 1)
    last = out["S"].reshape(6, rows, *out["S"].shape[1:])[len(bounds) - 1]
    first = out["dinitial_state"].reshape(6, rows, *last.shape[1:])[0]
    return out | {"S": last, "dinitial_state": first}


def without_state(x):
    return {name: a for name, a in x.items() if name != "initial_state"}


def test_legs_is_its_diagonal_plus_low_rank_form():
    """The same eigenvalues, and the same response to an impulse in either basis."""
    A, B = legs(8)
    assert A[3, 1] == pytest.approx(-((7 * 3) ** 0.5)) and A[3, 3] == -4 and A[1, 3] == 0
    lam, P, B_pairs = legs_pairs(8)
    assert np.all(lam.real == -0.5) and np.all(lam.imag > 0)
    both = [np.concatenate([a, a.conj()]) for a in (lam, P, B_pairs)]
    full = np.diag(both[0]) - np.outer(both[1], both[1].conj())
    # Eigenvalues 1, ..., 8 of a matrix this far from normal keep few digits.
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(full).real), np.arange(-8, 0), atol=1e-6)
    for power in range(4):
        moment = both[2].conj() @ np.linalg.matrix_power(full, power) @ both[2]
        expected = B @ np.linalg.matrix_power(A, power) @ B
        np.testing.assert_allclose(moment, expected, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_recurrence_equals_dense_matrices(kind):
    """The discretisation by its formula, on full complex matrices of both halves of the pairs."""
    x = random_inputs(kind, T=9)
    got = recurrence(x, kind)
    x = {name: a.astype(np.complex128) for name, a in x.items()}

    def both(name, d):
        return np.concatenate([x[name][d], x[name][d].conj()])

    pairs = x["A"].shape[1]
    for d in range(x["A"].shape[0]):
        A, dt, identity = np.diag(both("A", d)), x["dt"][d], np.eye(2 * pairs)
        if "P" in x:
            A = A - np.outer(both("P", d), both("P", d).conj())
        if kind == "diagonal_zoh":
            A_bar = np.diag(np.exp(dt * np.diag(A)))
            B_bar = np.linalg.solve(A, (A_bar - identity) @ both("B", d))
        else:
            inverse = np.linalg.inv(identity - dt / 2 * A)
            A_bar, B_bar = inverse @ (identity + dt / 2 * A), inverse @ (dt * both("B", d))
        h = x["initial_state"][:, d, :pairs] + 1j * x["initial_state"][:, d, pairs:]
        h = np.concatenate([h, h.conj()], 1)
        for t in range(9):
            h = h @ A_bar.T + x["x"][:, t, d, None] * B_bar
            y = (h @ both("C", d)).real + (x["D"][d] * x["x"][:, t, d]).real
            np.testing.assert_allclose(got["y"][:, t, d], y, rtol=1e-10, atol=1e-10)
        state = np.concatenate([h[:, :pairs].real, h[:, :pairs].imag], 1)
        np.testing.assert_allclose(got["S"][:, d], state, rtol=1e-10, atol=1e-10)


# The low-rank form compiles for longest; chunks are cut alike for all.
LENGTHS = [("diagonal_zoh", length) for length in (1, 15, 63, 64, 65, 200)]
LENGTHS += [("diagonal_bilinear", 65), ("dplr", 1), ("dplr", 65), ("dplr", 200)]


@pytest.mark.parametrize(("kind", "length"), LENGTHS)
def test_scan_at_every_length(kind, length):
    x = random_inputs(kind, T=length)
    oracle.assert_close(run(x, kind, implementation="scan"), recurrence(x, kind))


@pytest.mark.parametrize(("kind", "length"), (*LENGTHS[4:7], ("dplr", 65)))
def test_convolution_and_its_final_state(kind, length):
    x = without_state(random_inputs(kind, T=length))
    got = run(x, kind, implementation="convolution")
    oracle.assert_close(got, recurrence(x, kind))


@functools.partial(tiny_models.quick_jit, static_argnums=(1, 2))
def values(x, discretization, implementation):
    return {"y": call(x, None, discretization, implementation)[0]}


@pytest.mark.parametrize("dt", (1e-3, 1e-2, 1e-1))
@pytest.mark.parametrize("kind", KINDS)
def test_long_convolution_equals_recurrence(kind, dt):
    """1,024 tokens at one step size, from S4's and S4D-Lin's initial systems."""
    states = 32 if kind == "diagonal_bilinear" else 64
    x = random_inputs(kind, B=1, T=1024, N=states, dt=(dt, dt))
    x = {name: x[name] for name in INPUTS if name in x and name != "initial_state"}
    start = dict(zip("APB", legs_pairs(states), strict=True))
    if kind != "dplr":
        start = {"A": -0.5 + 1j * np.pi * np.arange(states // 2), "B": np.ones(states // 2)}
    x |= {n: np.tile(a[None], (4, 1)).astype(np.complex64) for n, a in start.items()}
    discretization = KINDS[kind]["discretization"]
    with jax.enable_x64(True):
        wide = {n: a.astype(np.promote_types(a.dtype, np.float64)) for n, a in x.items()}
        want = {"y": np.asarray(values(wide, discretization, "reference")["y"])}
    oracle.assert_close(values(x, discretization, "convolution"), want)
    oracle.assert_close(values(x, discretization, "reference"), want)


@pytest.mark.parametrize(("kind", "chunk_size"), (("dplr", 16), ("diagonal_zoh", 128)))
def test_chunk_size_changes_nothing(kind, chunk_size):
    x = random_inputs(kind, 7)
    got = run(x, kind, implementation="scan", chunk_size=chunk_size)
    oracle.assert_close(got, recurrence(x, kind))


LAYOUTS = {
    "first_token": (1, 199),
    "last_token": (199, 1),
    "mid_chunk": (30, 70, 100),
    "chunk_edges": (64, 64, 72),
    "around_an_edge": (63, 2, 135),
    "length_one_in_a_row": (40, 1, 1, 1, 1, 156),
    "across_whole_chunks": (10, 180, 10),
}


# Slow decay, or a leak from one document into the next would drown in rounding.
SLOW = dict(dt=(3e-4, 3e-2))
CASES = [("dplr", layout) for layout in LAYOUTS] + [("diagonal_zoh", "length_one_in_a_row")]


@pytest.mark.parametrize("implementation", ("scan", "reference"))
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_packed_documents_equal_separate_runs(kind, layout, implementation):
    x = random_inputs(kind, 11, **SLOW)
    ids = np.repeat(np.arange(len(LAYOUTS[layout])) % 2 + 1, LAYOUTS[layout])
    segment_ids = np.broadcast_to(ids, (2, 200)).astype(np.int32)
    got = run(x, kind, segment_ids, implementation=implementation)
    oracle.assert_close(got, packed(x, LAYOUTS[layout], kind))


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


@pytest.mark.parametrize("implementation", ("scan", "reference"))
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_with_nan_changes_nothing(padding, implementation):
    padded_T = PADDINGS[padding]
    real = int(np.sum(~padded_T))
    lengths = (real,) if real == 1 else (real // 3, real - real // 3)
    kind = "dplr"
    x = random_inputs(kind, 13, T=real, **SLOW)
    ids = np.where(padded_T, 0, 1)
    ids[~padded_T] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    segment_ids = np.broadcast_to(ids, (2, 200)).astype(np.int32)
    full = {n: put(a, padded_T, np.nan) if n in ("x", "dy") else a for n, a in x.items()}
    got = run(full, kind, segment_ids, implementation=implementation)
    want = packed(x, lengths, kind)
    want = {n: put(a, padded_T, 0) if n in ("y", "dx") else a for n, a in want.items()}
    oracle.assert_close(got, {n: np.asarray(a, np.float64) for n, a in want.items()})
    for name in ("y", "dx"):
        assert np.all(got[name][:, padded_T] == 0), name


def test_rows_of_padding_alone_pass_the_state_through():
    x = random_inputs("dplr", 14)
    got = run(x, "dplr", np.zeros((2, 200), np.int32), implementation="scan")
    np.testing.assert_array_equal(got["S"], x["initial_state"])
    np.testing.assert_array_equal(got["dinitial_state"], x["dS"])
    assert not np.any(got["y"])


@pytest.mark.parametrize("implementation", ("convolution", "scan", "reference"))
def test_bfloat16(implementation):
    """Rounded inputs, float32 inside: as good as the output's own rounding."""
    x = without_state(random_inputs("diagonal_zoh", 3, T=130))
    narrow = {name: jnp.asarray(x[name], jnp.bfloat16) for name in ("x", "dy")}
    got = run(x | narrow, "diagonal_zoh", implementation=implementation)
    want = recurrence(x | {n: np.asarray(a, np.float32) for n, a in narrow.items()}, "diagonal_zoh")
    assert got["y"].dtype == got["dx"].dtype == jnp.bfloat16
    oracle.assert_close(got, want, 1e-2)
    # Never rounded to 16 bits on the way: far better than bfloat16 could be.
    system = [name for name in got if name not in ("y", "dx")]
    oracle.assert_close({n: got[n] for n in system}, {n: want[n] for n in system})


@pytest.mark.parametrize("kind", ("dplr", "diagonal_zoh"))
@pytest.mark.parametrize("split", (1, 37))
def test_prefill_then_decode_equals_one_run(kind, split):
    x = random_inputs(kind, 4, T=40)

    @tiny_models.quick_jit
    def part(u, state):
        arrays = x | {"x": u, "initial_state": state}
        return call(arrays, None, KINDS[kind]["discretization"], "auto", 16)

    whole = part(x["x"], x["initial_state"])
    y, S = part(x["x"][:, :split], x["initial_state"])
    parts = [y]
    for t in range(split, 40):
        y, S = part(x["x"][:, t : t + 1], S)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(S, whole[1], rtol=2e-5, atol=2e-5)


def test_auto_convolves_only_where_it_may():
    x = without_state(random_inputs("dplr", T=40))
    arrays = {name: x[name] for name in INPUTS if name in x}
    state, ids = np.zeros((2, 4, 8), np.float32), np.ones((2, 40), np.int32)

    def jaxpr(arrays, ids):
        return str(jax.make_jaxpr(lambda a: call(a, ids, "bilinear", "auto")[0])(arrays))

    assert "fft" in jaxpr(arrays, None)
    assert "fft" not in jaxpr(arrays, ids)
    assert "fft" not in jaxpr(arrays | {"initial_state": state}, None)
    one = jaxpr(arrays | {"x": x["x"][:, :1]}, None)
    assert "fft" not in one and "scan[" not in one


def loss(x, implementation):
    y, S = call(x, None, "bilinear", implementation)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(S))


def test_transforms():
    """vmap and checkpoint give what the plain gradient gives."""
    x = without_state(random_inputs("diagonal_bilinear", 5, T=20))
    x = {name: jnp.asarray(x[name]) for name in INPUTS if name in x}
    value = functools.partial(loss, implementation="convolution")
    want = tiny_models.quick_jit(jax.grad(value))(x)
    many = x | {"x": jnp.stack([x["x"], 0.5 * x["x"]])}
    axes = {name: 0 if name == "x" else None for name in x}
    mapped = tiny_models.quick_jit(jax.vmap(jax.grad(jax.checkpoint(value)), (axes,)))(many)
    for name, a in want.items():
        np.testing.assert_allclose(mapped[name][0], a, rtol=1e-4, atol=1e-4)


def test_no_tokens():
    x = random_inputs("dplr", T=0)
    y, S = call(x, None, "bilinear", "auto")
    assert y.shape == x["x"].shape
    np.testing.assert_array_equal(S, x["initial_state"])


@pytest.mark.parametrize(("kind", "packed_rows"), (("dplr", True), ("diagonal_bilinear", False)))
def test_memory(kind, packed_rows):
    """Forward and backward at D = 512, N = 64: linear in T, no [T, T] and no [B, T, D, N]."""
    D, N = 512, 64

    def compiled(T):
        x = random_inputs(kind, B=1, T=1, D=D, N=N)
        x = {
            name: jax.ShapeDtypeStruct(x[name].shape, x[name].dtype) for name in INPUTS if name in x
        }
        x |= {"x": jax.ShapeDtypeStruct((1, T, D), jnp.float32)}
        del x["initial_state"]
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32) if packed_rows else None

        def total(x, ids):
            return jnp.sum(jnp.sin(call(x, ids, "bilinear", "auto")[0]))

        # Code quality changes no buffer, and compiling for it takes five times as long.
        step = tiny_models.quick_jit(jax.value_and_grad(total))
        return step.lower(x, ids).compile()

    small, large = compiled(2048), compiled(8192)
    bytes_small, bytes_large = (c.memory_analysis().temp_size_in_bytes for c in (small, large))
    assert bytes_large <= 4.4 * bytes_small
    assert bytes_large < 40 * 8192 * D * 4
    shapes = re.findall(r"(?:f32|c64|pred|s32)\[([\d,]+)\]", large.as_text())
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    assert largest < 8192 * 8192 / 4
    assert largest < 8192 * D * N / 4

"""S4's state space beside `test_edge_cases.py`: its matrices, its convolution, its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memory
import ops_family as family
import ops_oracle as oracle
import tiny_models
from fastweights.ops.hippo import legs, legs_pairs
from ops_family import RULES

KINDS = ("state_space", "state_space_bilinear", "state_space_zoh")


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
    x = RULES[kind].draw(T=9)
    got = family.recurrence(kind, x)
    x = {name: a.astype(np.complex128) for name, a in x.items()}

    def both(name, d):
        return np.concatenate([x[name][d], x[name][d].conj()])

    pairs = x["A"].shape[1]
    for d in range(x["A"].shape[0]):
        A, dt, identity = np.diag(both("A", d)), x["dt"][d], np.eye(2 * pairs)
        if "P" in x:
            A = A - np.outer(both("P", d), both("P", d).conj())
        if kind == "state_space_zoh":
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
            np.testing.assert_allclose(got["o"][:, t, d], y, rtol=1e-10, atol=1e-10)
        state = np.concatenate([h[:, :pairs].real, h[:, :pairs].imag], 1)
        np.testing.assert_allclose(got["S"][:, d], state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "length"),
    [("state_space_zoh", 65), ("state_space_zoh", 200), ("state_space", 65), (KINDS[1], 65)],
)
def test_convolution_and_its_final_state(kind, length):
    family.check(kind, without_state(RULES[kind].draw(T=length)), implementation="convolution")


def test_convolution_of_bfloat16():
    x = without_state(RULES["state_space_zoh"].draw(3, T=130))
    narrow = {name: jnp.asarray(x[name], jnp.bfloat16) for name in ("x", "do")}
    got = family.run("state_space_zoh", x | narrow, implementation="convolution")
    wide = {name: np.asarray(a, np.float32) for name, a in narrow.items()}
    want = family.recurrence("state_space_zoh", x | wide)
    oracle.assert_close(got, want, 1e-2)
    system = set(got) - {"o", "dx"}
    oracle.assert_close({n: got[n] for n in system}, {n: want[n] for n in system})


@functools.partial(tiny_models.quick_jit, static_argnums=(0, 2))
def values(kind, x, implementation):
    return {"o": family.call(kind, x, implementation=implementation)[0]}


@pytest.mark.parametrize("dt", (1e-3, 1e-2, 1e-1))
@pytest.mark.parametrize("kind", KINDS)
def test_long_convolution_equals_recurrence(kind, dt):
    """1,024 tokens at one step size, from S4's and S4D-Lin's initial systems."""
    states = 32 if kind == "state_space_bilinear" else 64
    x = RULES[kind].draw(B=1, T=1024, N=states, dt=(dt, dt))
    x = without_state(family.inputs_of(kind, x))
    start = dict(zip("APB", legs_pairs(states), strict=True))
    if kind != "state_space":
        start = {"A": -0.5 + 1j * np.pi * np.arange(states // 2), "B": np.ones(states // 2)}
    x |= {n: np.tile(a[None], (4, 1)).astype(np.complex64) for n, a in start.items()}
    with jax.enable_x64(True):
        wide = {n: a.astype(np.promote_types(a.dtype, np.float64)) for n, a in x.items()}
        want = {"o": np.asarray(values(kind, wide, "reference")["o"])}
    oracle.assert_close(values(kind, x, "convolution"), want)
    oracle.assert_close(values(kind, x, "reference"), want)


def test_auto_convolves_only_where_it_may():
    x = without_state(family.inputs_of("state_space", RULES["state_space"].draw(T=40)))
    state, ids = np.zeros((2, 4, 8), np.float32), np.ones((2, 40), np.int32)

    def jaxpr(arrays, ids):
        return str(jax.make_jaxpr(lambda a: family.call("state_space", a, ids)[0])(arrays))

    def program(**options):
        call = jax.jit(lambda a: family.call("state_space", a, None, **options)[0])
        return call.lower(jax.tree.map(jnp.asarray, x)).as_text()

    # Of the platforms' forms a CPU keeps its own.
    assert "fft" in jaxpr(x, None) and "fft" not in program()
    assert "fft" in program(implementation="convolution")
    assert "fft" not in jaxpr(x, ids)
    assert "fft" not in jaxpr(x | {"initial_state": state}, None)
    one = jaxpr(x | {"x": x["x"][:, :1]}, None)
    assert "fft" not in one and "scan[" not in one


def test_convolution_goes_through_vmap_and_checkpoint():
    x = without_state(family.inputs_of(KINDS[1], RULES[KINDS[1]].draw(5, T=20)))
    x = jax.tree.map(jnp.asarray, x)

    def loss(x):
        y, S = family.call(KINDS[1], x, implementation="convolution")
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(S))

    want = tiny_models.quick_jit(jax.grad(loss))(x)
    many = x | {"x": jnp.stack([x["x"], 0.5 * x["x"]])}
    axes = {name: 0 if name == "x" else None for name in x}
    mapped = tiny_models.quick_jit(jax.vmap(jax.grad(jax.checkpoint(loss)), (axes,)))(many)
    for name, a in want.items():
        np.testing.assert_allclose(mapped[name][0], a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "packed_rows"), (("state_space", True), (KINDS[1], False)))
def test_neither_all_states_nor_all_pairs_of_tokens_are_held(kind, packed_rows):
    D, N = memory.WIDTH, 64

    def total(x, ids):
        return jnp.sum(jnp.sin(family.call(kind, x, ids)[0]))

    def compile_at(T):
        x = without_state(family.inputs_of(kind, RULES[kind].draw(B=1, T=1, D=D, N=N)))
        x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in x.items()}
        x |= {"x": jax.ShapeDtypeStruct((1, T, D), jnp.float32)}
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32) if packed_rows else None
        return tiny_models.quick_jit(jax.value_and_grad(total)).lower(x, ids).compile()

    T = memory.LENGTHS[1]
    assert memory.assert_linear(compile_at) < T * min(T, D * N) / 4

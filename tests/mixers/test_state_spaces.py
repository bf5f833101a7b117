"""Mamba and S4 against their published equations, their starting points, and their dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_models
from fastweights import mixers
from fastweights.errors import UserError
from fastweights.ops.hippo import legs

D, T = 12, 7


def parameters(module):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.split(module)[1]))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mamba_by_hand(p, x, cfg):
    u = x @ p["inputs"]["x"]["kernel"]
    if cfg.conv_size:
        taps = p["inputs"]["conv_x"]
        past = np.concatenate([np.zeros((len(taps) - 1, u.shape[1])), u])
        u = sum(taps[i] * past[i : i + T] for i in range(len(taps))) + p["inputs"]["conv_bias_x"]
        u = u * sigmoid(u)
    step = np.log1p(np.exp(u @ p["dt_down"]["kernel"] @ p["dt_up"]["kernel"] + p["dt_bias"]))
    B, C = u @ p["B"]["kernel"], u @ p["C"]["kernel"]
    h, y = np.zeros_like(p["A_log"]), np.zeros_like(u)
    for t in range(T):
        decay = np.exp(-step[t][:, None] * np.exp(p["A_log"]))
        h = decay * h + np.outer(step[t] * u[t], B[t])
        y[t] = h @ C[t] + p["D"] * u[t]
    z = x @ p["gate"]["kernel"]
    return (y * z * sigmoid(z)) @ p["out"]["kernel"]


def s4_by_hand(p, x, cfg):
    """Full matrices over both halves of the pairs, one channel at a time."""
    y = np.zeros_like(x)
    for d in range(D):

        def both(name, d=d):
            half = p[f"{name}_real"][d] + 1j * p[f"{name}_imag"][d]
            return np.concatenate([half, half.conj()])

        half = -np.exp(p["A_log"][d]) + 1j * p["A_imag"][d]
        A, dt = np.diag(np.concatenate([half, half.conj()])), np.exp(p["log_dt"][d])
        if cfg.mode == "dplr":
            A = A - np.outer(both("P"), both("P").conj())
        identity = np.eye(len(A))
        if cfg.discretization == "zoh":
            A_bar = np.diag(np.exp(dt * np.diag(A)))
            B_bar = np.linalg.solve(A, (A_bar - identity) @ both("B"))
        else:
            inverse = np.linalg.inv(identity - dt / 2 * A)
            A_bar, B_bar = inverse @ (identity + dt / 2 * A), dt * inverse @ both("B")
        h = np.zeros(len(A), complex)
        for t in range(T):
            h = A_bar @ h + B_bar * x[t, d]
            y[t, d] = (both("C") @ h).real + p["D"][d] * x[t, d]
    y = np.asarray(jax.nn.gelu(jnp.asarray(y, jnp.float32), approximate=False), np.float64)
    out = y @ p["out"]["kernel"]
    return out * sigmoid(y @ p["gate"]["kernel"]) if cfg.output_gate else out


VARIANTS = [
    ("M", {}),
    ("M", dict(conv_size=0, expand=1, dt_rank=0, d_state=1)),
    ("S", {}),
    ("S", dict(mode="diagonal", output_gate=False)),
    ("S", dict(mode="diagonal", init="lin", discretization="zoh")),
]


@pytest.mark.parametrize(("letter", "options"), VARIANTS)
def test_layer_equals_its_equations(letter, options):
    mixer = tiny_models.mixer(letter, D, **options)
    x = np.random.default_rng(1).standard_normal((T, D))
    by_hand = mamba_by_hand if letter == "M" else s4_by_hand
    actual, _ = tiny_models.apply(mixer, jnp.asarray(x[None], jnp.float32))
    expected = by_hand(parameters(mixer), x, mixer.config)
    np.testing.assert_allclose(actual[0], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("letter", "MS")
def test_bfloat16_parameters_leave_the_system_in_float32(letter):
    mixer = tiny_models.mixer(letter, D, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.split(mixer)[1]))
    wide = {path[-1].key for path, x in leaves if x.dtype == jnp.float32}
    system = {"A_log", "A_imag", "B_real", "B_imag", "C_real", "C_imag", "P_real", "P_imag"}
    assert wide == ({"A_log", "D", "dt_bias"} if letter == "M" else system | {"D", "log_dt"})
    cache = mixer.init_cache(1, 4, jnp.bfloat16)
    y, after = tiny_models.apply(mixer, jnp.ones((1, 4, D), jnp.bfloat16), cache=cache)
    assert y.dtype == jnp.bfloat16 and after["state"].dtype == jnp.float32


def fresh(letter, d_model, **options):
    module, config = mixers.MIXERS[letter]
    kinds = dict(dtype=jnp.float32, param_dtype=jnp.float32, norm_eps=1e-6)

    @tiny_models.quick_jit
    def build(key):
        mixer = module(d_model, config(**options), rngs=nnx.Rngs(key), **kinds)
        return nnx.to_pure_dict(nnx.split(mixer)[1])

    return jax.tree.map(lambda x: np.asarray(x, np.float64), build(jax.random.key(0)))


def test_mamba_starts_with_slow_and_fast_steps():
    p = fresh("M", 256, d_state=3)
    np.testing.assert_allclose(np.exp(p["A_log"]), np.tile([1.0, 2.0, 3.0], (512, 1)), rtol=1e-6)
    assert np.all(p["D"] == 1)
    step = np.log1p(np.exp(p["dt_bias"]))
    assert 1e-3 * 0.999 <= step.min() < 1.2e-3 and 0.08 < step.max() <= 0.1001
    assert abs(np.median(np.log(step)) - np.log(1e-2)) < 0.3  # log-uniform


def test_s4_starts_as_legs():
    p = fresh("S", 64, d_state=6)
    A, _ = legs(6)
    half = [p[f"{name}_real"][3] + 1j * p[f"{name}_imag"][3] for name in "P"]
    rates = -np.exp(p["A_log"][3]) + 1j * p["A_imag"][3]
    diagonal, low = (np.concatenate([a, a.conj()]) for a in (rates, half[0]))
    full = np.diag(diagonal) - np.outer(low, low.conj())
    np.testing.assert_allclose(np.poly(full).real, np.poly(A), rtol=1e-4)
    assert 1e-3 * 0.999 <= np.exp(p["log_dt"].min()) < np.exp(p["log_dt"].max()) <= 0.1001


def test_s4d_lin_starts_at_its_frequencies():
    p = fresh("S", 8, d_state=6, mode="diagonal", init="lin", discretization="zoh")
    np.testing.assert_allclose(p["A_imag"], np.tile(np.pi * np.arange(3), (8, 1)), rtol=1e-6)
    np.testing.assert_allclose(np.exp(p["A_log"]), 0.5, rtol=1e-6)
    assert "P_real" not in p


BAD = [
    ("M", dict(d_state=0), r"MambaConfig.d_state is 0; give an integer of at least 1"),
    ("M", dict(expand=0.5), r"expand is 0.5"),
    ("M", dict(dt_rank=-1), r"dt_rank is -1"),
    ("S", dict(d_state=3), r"d_state is 3; .*even"),
    ("S", dict(mode="dense"), r"mode is 'dense'; choose one of dplr, diagonal"),
    ("S", dict(init="fourier"), r"init is 'fourier'; choose one of legs, lin"),
    ("S", dict(init="lin"), r"init is 'lin', which mode 'dplr' does not have; use 'legs'"),
    ("S", dict(discretization="zoh"), r"discretization is 'zoh', which mode 'dplr' does not have"),
    ("S", dict(dt_min=0.2), r"dt_min is 0.2 and dt_max 0.1"),
]


@pytest.mark.parametrize(("letter", "options", "sentence"), BAD)
def test_bad_options_are_refused(letter, options, sentence):
    with pytest.raises(UserError, match=sentence):
        mixers.MIXERS[letter][1](**options)

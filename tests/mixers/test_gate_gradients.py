"""Gradients of every parameter, the gates' above all, against autodiff of the recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_models

T, D = 70, 12


def gradients(letter, dtype, implementation):
    """Gradients of a weighted sum of outputs in the parameters, as a flat dict of float64."""
    mixer = tiny_models.mixer(
        letter, D, dtype, jnp.promote_types(dtype, jnp.float32), implementation=implementation
    )
    graphdef, state = nnx.split(mixer)
    rng = np.random.default_rng(3)
    x, weights = (jnp.asarray(rng.standard_normal((2, T, D)), dtype) for _ in range(2))

    def loss(params):
        y, _ = nnx.merge(graphdef, params)(x)
        return jnp.sum((y * weights).astype(jnp.promote_types(dtype, jnp.float32)))

    grads = tiny_models.quick_jit(jax.grad(loss))(nnx.to_pure_dict(state))
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


# What sets decays and steps, whatever a mixer calls it.
GATES = ("A_log", "dt_bias", "A_imag", "log_dt")


@pytest.mark.parametrize(
    ("letter", "form"), (*((letter, "chunked") for letter in "LDGKNM"), ("S", "convolution"))
)
def test_parameters_feel_what_the_recurrence_says(letter, form):
    with jax.enable_x64(True):
        want = gradients(letter, jnp.float64, "reference")
        got = gradients(letter, jnp.float32, form)
        rounded = gradients(letter, jnp.bfloat16, form)
    for name, exact in want.items():
        scale = np.sqrt(np.mean(exact**2))
        assert np.sqrt(np.mean((got[name] - exact) ** 2)) <= 1e-5 * scale, name
        if name.endswith(tuple(f"['{gate}']" for gate in GATES)):
            a, b = rounded[name].ravel(), exact.ravel()
            assert a @ b >= 0.999 * np.linalg.norm(a) * np.linalg.norm(b), name

"""A weight spread in two steps is the same weight, and so is its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastweights.ops.weights import spread

SHAPES = [
    ((8,), (2, 4096, 8)),
    ((8,), (2, 1024, 4, 8)),
    ((4, 8), (2, 2048, 4, 8)),
    ((8,), (2, 4099, 8)),
    ((8,), (2, 5, 8)),
    ((8,), (9000, 8)),
]


@pytest.mark.parametrize(("weight", "shape"), SHAPES)
def test_spread_weights_have_the_plain_gradient(weight, shape):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (weight, shape))

    def loss(w):
        return jnp.sum(jnp.sin(x * spread(w, shape)))

    value, gradient = jax.jit(jax.value_and_grad(loss))(w)
    product = np.asarray(x, np.float64) * np.asarray(w, np.float64)
    np.testing.assert_allclose(value, np.sum(np.sin(product)), rtol=1e-4)
    each = np.cos(product) * np.asarray(x, np.float64)
    want = each.sum(axis=tuple(range(len(shape) - len(weight))))
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-2)


def test_large_sums_are_made_in_two_steps():
    shape = (2, 4096, 8)
    x = jnp.ones(shape)
    text = jax.jit(jax.grad(lambda w: jnp.sum(x * spread(w, shape)))).lower(jnp.ones(8)).as_text()
    assert text.count("stablehlo.reduce(") >= 2 and "optimization_barrier" in text

"""Weights that every token uses: the same values as the plain ones, and gradients that add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastweights import sharding
from fastweights.ops.weights import gather, look_up, spread

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


@pytest.mark.parametrize("table_dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_a_frequent_token_keeps_its_whole_gradient(dtype, table_dtype):
    """4,000 times the same token, of which bfloat16 counts 256; -1 and 7 are no tokens here."""
    table = jnp.asarray(np.random.default_rng(0).standard_normal((7, 3)), table_dtype)
    tokens = jnp.full((4, 1003), 2).at[:, 1000:].set(jnp.asarray([5, -1, 7]))

    def total(table):
        rows = look_up(gather(table, dtype, ("vocab", "embed"), False), tokens)
        return jnp.where(jnp.isnan(rows), 0.0, rows).astype(jnp.float32).sum(), rows

    gradient, rows = jax.jit(jax.grad(total, has_aux=True))(table)
    assert rows.dtype == dtype and gradient.dtype == table.dtype
    np.testing.assert_array_equal(rows[0, 1000], table[5].astype(dtype))
    assert np.isnan(rows[:, 1001:]).all()
    want = np.zeros((7, 3))
    want[2], want[5] = 4000, 4
    np.testing.assert_array_equal(gradient, want)


def test_each_of_several_models_gets_its_own_gradient():
    tokens = jnp.asarray([[[0, 0]], [[1, 2]]])

    def total(weight, tokens):
        return look_up(gather(weight, jnp.float32, ("vocab", "embed"), True), tokens).sum()

    weights_NVD = jnp.ones((2, 3, 1))
    each = jax.vmap(jax.grad(total))(weights_NVD, tokens)
    of_sum = jax.grad(lambda x: jax.vmap(total)(x, tokens).sum())(weights_NVD)
    for gradient in (each, of_sum):
        np.testing.assert_array_equal(gradient[..., 0], [[2, 0, 0], [0, 1, 1]])


@pytest.mark.parametrize("shared", (True, False), ids=("shared", "alone"))
@pytest.mark.parametrize("shape", [(4, 6), (4, 5), (3, 5)], ids=("slices", "rows", "whole"))
def test_each_use_counts_once_however_rows_are_cut(shape, shared):
    """Devices that hold the same rows, because a mesh does not divide them, count as one."""
    rng = np.random.default_rng(0)
    tokens, factors = rng.integers(0, 8, shape), rng.integers(-9, 9, (*shape, 4))

    def total(weight):
        table = gather(weight, jnp.float32, ("vocab", "embed"), shared)
        return jnp.sum(factors * look_up(table, tokens)) + jnp.sum(2 * look_up(table, tokens))

    mesh = sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=2, tensor=2, sequence=2))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(total))(jnp.ones((8, 4)))
    want = np.zeros((8, 4))
    np.add.at(want, tokens, factors + 2)
    np.testing.assert_array_equal(gradient, want)

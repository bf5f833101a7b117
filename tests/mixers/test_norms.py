"""The two norm conventions, their sums in float32, and the order of norm and gate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastweights.mixers.norms import GatedRMSNorm, RMSNorm

X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal(8).astype(np.float32)
UNIT = X / np.sqrt(np.mean(X * X, -1, keepdims=True) + 1e-6)


def test_zero_centred():
    norm = RMSNorm(8, eps=1e-6, param_dtype=jnp.float32)
    np.testing.assert_allclose(norm(jnp.asarray(X)), UNIT, rtol=1e-5)
    norm.scale[...] = jnp.asarray(W)
    np.testing.assert_allclose(norm(jnp.asarray(X)), UNIT * (1 + W), rtol=1e-5)


def test_plain_weight_and_gate_after_the_norm():
    norm = GatedRMSNorm(8, eps=1e-6, param_dtype=jnp.float32)
    norm.scale[...] = jnp.asarray(W)
    gate = X[::-1]
    np.testing.assert_allclose(norm(jnp.asarray(X)), UNIT * W, rtol=1e-5)
    expected = UNIT * W * np.asarray(jax.nn.silu(gate))
    np.testing.assert_allclose(norm(jnp.asarray(X), jnp.asarray(gate)), expected, rtol=1e-5)


def test_a_weight_for_each_group_and_another_gate():
    """As Mamba-2 and Kimi Delta Attention have them; the norm runs over the last axis alone."""
    norm = GatedRMSNorm((3, 8), eps=1e-6, param_dtype=jnp.float32, activation=jax.nn.sigmoid)
    scale = np.stack([W, 2 * W, -W])
    norm.scale[...] = jnp.asarray(scale)
    expected = UNIT * scale / (1 + np.exp(-X[::-1]))
    np.testing.assert_allclose(norm(jnp.asarray(X), jnp.asarray(X[::-1])), expected, rtol=1e-5)


@pytest.mark.parametrize("cls", [RMSNorm, GatedRMSNorm])
def test_bfloat16_inputs_are_summed_in_float32(cls):
    """In bfloat16 the sum of 4096 ones stops growing at 256: 4 times off."""
    norm = cls(4096, eps=1e-6, param_dtype=jnp.bfloat16)
    y = norm(jnp.ones((1, 4096), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), 1, rtol=4e-3)

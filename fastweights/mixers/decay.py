"""How the decays g = -exp(A_log) softplus(a + dt_bias) of recurrent mixers start.

With a = 0 the memory of a head lasts about 1 / (exp(A_log) softplus(dt_bias)) tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def initial_log_rate(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """log A with A uniform in (0.01, 16): from nearly no decay to a memory of a few tokens."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


def initial_step_bias(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """dt_bias with steps softplus(dt_bias) log-uniform in [1e-3, 0.1] (Mamba-2, arXiv:2405.21060).

    The inverse of softplus is taken in the form that keeps its digits for small steps.
    """
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))

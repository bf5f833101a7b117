"""The gradient of kernels that take one token, which is that of the recurrence itself."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from fastweights.ops import reference


@functools.cache
def with_gradient(update: Callable[..., Any]) -> Callable[..., Any]:
    """update((q, k, v, g, beta, state), scale, option) made differentiable.

    Args:
      update: gives (o, new state) as `reference.core` does at T = 1; its last two arguments are no
        arrays.
    """

    def forward(inputs, scale, option):
        return update(inputs, scale, option), inputs

    def backward(scale, option, inputs, cotangents):
        del option

        def definition(q, k, v, g, beta, state):
            return reference.core(q, k, v, g, beta, state, None, scale=scale)

        return (jax.vjp(definition, *inputs)[1](cotangents),)

    core = jax.custom_vjp(update, nondiff_argnums=(1, 2))
    core.defvjp(forward, backward)
    return core

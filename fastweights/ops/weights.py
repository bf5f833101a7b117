"""Weights that every token uses, laid out so that their gradients are cheap to sum."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fastweights import sharding

ROWS = 128  # rows of a partial sum
MANY = 4096  # rows from which two steps pay


def spread(weight: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A weight for [B, T, ..., D] arrays, such that its gradient is summed in two steps.

    The gradient of a plain broadcast is one sum over all tokens for each of the few entries. XLA
    gives that to a handful of blocks of a GPU, which took three milliseconds a layer where the
    bytes ask for a tenth. Spread in two steps, with a barrier between, each `ROWS` rows are summed
    first, side by side.

    Args:
      weight: its axes are the last ones of `shape`.
      shape: of the array that it will meet.

    Returns:
      The weight with `shape` or with leading axes of size 1, to be multiplied or added.
    """
    thin = weight.reshape((1,) * (len(shape) - weight.ndim) + weight.shape)
    middle = shape[2 : len(shape) - weight.ndim]
    rows = max(1, ROWS // math.prod(middle))
    few = math.prod(shape[: len(shape) - weight.ndim]) < MANY
    if len(shape) - weight.ndim < 2 or few or shape[1] % rows:
        return thin
    batch, length = shape[:2]
    # [B, T / rows, 1, ..., D], and each of them for `rows` tokens.
    parts = jnp.broadcast_to(thin[:, None], (batch, length // rows, *thin.shape[1:]))
    parts = jax.lax.optimization_barrier(parts)
    whole = jnp.broadcast_to(parts, (batch, length // rows, rows, *shape[2:]))
    return whole.reshape(shape)


def sum_tokens(x_BTD: jax.Array) -> jax.Array:
    """Sum over rows and tokens, [D], in the two steps of `spread`."""
    batch, length, width = x_BTD.shape
    if batch * length < MANY or length % ROWS:
        return jnp.sum(x_BTD, axis=(0, 1))
    parts = jnp.sum(x_BTD.reshape(batch, length // ROWS, ROWS, width), axis=2)
    return jnp.sum(jax.lax.optimization_barrier(parts), axis=(0, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table_VD: jax.Array, tokens_BT: jax.Array, dtype: Any) -> jax.Array:
    """The tokens' rows of the table, in `dtype`; NaN for a token that it does not have.

    The gradient is summed in float32 or wider: in bfloat16 the sum of a frequent token would stop
    growing at 256 equal terms. It has one derivative, in reverse mode.

    The table is gathered over the model width first: a lookup in one cut both ways would make the
    compiler move whole activations instead.
    """
    table_VD = sharding.constrain(table_VD.astype(dtype), "vocab", None)
    return table_VD.at[tokens_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _look_up_forward(table_VD, tokens_BT, dtype):
    return look_up(table_VD, tokens_BT, dtype), (table_VD, tokens_BT)


def _look_up_backward(dtype, kept, dx_BTD):
    table_VD, tokens_BT = kept
    acc = jnp.promote_types(table_VD.dtype, jnp.float32)
    zeros_VD = sharding.constrain(jnp.zeros(table_VD.shape, acc), "vocab", None)
    add = zeros_VD.at[tokens_BT].add
    dtable_VD = add(dx_BTD.astype(acc), mode="drop", wrap_negative_indices=False)
    return dtable_VD.astype(table_VD.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)

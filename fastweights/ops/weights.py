"""Weights that every token uses, laid out so that their gradients are cheap to sum."""

import functools
import math
from typing import Any, NamedTuple

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


class Gathered(NamedTuple):
    """A matrix where every device can use it, and where each leaves its part of the gradient.

    Attributes:
      matrix: [V, D], or [D, V] of a head, in the compute dtype, whole but for the vocabulary,
        which stays cut.
      parts: [S, V, D] or [S, D, V], float32 or wider, one for each of S devices with rows of their
        own; S = 1 if the only use takes the sum over devices itself. Nobody reads these zeros: only
        their gradient counts, and that of `matrix` does not.
    """

    matrix: jax.Array
    parts: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(weight: jax.Array, dtype: Any, axes: tuple[str, str], shared: bool) -> Gathered:
    """`Gathered`, for all uses of a matrix in one forward and backward pass.

    It is whole over the model width: a lookup in one cut both ways would make the compiler move
    whole activations instead. What several uses leave in `parts` is added up on each device, and
    crosses devices once, as one sum. Summed by each use, the gradient of a table that is the head
    too would cross twice.

    Args:
      weight: [V, D] or [D, V].
      dtype: the compute dtype.
      axes: the weight's logical axes, "vocab" and "embed" in its order.
      shared: whether there is more than one use; otherwise the sum comes first, so that what the
        use does with it, such as scaling it, needs no pass over a device's part.
    """
    whole = tuple(None if axis == "embed" else axis for axis in axes)
    # Pinned before and behind the cast, or the compiler may gather the wide weight.
    narrow = sharding.constrain(weight.astype(dtype), *axes)
    acc = jnp.promote_types(dtype, jnp.float32)
    # Made of the weight, or under vmap all members would share one gradient.
    zeros = jnp.where(False, weight, 0).astype(acc)
    parts = jnp.broadcast_to(zeros, (sharding.devices("slices") if shared else 1, *weight.shape))
    return Gathered(
        sharding.constrain(narrow, *whole),
        sharding.constrain(parts, "slices" if shared else None, *whole),
    )


def _gather_forward(weight, dtype, axes, shared):
    return gather(weight, dtype, axes, shared), weight


def _gather_backward(dtype, axes, shared, weight, gradient):
    total = sharding.constrain(gradient.parts.sum(axis=0), *axes)
    return (total.astype(weight.dtype),)


gather.defvjp(_gather_forward, _gather_backward)


def gradient_of(like: Gathered, parts: jax.Array) -> Gathered:
    """The gradient by `like`, for a backward pass, from parts of R groups of devices, [R, ...].

    Devices of a group, where there are several, have computed the same; each counts for its share.
    """
    devices, groups = len(like.parts), len(parts)
    if devices < groups:
        parts = parts.sum(axis=0, keepdims=True)
    if devices > groups:
        copies = devices // groups
        shape = (copies, *parts.shape)
        parts = jnp.broadcast_to(parts / copies, shape).reshape(like.parts.shape)
    return like._replace(matrix=None, parts=parts)


@jax.custom_vjp
def look_up(table: Gathered, tokens_BT: jax.Array) -> jax.Array:
    """The tokens' rows of the table [V, D]; NaN for a token that it does not have.

    The gradient is summed in float32 or wider: in bfloat16 the sum of a frequent token would stop
    growing at 256 equal terms. It has one derivative, in reverse mode.
    """
    rows = table.matrix.at[tokens_BT]
    return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _look_up_forward(table, tokens_BT):
    return look_up(table, tokens_BT), (table, tokens_BT)


def _look_up_backward(kept, dx_BTD):
    table, tokens_BT = kept
    _, vocab, width = table.parts.shape
    rows = sharding.row_axis(tokens_BT.shape[1])
    tokens_SBT, dx_SBTD = (
        sharding.by_device(sharding.slices_as_rows(x), rows, *[None] * (x.ndim - 1))
        for x in (tokens_BT, dx_BTD.astype(table.parts.dtype))
    )

    def one(tokens_BT, dx_BTD):
        add = jnp.zeros((vocab, width), dx_BTD.dtype).at[tokens_BT].add
        return add(dx_BTD, mode="drop", wrap_negative_indices=False)

    parts_SVD = jax.vmap(one)(tokens_SBT, dx_SBTD)
    parts_SVD = sharding.constrain(parts_SVD, rows if len(parts_SVD) > 1 else None, "vocab", None)
    return gradient_of(table, parts_SVD), None


look_up.defvjp(_look_up_forward, _look_up_backward)

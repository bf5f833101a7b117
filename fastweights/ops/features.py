"""Maps applied to queries and keys before a memory sees them.

Shapes: the maps act on the last axis or elementwise, whatever stands before it.
"""

import functools
import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fastweights.errors import UserError, check

UNIT_EPS = 1e-6


def l2_normalize(x: jax.Array, eps: float = UNIT_EPS) -> jax.Array:
    """Scales the last axis to unit length: x / sqrt(sum x^2 + eps).

    eps stands inside the root, so a zero vector gives zero and a finite gradient. The sum is taken
    in float32 or wider; the result has x's dtype.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype)


def normalize_heads(x: jax.Array, width: int) -> jax.Array:
    """`l2_normalize` of each `width` entries of the last axis; 0 leaves x as it is."""
    if not width:
        return x
    return l2_normalize(x.reshape(*x.shape[:-1], x.shape[-1] // width, width)).reshape(x.shape)


def _elu1(x: jax.Array) -> jax.Array:
    """elu(x) + 1, the positive map of Katharopoulos et al. 2020 (arXiv 2006.16236), eq. 7."""
    return jax.nn.elu(x) + 1


def _dpfp(x: jax.Array, nu: int) -> jax.Array:
    """r_i r_(i + j) for j = 1 ... nu with r = relu([x, -x]), indices taken around the end.

    Deterministic parameter-free projection, Schlag et al. 2021 (arXiv 2102.11174), eq. 37: sparse
    products that give random keys more room than their own dimension.
    """
    r = jax.nn.relu(jnp.concatenate([x, -x], axis=-1))
    return jnp.concatenate([r * jnp.roll(r, -j, axis=-1) for j in range(1, nu + 1)], axis=-1)


def _taylor(x: jax.Array) -> jax.Array:
    """1, x / d^(1/4) and all products of two of its entries / sqrt(2).

    The second-order Taylor map of Based, Arora et al. 2024 (arXiv 2402.18668), section 4.1: inner
    products are 1 + s + s^2 / 2 with s = q . k / sqrt(d), close to e^s and never below 1/2.
    """
    x = x * x.shape[-1] ** -0.25
    products = x[..., :, None] * x[..., None, :] * 0.5**0.5
    pairs = products.reshape(*x.shape[:-1], x.shape[-1] ** 2)
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x, pairs], axis=-1)


class FeatureMap(NamedTuple):
    """A map phi of the last axis.

    Attributes:
      apply: [..., K] -> [..., width(K)], in the same dtype.
      width: K -> the number of features.
    """

    apply: Callable[[jax.Array], jax.Array]
    width: Callable[[int], int]


FEATURE_MAPS = ("identity", "elu1", "relu", "squared_relu", "dpfp", "taylor")


def feature_map(name: str, *, nu: int = 1) -> FeatureMap:
    """The feature map of that name.

    Args:
      name: one of `FEATURE_MAPS`.
      nu: how many products "dpfp" takes per entry; the others have no use for it.

    Raises:
      UserError: an unknown name or a nu that "dpfp" cannot take.
    """
    match name:
        case "identity":
            return FeatureMap(lambda x: x, lambda K: K)
        case "elu1":
            return FeatureMap(_elu1, lambda K: K)
        case "relu":
            return FeatureMap(jax.nn.relu, lambda K: K)
        case "squared_relu":
            return FeatureMap(lambda x: jnp.square(jax.nn.relu(x)), lambda K: K)
        case "dpfp":
            check(
                isinstance(nu, numbers.Integral) and nu >= 1,
                f"feature_map 'dpfp' has nu = {nu}; give an integer of at least 1.",
            )
            return FeatureMap(functools.partial(_dpfp, nu=nu), lambda K: 2 * K * nu)
        case "taylor":
            return FeatureMap(_taylor, lambda K: 1 + K + K * K)
    raise UserError(f"feature_map is {name!r}; choose one of {', '.join(FEATURE_MAPS)}.")

"""Maps applied to queries and keys before a memory sees them.

Shapes: the maps act on the last axis or elementwise, whatever stands before it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def l2_normalize(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Scales the last axis to unit length: x / sqrt(sum x^2 + eps).

    eps stands inside the root, so a zero vector gives zero and a finite gradient. The sum is taken
    in float32 or wider; the result has x's dtype.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype)


def _identity(x: jax.Array) -> jax.Array:
    return x


def _elu1(x: jax.Array) -> jax.Array:
    """elu(x) + 1, the positive map of Katharopoulos et al. 2020 (arXiv 2006.16236), eq. 7."""
    return jax.nn.elu(x) + 1


FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": _identity,
    "elu1": _elu1,
    "relu": jax.nn.relu,
}

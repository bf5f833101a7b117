"""RMS normalisation in the two conventions that hybrid models use.

Both take their sums in float32 (float64 for float64 inputs) and cast once, at the end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights.ops.weights import spread


def _normalise(x: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x)` over the last axis, in at least float32."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """Zero-centred RMSNorm over the last axis: `x / rms(x) * (1 + scale)`, `scale` starting at 0.

    Weight decay on `scale` then pulls towards the plain normalisation instead of towards silence.
    With `centred` false it is `x / rms(x) * scale`, `scale` from 1, as many published models have
    it: their small weights would lose digits as `scale - 1`. Returns the dtype of `x`.
    """

    def __init__(self, dim: int, *, eps: float, param_dtype, centred: bool = True):
        self.eps, self.centred = eps, centred
        start = jnp.zeros if centred else jnp.ones
        self.scale = nnx.Param(start((dim,), param_dtype), logical_axes=(None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = _normalise(x, self.eps)
        scale = spread(self.scale[...].astype(y.dtype), y.shape)
        return (y * (1 + scale if self.centred else scale)).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """The read-out norm of a recurrent mixer: `x / rms(x) * scale * act(gate)`, `scale` from 1.

    The gate comes after the norm, as in Gated DeltaNet (arXiv:2412.06464), so that it can silence a
    head. `shape` is that of the weights: one vector serves all heads, a matrix has one for each.
    They stay in float32 whatever the parameter dtype.
    """

    def __init__(
        self, shape: int | tuple[int, ...], *, eps: float, param_dtype, activation=jax.nn.silu
    ):
        self.eps, self.activation = eps, activation
        shape = (shape,) if isinstance(shape, int) else shape
        dtype = jnp.promote_types(param_dtype, jnp.float32)
        self.scale = nnx.Param(jnp.ones(shape, dtype), logical_axes=(None,) * len(shape))

    def __call__(self, x: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """Normalises `x` [..., V]; `gate` has its shape, or is None for no gate."""
        y = _normalise(x, self.eps)
        y = y * spread(self.scale[...].astype(y.dtype), y.shape)
        if gate is not None:
            y = y * self.activation(gate.astype(y.dtype))
        return y.astype(x.dtype)

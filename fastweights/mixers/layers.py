"""Linear maps, the SwiGLU MLP, and how their weights start.

Shapes: B batch, T tokens, D model width, F hidden width.

Initialisation. Weights are drawn from a normal distribution cut at two standard deviations and
rescaled to standard deviation 1/sqrt(fan_in), so a normalised input gives unit-variance outputs at
any width, however narrow. Projections that write into the residual stream are scaled by a further
1/sqrt(2 * num_layers), which keeps the stream's variance at the output independent of depth
(Radford et al. 2019). Embedding and head have a rule of their own (see `HybridLM`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

truncated_normal = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


@dataclasses.dataclass(frozen=True)
class Columns:
    """A kernel that is some columns of a wider one, which several maps of the same x share.

    Each then multiplies x by the whole and takes its columns, and the compiler, seeing one and the
    same product several times, makes it once.

    Attributes:
      whole: [in, all columns].
      start: the first of this kernel's columns.
      width: how many they are.
    """

    whole: jax.Array
    start: int
    width: int

    def __getitem__(self, key):
        """Stands in for an array that is read as a parameter, with `[...]`."""
        assert key is Ellipsis
        return self


class Linear(nnx.Module):
    """`x @ kernel` without bias, in `dtype`; `kernel` is [in, out].

    Args:
      logical_axes: names of the kernel's two dimensions for sharding.
      scale: factor on the initial weights.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        logical_axes: tuple[str | None, str | None],
        dtype,
        param_dtype,
        rngs: nnx.Rngs,
        scale: float = 1.0,
    ):
        self.dtype = dtype
        kernel = truncated_normal(rngs.params(), (in_dim, out_dim), param_dtype)
        self.kernel = nnx.Param(kernel * scale, logical_axes=logical_axes)

    def __call__(self, x: jax.Array, *, accumulate: bool = False) -> jax.Array:
        """Maps [..., in] to [..., out]; `accumulate` keeps the sum in float32 or wider."""
        acc = jnp.promote_types(self.dtype, jnp.float32)
        kernel: Any = self.kernel[...]
        shared = isinstance(kernel, Columns)
        y = jnp.dot(
            x.astype(self.dtype),
            (kernel.whole if shared else kernel).astype(self.dtype),
            preferred_element_type=acc if accumulate else None,
        )
        return y[..., kernel.start : kernel.start + kernel.width] if shared else y


class LowRank(nnx.Module):
    """`x @ down @ up`: a linear map through `rank` numbers, without bias.

    The narrow side is replicated on every device; `up` is cut over the heads that it feeds.
    """

    def __init__(self, in_dim: int, rank: int, out_dim: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down = Linear(in_dim, rank, logical_axes=("embed", None), **kinds)
        self.up = Linear(rank, out_dim, logical_axes=(None, "heads"), **kinds)

    def __call__(self, x: jax.Array, *, accumulate: bool = False) -> jax.Array:
        """Maps [..., in] to [..., out]; `accumulate` keeps the sum in float32 or wider."""
        return self.up(self.down(x), accumulate=accumulate)


class SwiGLU(nnx.Module):
    """`down(silu(gate x) * up x)` without biases (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        dtype,
        param_dtype,
        residual_scale: float,
        rngs: nnx.Rngs,
    ):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate = Linear(d_model, hidden, logical_axes=("embed", "mlp"), **kinds)
        self.up = Linear(d_model, hidden, logical_axes=("embed", "mlp"), **kinds)
        self.down = Linear(
            hidden, d_model, logical_axes=("mlp", "embed"), scale=residual_scale, **kinds
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))

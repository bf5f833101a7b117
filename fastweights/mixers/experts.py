"""A mixture of experts in place of the MLP: each token goes through a few of many SwiGLUs.

Shapes: B batch, T tokens, D model width, E experts, C experts a token, F hidden width of an expert,
N real and padding tokens of the batch in one row.

As in Qwen3-Next: p = softmax(x W) over all experts, the C largest, scaled to sum to one; the sum of
p_e MLP_e(x), plus sigmoid(x w) times an expert that every token shares. No token is dropped and no
expert has a capacity: tokens are sorted by expert and go through one grouped matrix product.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights.errors import check
from fastweights.mixers.layers import Linear, SwiGLU
from fastweights.mixers.projections import check_sizes


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Options of `MixtureOfExperts`.

    Attributes:
      num_experts: experts E.
      top_k: experts C that a token goes through.
      dim: hidden width F of an expert.
      shared_dim: hidden width of the expert that every token shares; 0 for none.
      normalize: scale a token's C probabilities to sum to one.
      dense_layers: layers, counted from 0, that keep the one MLP of width `ModelConfig.mlp_dim`.
    """

    num_experts: int = 8
    top_k: int = 2
    dim: int = 128
    shared_dim: int = 128
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = dict(num_experts=self.num_experts, top_k=self.top_k, dim=self.dim)
        check_sizes("ExpertsConfig", **sizes)
        check_sizes("ExpertsConfig", minimum=0, shared_dim=self.shared_dim)
        check(
            self.top_k <= self.num_experts,
            f"ExpertsConfig.top_k is {self.top_k}, more than num_experts {self.num_experts}; "
            "lower it.",
        )
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for layer in self.dense_layers:
            check_sizes("ExpertsConfig", minimum=0, dense_layers=layer)

    def params(self, d_model: int, *, active: bool = False) -> int:
        """Parameters of one layer's mixture; `active`: only those that a token meets."""
        experts = self.top_k if active else self.num_experts
        shared = 3 * d_model * self.shared_dim + d_model if self.shared_dim else 0
        return d_model * self.num_experts + 3 * d_model * self.dim * experts + shared


class GroupedLinear(nnx.Module):
    """A linear map an expert, `kernel` [E, in, out], for rows sorted by expert."""

    def __init__(
        self,
        experts: int,
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
        init = jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", batch_axis=(0,)
        )
        kernel = init(rngs.params(), (experts, in_dim, out_dim), param_dtype)
        self.kernel = nnx.Param(kernel * scale, logical_axes=(None, *logical_axes))

    def __call__(self, x: jax.Array, rows_E: jax.Array) -> jax.Array:
        """Maps [rows, in] to [rows, out], where the first rows_E[0] rows are expert 0's, ..."""
        return jax.lax.ragged_dot(
            x.astype(self.dtype), self.kernel[...].astype(self.dtype), rows_E
        ).astype(self.dtype)


class MixtureOfExperts(nnx.Module):
    """The sparse MLP; every expert is whole on each device that `embed` and `mlp` leave it on."""

    def __init__(
        self,
        d_model: int,
        config: ExpertsConfig,
        *,
        dtype,
        param_dtype,
        residual_scale: float,
        rngs: nnx.Rngs,
    ):
        self.config = config
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        sizes, wide, narrow = config.num_experts, ("embed", "mlp"), ("mlp", "embed")
        self.router = Linear(d_model, sizes, logical_axes=("embed", None), **kinds)
        self.gate = GroupedLinear(sizes, d_model, config.dim, logical_axes=wide, **kinds)
        self.up = GroupedLinear(sizes, d_model, config.dim, logical_axes=wide, **kinds)
        self.down = GroupedLinear(
            sizes, config.dim, d_model, logical_axes=narrow, scale=residual_scale, **kinds
        )
        if config.shared_dim:
            self.shared = SwiGLU(d_model, config.shared_dim, residual_scale=residual_scale, **kinds)
            self.shared_gate = Linear(d_model, 1, logical_axes=("embed", None), **kinds)

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Maps each token.

        Returns:
          y_BTD in the dtype of the activations, and how unevenly the tokens fall on the experts: a
          float32 scalar, E sum_e f_e P_e with f_e the share of tokens that go through expert e and
          P_e its mean probability, over real tokens; it is C when all is even (Fedus et al. 2021,
          arXiv:2101.03961, eq. 4).
        """
        c = self.config
        N, D = math.prod(x_BTD.shape[:2]), x_BTD.shape[2]
        if N == 0:
            return x_BTD, jnp.zeros((), jnp.float32)
        x_ND = x_BTD.reshape(N, D)
        p_NE = jax.nn.softmax(self.router(x_ND, accumulate=True))
        p_NC, expert_NC = jax.lax.top_k(p_NE, c.top_k)
        if c.normalize:
            p_NC = p_NC / jnp.sum(p_NC, axis=1, keepdims=True)

        expert_R = expert_NC.reshape(N * c.top_k)
        order_R = jnp.argsort(expert_R, stable=True)
        rows_E = jnp.bincount(expert_R, length=c.num_experts).astype(jnp.int32)
        x_RD = x_ND[order_R // c.top_k]
        h_RF = jax.nn.silu(self.gate(x_RD, rows_E)) * self.up(x_RD, rows_E)
        # Back to the tokens' order by a gather: sums in a fixed order, bit for bit the same.
        y_NCD = self.down(h_RF, rows_E)[jnp.argsort(order_R)].reshape(N, c.top_k, D)
        y_ND = jnp.einsum("nc,ncd->nd", p_NC, y_NCD.astype(p_NC.dtype))
        if c.shared_dim:
            open_N1 = jax.nn.sigmoid(self.shared_gate(x_ND, accumulate=True))
            y_ND = y_ND + open_N1 * self.shared(x_ND).astype(open_N1.dtype)

        real_N = jnp.ones((N,)) if segment_ids_BT is None else (segment_ids_BT != 0).reshape(N)
        real_N = real_N.astype(jnp.float32)
        tokens = jnp.maximum(jnp.sum(real_N), 1.0)
        chosen_NCE = jax.nn.one_hot(expert_NC, c.num_experts, dtype=jnp.float32)
        share_E = jnp.einsum("n,nce->e", real_N, chosen_NCE) / tokens
        mean_E = jnp.einsum("n,ne->e", real_N, p_NE.astype(jnp.float32)) / tokens
        balance = c.num_experts * jnp.sum(share_E * mean_E)
        return y_ND.astype(x_BTD.dtype).reshape(x_BTD.shape), balance

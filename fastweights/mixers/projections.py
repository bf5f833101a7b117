"""What every mixer does around its memory: project to q, k, v with a short convolution; read out.

Shapes: B batch, T tokens, D model width, H q/k heads, G value heads, K key dim, V value dim,
W convolution taps.

q, k, v and the gate have a kernel each instead of one fused kernel: an optimiser that treats a
matrix as a whole then treats each role by itself, and a cut over heads never runs across roles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fastweights import ops
from fastweights.errors import check
from fastweights.mixers.layers import Linear, LowRank
from fastweights.mixers.norms import GatedRMSNorm


def check_sizes(owner: str, minimum: int = 1, **sizes: int) -> None:
    """Raises `UserError` for the first of `sizes` that is no integer >= `minimum`."""
    for name, size in sizes.items():
        check(
            isinstance(size, int) and not isinstance(size, bool) and size >= minimum,
            f"{owner}.{name} is {size!r}; give an integer of at least {minimum}.",
        )


class QKVProjection(nnx.Module):
    """q, k, v from x, each through a causal depthwise convolution with SiLU.

    `conv_size` 0 leaves the convolution (and its SiLU) out. Convolution weights start uniform in
    +-1/sqrt(W), their biases from 0; both are replicated on every device.
    """

    def __init__(
        self,
        d_model: int,
        dims: dict[str, int],
        conv_size: int,
        *,
        dtype,
        param_dtype,
        rngs: nnx.Rngs,
        conv_bias: bool = False,
        unit_heads: Mapping[str, int] = MappingProxyType({}),
    ):
        """`dims` gives the width of each of "q", "k" and "v", all heads together; `unit_heads` the
        width of a head where each is scaled to unit length."""
        self.unit_heads = tuple(unit_heads.items())
        self.conv_size, self.conv_bias, self.dtype = conv_size, conv_bias, dtype
        self.dims = tuple(dims.items())
        for name, dim in self.dims:
            linear = Linear(
                d_model,
                dim,
                logical_axes=("embed", "heads"),
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )
            setattr(self, name, linear)
            if conv_size:
                bound = conv_size**-0.5
                taps_WD = jax.random.uniform(
                    rngs.params(), (conv_size, dim), param_dtype, -bound, bound
                )
                setattr(self, f"conv_{name}", nnx.Param(taps_WD, logical_axes=(None, None)))
            if conv_size and conv_bias:
                bias_D = nnx.Param(jnp.zeros((dim,), param_dtype), logical_axes=(None,))
                setattr(self, f"conv_bias_{name}", bias_D)

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None, cache: dict[str, Any] | None
    ) -> tuple[dict[str, jax.Array], dict[str, Any] | None]:
        """Returns `{"q", "k", "v"}`, each [B, T, width], and the next convolution cache."""
        out, next_cache = {}, None if cache is None else {}
        unit_heads = dict(self.unit_heads)
        for name, _ in self.dims:
            y_BTD = getattr(self, name)(x_BTD)
            width = unit_heads.get(name, 0)
            if self.conv_size:
                bias_D = getattr(self, f"conv_bias_{name}")[...] if self.conv_bias else None
                y_BTD, tail = ops.short_convolution(
                    y_BTD,
                    getattr(self, f"conv_{name}")[...].astype(self.dtype),
                    bias_D,
                    cache=None if cache is None else cache[name],
                    segment_ids=segment_ids_BT,
                    activation="silu",
                    unit_heads=width,
                )
                if cache is not None and next_cache is not None:
                    next_cache[name] = tail.astype(cache[name].dtype)
            else:
                y_BTD = ops.normalize_heads(y_BTD, width)
            out[name] = checkpoint_name(y_BTD, "mixer_qkv")
        return out, next_cache

    def init_cache(self, batch: int, dtype) -> dict[str, jax.Array]:
        """The last W-1 inputs of each convolution, [B, W-1, width]; empty without one."""
        if not self.conv_size:
            return {}
        return {n: jnp.zeros((batch, self.conv_size - 1, dim), dtype) for n, dim in self.dims}


class ReadOut(nnx.Module):
    """Per-head RMSNorm, optional gate from x, and the projection back to the stream.

    The gate is `gate_activation` of a projection, through `gate_rank` numbers unless that is 0.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        gate: bool,
        norm_eps: float,
        dtype,
        param_dtype,
        residual_scale: float,
        rngs: nnx.Rngs,
        gate_rank: int = 0,
        gate_activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        width = num_heads * head_dim
        self.has_gate, self.dtype = gate, dtype
        self.norm = GatedRMSNorm(
            head_dim, eps=norm_eps, param_dtype=param_dtype, activation=gate_activation
        )
        if gate and gate_rank:
            self.gate = LowRank(d_model, gate_rank, width, **kinds)
        elif gate:
            self.gate = Linear(d_model, width, logical_axes=("embed", "heads"), **kinds)
        self.out = Linear(
            width, d_model, logical_axes=("heads", "embed"), scale=residual_scale, **kinds
        )

    def __call__(self, o_BTGV: jax.Array, x_BTD: jax.Array) -> jax.Array:
        gate_BTGV = self.gate(x_BTD).reshape(o_BTGV.shape) if self.has_gate else None
        y_BTGV = self.norm(o_BTGV, gate_BTGV)
        return self.out(y_BTGV.reshape(*y_BTGV.shape[:2], math.prod(y_BTGV.shape[2:])))

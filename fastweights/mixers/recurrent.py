"""The part that linear attention, DeltaNet and Gated DeltaNet share.

Shapes: B batch, T tokens, D model width, H q/k heads, G value heads, K key dim, V value dim.

A subclass says only what its memory is: `memory` (projected q, k, v in, read values out) and
`init_state`. Projections, short convolution, feature map, read-out and cache live here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights import ops
from fastweights.errors import check
from fastweights.mixers.projections import QKVProjection, ReadOut, check_sizes


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Options of every recurrent mixer.

    Attributes:
      num_heads: value heads G; each keeps its own state.
      num_qk_heads: query/key heads H, a divisor of G (value head j reads q/k head j // (G // H));
        0 means as many as value heads.
      head_dim: width K of a query and a key.
      value_head_dim: width V of a value; 0 means K.
      conv_size: taps of the short convolution on q, k and v; 0 leaves it out.
      output_gate: gate the normalised read-out with silu of a projection of x.
      chunk_size: tokens a chunk of the parallel form.
      implementation: which form of the op to run; "auto" chooses.
    """

    num_heads: int = 4
    num_qk_heads: int = 0
    head_dim: int = 64
    value_head_dim: int = 0
    conv_size: int = 4
    output_gate: bool = True
    chunk_size: int = 64
    implementation: str = "auto"

    def __post_init__(self):
        owner = type(self).__name__
        check_sizes(
            owner, num_heads=self.num_heads, head_dim=self.head_dim, chunk_size=self.chunk_size
        )
        check_sizes(
            owner,
            minimum=0,
            num_qk_heads=self.num_qk_heads,
            value_head_dim=self.value_head_dim,
            conv_size=self.conv_size,
        )
        check(
            self.num_heads % self.qk_heads == 0,
            f"{owner}.num_heads is {self.num_heads}, which num_qk_heads {self.qk_heads} does not "
            "divide; make num_heads a multiple of num_qk_heads.",
        )

    @property
    def qk_heads(self) -> int:
        """Query/key heads with the default filled in."""
        return self.num_qk_heads or self.num_heads

    @property
    def value_dim(self) -> int:
        """Width of a value with the default filled in."""
        return self.value_head_dim or self.head_dim

    @property
    def state_key_dim(self) -> int:
        """Rows of a head's state: the width of a key as the memory sees it."""
        return self.head_dim

    @property
    def unit_heads(self) -> dict[str, int]:
        """Width of a head, for the projections whose heads are scaled to unit length."""
        return {}

    @property
    def qkv_dims(self) -> dict[str, int]:
        """Width of each projection, all heads together."""
        qk = self.qk_heads * self.head_dim
        return {"q": qk, "k": qk, "v": self.num_heads * self.value_dim}


@dataclasses.dataclass(frozen=True)
class FeatureMapConfig(RecurrentConfig):
    """Options of a recurrent mixer with a feature map on q and k.

    Attributes:
      feature_map: one of `ops.FEATURE_MAPS`. "dpfp" and "taylor" widen the state.
      dpfp_nu: products an entry of "dpfp", which makes 2 K nu features out of K.
    """

    feature_map: str = "identity"
    dpfp_nu: int = 1

    def __post_init__(self):
        super().__post_init__()
        owner = type(self).__name__
        check_sizes(owner, dpfp_nu=self.dpfp_nu)
        check(
            self.feature_map in ops.FEATURE_MAPS,
            f"{owner}.feature_map is {self.feature_map!r}; choose one of "
            f"{', '.join(ops.FEATURE_MAPS)}.",
        )

    @property
    def phi(self) -> ops.FeatureMap:
        """The feature map."""
        return ops.feature_map(self.feature_map, nu=self.dpfp_nu)

    @property
    def state_key_dim(self) -> int:
        return self.phi.width(self.head_dim)


class RecurrentMixer(nnx.Module):
    """x -> q, k, v -> memory -> normalised, gated read-out; see the subclasses for the memory."""

    conv_bias: ClassVar[bool] = False

    def __init__(
        self,
        d_model: int,
        config: Any,
        *,
        dtype,
        param_dtype,
        norm_eps: float,
        rngs: nnx.Rngs,
        residual_scale: float = 1.0,
    ):
        """`dtype` is of activations; `residual_scale` shrinks the initial output projection."""
        self.config = config
        self.state_dtype = jnp.promote_types(dtype, jnp.float32)
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.qkv = QKVProjection(
            d_model,
            config.qkv_dims,
            config.conv_size,
            conv_bias=self.conv_bias,
            unit_heads=config.unit_heads,
            **kinds,
        )
        self.read_out = self.make_read_out(
            d_model, norm_eps=norm_eps, residual_scale=residual_scale, **kinds
        )

    def make_read_out(self, d_model: int, **kinds: Any) -> Any:
        """The module from values read and x to the residual stream."""
        c = self.config
        return ReadOut(d_model, c.num_heads, c.value_dim, gate=c.output_gate, **kinds)

    def memory(self, x_BTD, q_BTHK, k_BTHK, v_BTGV, segment_ids_BT, state) -> tuple[Any, Any]:
        """Writes and reads; returns (o_BTGV, final state)."""
        raise NotImplementedError

    def init_state(self, batch: int) -> Any:
        """The empty memory S_BGKV, in float32 or wider whatever the activations' dtype."""
        c = self.config
        return jnp.zeros((batch, c.num_heads, c.state_key_dim, c.value_dim), self.state_dtype)

    @property
    def op_options(self) -> dict[str, Any]:
        """Keyword arguments common to the ops."""
        return dict(chunk_size=self.config.chunk_size, implementation=self.config.implementation)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        segment_ids_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        cache: dict[str, Any] | None = None,
    ) -> tuple[jax.Array, dict[str, Any] | None]:
        """Mixes a batch; continues from `cache` when given.

        Args:
          x_BTD: normalised residual stream.
          segment_ids_BT: int32 document ids, 0 for padding; None for one document a row.
          positions_BT: ignored, a recurrent memory knows its order.
          cache: from `init_cache` or an earlier call; its document goes on with the first real
            token.

        Returns:
          y_BTD in the activations' dtype, and the next cache (None without one).
        """
        del positions_BT
        c = self.config
        B, T, _ = x_BTD.shape
        # The backward pass keeps the matrix products. What convolution, norm and gate make of them
        # is as wide as the stream and cheap to compute again.
        kept = dict(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        qkv, conv = jax.checkpoint(self.qkv.__call__, **kept)(
            x_BTD, segment_ids_BT, None if cache is None else cache["conv"]
        )
        o_BTGV, state = self.memory(
            x_BTD,
            qkv["q"].reshape(B, T, c.qk_heads, c.head_dim),
            qkv["k"].reshape(B, T, c.qk_heads, c.head_dim),
            qkv["v"].reshape(B, T, c.num_heads, c.value_dim),
            segment_ids_BT,
            None if cache is None else cache["state"],
        )
        # Without it the gradient of o is computed anew wherever it is read, from arrays that must
        # then outlive the memory's whole backward pass.
        o_BTGV = jax.lax.optimization_barrier(o_BTGV)
        y_BTD = jax.checkpoint(self.read_out.__call__, **kept)(o_BTGV, x_BTD)
        return y_BTD, None if cache is None else {"state": state, "conv": conv}

    def init_cache(self, batch: int, max_length: int, dtype) -> dict[str, Any]:
        """An empty cache: the state and, in `dtype`, the convolution's last inputs.

        Its size does not depend on `max_length` (tokens).
        """
        del max_length
        return {"state": self.init_state(batch), "conv": self.qkv.init_cache(batch, dtype)}

"""A decoder that gives back a whole document from the stream at its last token.

It makes an auto-encoder of a stack: all that is known of the document's tokens must have come into
one vector. MAD's task of compression is scored through such a one (Poli et al. 2024,
arXiv:2403.17844, and its code).

Shapes: B batch, T tokens, D model width, F frequencies.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights.mixers.attention import token_positions
from fastweights.mixers.layers import Linear
from fastweights.mixers.norms import RMSNorm
from fastweights.ops import segments

LONGEST_WAVE = 10_000.0


class PositionDecoder(nnx.Module):
    """At position i of a document: gelu(W2 norm(gelu(W1 norm(last + code_i)))), all of width D.

    `last` is the stream at the document's last token and `code_i` its i-th `position_codes`, so
    that what is given back at a position has seen nothing else of it. The model's final norm and
    head follow.
    """

    def __init__(self, d_model: int, *, norm: dict[str, Any], dtype, param_dtype, rngs: nnx.Rngs):
        """`norm` holds options of `RMSNorm`."""
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.in_norm = RMSNorm(d_model, **norm)
        self.in_map = Linear(d_model, d_model, logical_axes=("embed", "mlp"), **kinds)
        self.out_norm = RMSNorm(d_model, **norm)
        self.out_map = Linear(d_model, d_model, logical_axes=("mlp", "embed"), **kinds)

    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Arguments as in `HybridLM.hidden`; returns an array like x_BTD."""
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones(x_BTD.shape[:2], jnp.int32)
        if positions_BT is None:
            positions_BT, _ = token_positions(segment_ids_BT, jnp.zeros(x_BTD.shape[0], jnp.int32))
        last_BT = segments.last_of_document(segment_ids_BT)
        # Wide, for the gradient of a document's last token is a sum over all of its positions.
        wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
        wide_BTD = jnp.take_along_axis(wide_BTD, last_BT[:, :, None], axis=1)
        wide_BTD = wide_BTD + position_codes(positions_BT, x_BTD.shape[2]).astype(wide_BTD.dtype)
        x_BTD = wide_BTD.astype(x_BTD.dtype)
        h_BTD = jax.nn.gelu(self.in_map(self.in_norm(x_BTD)))
        return jax.nn.gelu(self.out_map(self.out_norm(h_BTD)))


def position_codes(positions_BT: jax.Array, width: int) -> jax.Array:
    """Sines, then cosines, of the position times rates from 1 down to 1 / LONGEST_WAVE.

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.5, with sines and cosines apart.

    Returns:
      float32 [B, T, width].
    """
    half = -(-width // 2)
    rate_F = LONGEST_WAVE ** -(jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angle_BTF = positions_BT[:, :, None].astype(jnp.float32) * rate_F[None, None]
    return jnp.concatenate([jnp.sin(angle_BTF), jnp.cos(angle_BTF)], axis=2)[..., :width]

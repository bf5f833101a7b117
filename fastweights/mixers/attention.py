"""Softmax attention (letter `A`) and sliding-window attention (letter `W`).

Shapes: B batch, T tokens, D model width, H query heads, J key/value heads, K head dim, S cache
slots.

Grouped queries (Ainslie et al. 2023, arXiv:2305.13245), rotary positions on a fraction of each head
(Su et al. 2021, arXiv:2104.09864), and on request zero-centred RMSNorm of q and k before the
rotation and a sigmoid gate on the heads' outputs, as the published Qwen3-Next layers have them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fastweights import ops
from fastweights.errors import check
from fastweights.mixers.layers import Linear
from fastweights.mixers.norms import RMSNorm
from fastweights.mixers.projections import QKVProjection, check_sizes
from fastweights.ops import segments


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Options of `Attention`.

    Attributes:
      num_heads: query heads H.
      num_kv_heads: key/value heads J, a divisor of H; 0 means as many as query heads.
      head_dim: width K of a query, a key and a value.
      rope_fraction: share of each head that rotary positions turn; 0 for no positions at all.
      rope_theta: base of the rotary wavelengths.
      qk_norm: RMSNorm of q and k, before the rotation.
      qk_norm_over: "head" (zero-centred, per head) or "row" (plain weights, over all heads at once,
        as in OLMo-Hybrid).
      output_gate: multiply each head's output by the sigmoid of a projection of x.
      logit_cap: bend logits smoothly to at most this size (`ops.softmax_attention`); 0 for none.
      conv_size: taps of a short convolution on q, k and v; 0 leaves it out.
    """

    num_heads: int = 4
    num_kv_heads: int = 0
    head_dim: int = 64
    rope_fraction: float = 1.0
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    qk_norm_over: str = "head"
    output_gate: bool = False
    logit_cap: float = 0.0
    conv_size: int = 0

    def __post_init__(self):
        owner = type(self).__name__
        check_sizes(owner, num_heads=self.num_heads, head_dim=self.head_dim)
        check_sizes(owner, minimum=0, num_kv_heads=self.num_kv_heads, conv_size=self.conv_size)
        check(
            self.num_heads % self.kv_heads == 0,
            f"{owner}.num_heads is {self.num_heads}, which num_kv_heads {self.kv_heads} does not "
            "divide; make num_heads a multiple of num_kv_heads.",
        )
        check(
            0 <= self.rope_fraction <= 1,
            f"{owner}.rope_fraction is {self.rope_fraction}; give a share between 0 and 1.",
        )
        # In pairs: of an odd number of channels one more turns (`ops.rotary`).
        turned = 2 * -(-round(self.head_dim * self.rope_fraction) // 2)
        check(
            turned <= self.head_dim and (turned > 0 or self.rope_fraction == 0),
            f"{owner}.rope_fraction {self.rope_fraction} of head_dim {self.head_dim} turns "
            f"{turned} channels; choose it so that these are in the head, or 0 for none.",
        )
        check(
            0 < self.rope_theta < math.inf,
            f"{owner}.rope_theta is {self.rope_theta}; give a positive number.",
        )
        check(
            self.qk_norm_over in ("head", "row"),
            f"{owner}.qk_norm_over is {self.qk_norm_over!r}; choose 'head' or 'row'.",
        )
        check(
            0 <= self.logit_cap < math.inf,
            f"{owner}.logit_cap is {self.logit_cap}; give a positive number, or 0 for none.",
        )

    @property
    def kv_heads(self) -> int:
        """Key/value heads with the default filled in."""
        return self.num_kv_heads or self.num_heads

    @property
    def qkv_dims(self) -> dict[str, int]:
        """Width of each projection, all heads together."""
        kv = self.kv_heads * self.head_dim
        return {"q": self.num_heads * self.head_dim, "k": kv, "v": kv}

    @property
    def qk_norm_dims(self) -> dict[str, int]:
        """Weights of the norms of q and k; empty without them."""
        if not self.qk_norm:
            return {}
        each = self.qk_norm_over == "head"
        return {name: self.head_dim if each else self.qkv_dims[name] for name in "qk"}


@dataclasses.dataclass(frozen=True)
class WindowAttentionConfig(AttentionConfig):
    """Options of `WindowAttention`: those of `AttentionConfig` and `window`.

    Attributes:
      window: tokens that a token sees, itself included (1: itself alone).
    """

    window: int = 128

    def __post_init__(self):
        super().__post_init__()
        check_sizes("WindowAttentionConfig", window=self.window)


def token_positions(segment_ids_BT: jax.Array, start_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers the real tokens of each document from 0.

    Args:
      segment_ids_BT: int document ids, 0 for padding.
      start_B: position of each row's first real token, which continues a cached document.

    Returns:
      (positions_BT int32, the position [B] of a real token that would come next). Padding carries
      the position of the real token before it.
    """
    index_BT, valid_BT = segments.find_documents(segment_ids_BT)
    count_BT = jnp.cumsum(valid_BT, axis=1, dtype=jnp.int32)
    before_BT = jnp.pad(index_BT[:, :-1], ((0, 0), (1, 0)))
    # Tokens counted before the current document; the continued one began `start` tokens ago.
    base_BT = jnp.where(index_BT > before_BT, count_BT - 1, -start_B[:, None])
    base_BT = jax.lax.cummax(base_BT, axis=1)
    next_B = count_BT[:, -1] - base_BT[:, -1]
    return count_BT - 1 - base_BT, next_B


class Attention(nnx.Module):
    """Causal softmax attention over the whole document."""

    window: int | None = None

    def __init__(
        self,
        d_model: int,
        config: AttentionConfig,
        *,
        dtype,
        param_dtype,
        norm_eps: float,
        rngs: nnx.Rngs,
        residual_scale: float = 1.0,
    ):
        """`dtype` is of activations; `residual_scale` shrinks the initial output projection."""
        self.config = config
        c = config
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        width = c.num_heads * c.head_dim
        self.qkv = QKVProjection(d_model, c.qkv_dims, c.conv_size, **kinds)
        if c.qk_norm:
            centred = c.qk_norm_over == "head"
            norm: dict[str, Any] = dict(eps=norm_eps, param_dtype=param_dtype, centred=centred)
            self.q_norm = RMSNorm(c.qk_norm_dims["q"], **norm)
            self.k_norm = RMSNorm(c.qk_norm_dims["k"], **norm)
        if c.output_gate:
            self.gate = Linear(d_model, width, logical_axes=("embed", "heads"), **kinds)
        self.out = Linear(
            width, d_model, logical_axes=("heads", "embed"), scale=residual_scale, **kinds
        )

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
          positions_BT: position of each token in its document, for the rotation; counted from the
            segment ids (and the cache) by default.
          cache: from `init_cache` or an earlier call; its document goes on with the first real
            token.

        Returns:
          y_BTD in the activations' dtype, and the next cache (None without one). A call that runs
          past the cache's last slot returns NaN throughout.

        Raises:
          UserError: more tokens in the call than the cache has slots.
        """
        c = self.config
        B, T, _ = x_BTD.shape
        if T == 0:  # no last token to number the next one by
            return x_BTD.astype(self.qkv.dtype), cache
        qkv, conv = self.qkv(x_BTD, segment_ids_BT, None if cache is None else cache["conv"])
        if c.qk_norm and c.qk_norm_over == "row":
            qkv |= {"q": self.q_norm(qkv["q"]), "k": self.k_norm(qkv["k"])}
        q_BTHK = qkv["q"].reshape(B, T, c.num_heads, c.head_dim)
        k_BTJK = qkv["k"].reshape(B, T, c.kv_heads, c.head_dim)
        v_BTJK = qkv["v"].reshape(B, T, c.kv_heads, c.head_dim)
        if c.qk_norm and c.qk_norm_over == "head":
            q_BTHK, k_BTJK = self.q_norm(q_BTHK), self.k_norm(k_BTJK)

        start_B = jnp.zeros((B,), jnp.int32) if cache is None else cache["position"]
        if positions_BT is not None:
            place_BT, next_B = positions_BT, _next_position(positions_BT, segment_ids_BT, start_B)
        elif segment_ids_BT is not None:
            place_BT, next_B = token_positions(segment_ids_BT, start_B)
        else:
            place_BT = start_B[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
            next_B = start_B + T
        if c.rope_fraction:
            turn = dict(theta=c.rope_theta, fraction=c.rope_fraction)
            q_BTHK = ops.rotary(q_BTHK, place_BT, **turn)
            k_BTJK = ops.rotary(k_BTJK, place_BT, **turn)

        if cache is None:
            o_BTHK = ops.softmax_attention(
                q_BTHK,
                k_BTJK,
                v_BTJK,
                window=self.window,
                logit_cap=c.logit_cap or None,
                segment_ids=segment_ids_BT,
            )
        else:
            slot_document_BT = jnp.broadcast_to(cache["document"][:, None], (B, T))
            document_B = cache["document"]
            if segment_ids_BT is not None:
                index_BT, valid_BT = segments.find_documents(segment_ids_BT)
                slot_document_BT = jnp.where(valid_BT, slot_document_BT + index_BT, 0)
                document_B = document_B + index_BT[:, -1]
            o_BTHK, slots = self._attend_cached(q_BTHK, k_BTJK, v_BTJK, slot_document_BT, cache)
            cache = slots | {"position": next_B, "document": document_B, "conv": conv}
        o_BTHK = checkpoint_name(o_BTHK, "memory_saved")
        if c.output_gate:
            gate_BTHK = self.gate(x_BTD).reshape(o_BTHK.shape)
            o_BTHK = o_BTHK * jax.nn.sigmoid(gate_BTHK)
        return self.out(o_BTHK.reshape(B, T, c.num_heads * c.head_dim)), cache

    def _attend_cached(self, q_BTHK, k_BTJK, v_BTJK, document_BT, cache):
        """Writes the new tokens behind the cached ones and attends to all slots."""
        T, S = q_BTHK.shape[1], cache["k"].shape[2]
        check(
            T <= S,
            f"The call brings {T} tokens but the attention cache has {S} slots; make the cache "
            f"with max_length of at least {T}.",
        )
        index = cache["index"]

        def write(name, new, axis):
            old = cache[name]
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), index, axis)

        # What padding holds may be no number; cleaned here, for later to clean the whole cache
        # would be to copy it at every step.
        k_BTJK, v_BTJK = (segments.select_real(x, document_BT != 0) for x in (k_BTJK, v_BTJK))
        slots = {
            "k": write("k", k_BTJK.swapaxes(1, 2), 2),
            "v": write("v", v_BTJK.swapaxes(1, 2), 2),
            "slot_document": write("slot_document", document_BT, 1),
            "index": index + T,
        }
        o_BTHK = ops.cached_attention(
            q_BTHK,
            slots["k"].astype(k_BTJK.dtype),
            slots["v"].astype(v_BTJK.dtype),
            first=index,
            document_BT=document_BT,
            slot_document_BS=slots["slot_document"],
            logit_cap=self.config.logit_cap or None,
        )
        # A traced index cannot raise, and the write above would be clamped onto the last slots.
        return jnp.where(index + T <= S, o_BTHK, jnp.nan), slots

    def init_cache(self, batch: int, max_length: int, dtype) -> dict[str, Any]:
        """An empty cache of `max_length` slots (tokens, padding included).

        k and v are [batch, J, slots, K] in `dtype`, as `ops.cached_attention` reads them.
        """
        kv_shape = (batch, self.config.kv_heads, max_length, self.config.head_dim)
        slots = self._init_slots(batch, max_length, kv_shape, dtype)
        return slots | {"index": jnp.zeros((), jnp.int32)}

    def _init_slots(self, batch: int, slots: int, kv_shape, dtype) -> dict[str, Any]:
        return {
            "k": jnp.zeros(kv_shape, dtype),
            "v": jnp.zeros(kv_shape, dtype),
            # The document that each slot belongs to; 0 while it is empty, or padding.
            "slot_document": jnp.zeros((batch, slots), jnp.int32),
            "position": jnp.zeros((batch,), jnp.int32),
            "document": jnp.ones((batch,), jnp.int32),
            "conv": self.qkv.init_cache(batch, dtype),
        }


class WindowAttention(Attention):
    """Causal softmax attention over the last `config.window` tokens of the document.

    Its cache holds the last `window` real tokens and nothing else, so it never overflows.
    """

    config: WindowAttentionConfig

    def __init__(self, d_model: int, config: WindowAttentionConfig, **kwargs):
        super().__init__(d_model, config, **kwargs)
        self.window = config.window

    def _attend_cached(self, q_BTHK, k_BTJK, v_BTJK, document_BT, cache):
        """Attends to the kept tokens and the new ones, then keeps the last real ones."""
        W = cache["k"].shape[1]
        joined = {
            name: jnp.concatenate([cache[name], new.astype(cache[name].dtype)], axis=1)
            for name, new in (("k", k_BTJK), ("v", v_BTJK), ("slot_document", document_BT))
        }
        valid_BS = joined["slot_document"] != 0
        # Kept tokens stand in order at the end of the cache, so counting real ones places them all.
        place_BS = jnp.cumsum(valid_BS, axis=1, dtype=jnp.int32)
        o_BTHK = ops.softmax_attention(
            q_BTHK,
            joined["k"].astype(k_BTJK.dtype),
            joined["v"].astype(v_BTJK.dtype),
            window=self.window,
            logit_cap=self.config.logit_cap or None,
            segment_ids=document_BT,
            kv_segment_ids=joined["slot_document"],
            q_positions=place_BS[:, W:],
            kv_positions=place_BS,
        )
        # Stable: empty slots and padding to the front, real tokens behind them in their order.
        order_BW = jnp.argsort(valid_BS, axis=1, stable=True)[:, -W:]
        slots = {
            name: jnp.take_along_axis(
                x, order_BW.reshape(order_BW.shape + (1,) * (x.ndim - 2)), axis=1
            )
            for name, x in joined.items()
        }
        return o_BTHK, slots

    def init_cache(self, batch: int, max_length: int, dtype) -> dict[str, Any]:
        """An empty cache of `window` slots, k and v in `dtype`, whatever `max_length` (tokens)."""
        del max_length
        slots = self.config.window
        kv_shape = (batch, slots, self.config.kv_heads, self.config.head_dim)
        return self._init_slots(batch, slots, kv_shape, dtype)


def _next_position(positions_BT, segment_ids_BT, start_B) -> jax.Array:
    """One more than the position of the last real token; unchanged where there is none."""
    if segment_ids_BT is None:
        return positions_BT[:, -1].astype(jnp.int32) + 1
    valid_BT = segment_ids_BT != 0
    place_BT = jnp.arange(positions_BT.shape[1], dtype=jnp.int32)[None]
    last_B = jnp.max(jnp.where(valid_BT, place_BT, -1), axis=1)
    after_B = jnp.take_along_axis(positions_BT, jnp.maximum(last_B, 0)[:, None], axis=1)[:, 0] + 1
    return jnp.where(last_B >= 0, after_B.astype(jnp.int32), start_B)

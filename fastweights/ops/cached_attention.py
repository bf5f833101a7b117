"""Softmax attention of new tokens to a cache of slots, without scores of the whole cache at a time.

Shapes: B batch, T new tokens, S slots, H query heads, J key/value heads (H % J == 0), R = H // J,
K key dim, V value dim.

The cache stands head by head, for then the slots of a head are one matrix in memory and a product
with it needs no transposed copy of the cache. Several tokens are taken against blocks of slots
with a running maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867; in attention Dao et
al. 2022, arXiv:2205.14135), and blocks that nothing has been written to yet are passed over.
"""

import jax
import jax.numpy as jnp

from fastweights.errors import check
from fastweights.ops.segments import select_real

BLOCK = 1024


def cached_attention(
    q_BTHK: jax.Array,
    k_BJSK: jax.Array,
    v_BJSV: jax.Array,
    *,
    first: jax.Array,
    document_BT: jax.Array,
    slot_document_BS: jax.Array,
    logit_cap: float | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """softmax(K**-0.5 q k^T) v over the slots of a query's own document up to its own.

    Args:
      q_BTHK: queries; those of padding give 0, whatever they hold.
      k_BJSK: keys, the new tokens' among them; finite in every slot.
      v_BJSV: values, likewise.
      first: int [], slot of the first new token; token t stands in slot first + t.
      document_BT: int, the queries' documents, 0 for padding.
      slot_document_BS: int, the slots' documents, 0 for padding and what is empty.
      logit_cap: as in `softmax_attention`.
      block: slots taken at a time where there is more than one new token.

    Returns:
      o_BTHV in v's dtype; sums and weights are float32 or wider.

    Raises:
      UserError: H is no multiple of J.
    """
    (B, T, H, K), (J, S, V) = q_BTHK.shape, v_BJSV.shape[1:]
    check(H % J == 0, f"cached_attention: {H} query heads are no multiple of {J} key heads")
    acc = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q_BTHK = select_real(q_BTHK, document_BT != 0)
    q_BJRTK = q_BTHK.reshape(B, T, J, H // J, K).transpose(0, 2, 3, 1, 4)
    place_T = first + jnp.arange(T)
    size = S if T == 1 else min(block, S)

    def attend(carry, k_BJLK, v_BJLV, document_BL, place_L, fresh_L):
        """The running maximum, sum and output with one block more."""
        top_BJRT, sum_BJRT, o_BJRTV = carry
        logits_BJRTL = K**-0.5 * jnp.einsum(
            "bjrtk,bjlk->bjrtl", q_BJRTK, k_BJLK, preferred_element_type=acc
        )
        if logit_cap is not None:
            logits_BJRTL = logit_cap * jnp.tanh(logits_BJRTL / logit_cap)
        sees_BTL = (document_BT[:, :, None] == document_BL[:, None]) & (document_BL != 0)[:, None]
        sees_BTL &= ((place_L[None] <= place_T[:, None]) & fresh_L[None])[None]
        sees = sees_BTL[:, None, None]
        hidden = jnp.finfo(acc).min
        here_BJRT = jnp.max(jnp.where(sees, logits_BJRTL, hidden), axis=-1)
        new_BJRT = jax.lax.stop_gradient(jnp.maximum(top_BJRT, here_BJRT))
        # The mask once more: where nothing is seen yet, the maximum is no bound.
        shifted_BJRTL = jnp.where(sees, logits_BJRTL - new_BJRT[..., None], -jnp.inf)
        weights_BJRTL = jnp.exp(shifted_BJRTL)
        shrink_BJRT = jnp.exp(top_BJRT - new_BJRT)
        more_BJRTV = jnp.einsum(
            "bjrtl,bjlv->bjrtv",
            weights_BJRTL.astype(v_BJLV.dtype),
            v_BJLV,
            preferred_element_type=acc,
        )
        sum_BJRT = sum_BJRT * shrink_BJRT + jnp.sum(weights_BJRTL, axis=-1)
        return new_BJRT, sum_BJRT, o_BJRTV * shrink_BJRT[..., None] + more_BJRTV

    def step(carry, number):
        # The last block begins earlier where blocks do not tile the slots.
        begin = jnp.minimum(number * size, S - size)
        place_L = begin + jnp.arange(size)

        def take(x, axis):
            return jax.lax.dynamic_slice_in_dim(x, begin, size, axis)

        def some(carry):
            blocks = take(k_BJSK, 2), take(v_BJSV, 2), take(slot_document_BS, 1)
            return attend(carry, *blocks, place_L, place_L >= number * size)

        return jax.lax.cond(number * size < first + T, some, lambda carry: carry, carry), None

    rows = (B, J, H // J, T)
    carry = (
        jnp.full(rows, jnp.finfo(acc).min, acc),
        jnp.zeros(rows, acc),
        jnp.zeros((*rows, V), acc),
    )
    if size == S:
        place_S = jnp.arange(S)
        carry = attend(carry, k_BJSK, v_BJSV, slot_document_BS, place_S, place_S >= 0)
    else:
        carry, _ = jax.lax.scan(step, carry, jnp.arange(-(-S // size)))
    _, sum_BJRT, o_BJRTV = carry
    o_BJRTV = o_BJRTV / jnp.where(sum_BJRT > 0, sum_BJRT, 1)[..., None]
    return o_BJRTV.transpose(0, 3, 1, 2, 4).reshape(B, T, H, V).astype(v_BJSV.dtype)

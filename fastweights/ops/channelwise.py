"""Chunks of the delta rule whose decay differs from key channel to key channel.

With G the running sum of g, now a vector, a pair of tokens of a chunk no longer shares one factor,

    A_ij = sum_c k_ic k_jc e^(G_ic - G_jc),    P_ij = sum_c q_ic k_jc e^(G_ic - G_jc),

so the decay cannot be taken out of the inverse, and splitting it into e^(G_i) e^(-G_j) would
overflow. A reference point r between the two tokens, j <= r < i, splits it into two factors that
are at most 1: the product of the decays in (r, i] and that in (j, r]. Every pair gets such a point
by halving the chunk until single tokens are left: rows in the second half of a block meet columns
in the first half at its middle, in one matrix product per block. The factors themselves are
products along the same tree, so that no running sum exists which a strong gate could spoil, and
the gradient of g is a sum over just those pairs that it stands between.

Then, with masks of documents as in `chunked.py`, and Q_a, K_a decayed since the chunk's start,
K_b until its end and c all along it,

    T = (I + diag(beta) A)^-1,    U = T diag(beta) (V - K_a S),
    O = scale (Q_a S + P U),      S' = diag(c) S + K_b^T U.

Kimi Delta Attention, Kimi Team 2025, arXiv 2510.26692, section 3; secondary chunks of 16 rows, the
two-level form of the tree, are from Yang et al. 2023, arXiv 2312.06635.

Shapes: as in `chunked.py`, with query/key heads repeated to the G value heads; b the tree's block,
M = C // b blocks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fastweights.ops.chunked import MIN_LOG_DECAY, Chunks, Form, Saved, einsum, masks
from fastweights.ops.triangular import unit_lower_inverse


class Products(NamedTuple):
    """Everything that carries a decay."""

    scores_NBGCC: jax.Array
    gram_NBGCC: jax.Array
    q_read_NBGCK: jax.Array
    k_read_NBGCK: jax.Array
    k_write_NBGCK: jax.Array
    keep_NBGK: jax.Array


def _double(until: jax.Array, beyond: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decays within blocks [..., M, b, K] -> within neighbouring pairs [..., M / 2, 2 b, K]."""
    *lead, count, block, key_dim = until.shape
    halves, whole = (*lead, -1, 2, block, key_dim), (*lead, count // 2, 2 * block, key_dim)
    until, beyond = until.reshape(halves), beyond.reshape(halves)
    first = (jnp.arange(2) == 0).reshape((1,) * (until.ndim - 3) + (2, 1, 1))
    first_total, second_total = until[..., :1, -1:, :], until[..., 1:, -1:, :]
    until = jnp.where(first, 1.0, first_total) * until
    beyond = jnp.where(first, second_total, 1.0) * beyond
    return until.reshape(whole), beyond.reshape(whole)


def _merge(diagonal: jax.Array, corner: jax.Array) -> jax.Array:
    """Neighbouring blocks [..., M, b, b] on the diagonal of [..., M / 2, 2 b, 2 b]."""
    first, second = diagonal[..., 0::2, :, :], diagonal[..., 1::2, :, :]
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _products(q_NBHCK, k_NBHCK, g_NBHRCK, within, read, write, keep) -> Products:
    repeats, size = g_NBHRCK.shape[3:5]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q_NBHCK, k_NBHCK))
    # The decays from a block's start up to a token, and from behind the token to the block's end.
    until = jnp.exp(jnp.maximum(g_NBHRCK, MIN_LOG_DECAY)).reshape(q.shape)[..., None, :]
    beyond = jnp.ones_like(until)
    scores = jnp.sum(q * k, axis=-1)[..., None, None]
    gram = jnp.zeros_like(scores)
    block = 1
    while block < size:
        halves = (*q.shape[:3], -1, 2, block, q.shape[-1])
        decay = until.reshape(halves)[..., 1, :, :]
        rows = [x.reshape(halves)[..., 1, :, :] * decay for x in (q, k)]
        columns = (k * beyond.reshape(k.shape)).reshape(halves)[..., 0, :, :]
        corners = einsum("nbgmik,nbgmjk->nbgmij", jnp.concatenate(rows, axis=-2), columns)
        # Without a barrier XLA fuses the levels and computes the lower ones many times over.
        scores, gram, until, beyond = jax.lax.optimization_barrier(
            (
                _merge(scores, corners[..., :block, :]),
                _merge(gram, corners[..., block:, :]),
                *_double(until, beyond),
            )
        )
        block *= 2
    until, beyond = until.reshape(q.shape), beyond.reshape(q.shape)
    return Products(
        jnp.where(within, scores[..., 0, :, :], 0.0),
        jnp.where(within, gram[..., 0, :, :], 0.0),
        jnp.where(read[..., None], q * until, 0.0),
        jnp.where(read[..., None], k * until, 0.0),
        jnp.where(write[..., None], k * beyond, 0.0),
        jnp.where(keep[..., None], until[..., -1, :], 0.0),
    )


def _bind(chunks: Chunks):
    """`_products` as a function of (q, k, g)."""
    within, read, write, keep = (mask[:, :, :, 0] for mask in masks(chunks))
    return functools.partial(_products, within=within, read=read, write=write, keep=keep)


def _flat(x) -> jax.Array:
    """[N, B, H, R, ...] -> [N, B, G, ...]."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _passed(p: Products, w: jax.Array, u_local: jax.Array):
    """The arguments of a `StatePassing`, for G heads of one value head each."""
    one = jnp.ones((1, 1, 1, 1, 1), w.dtype)
    keep = p.keep_NBGK[:, :, :, None, :, None]
    return w[:, :, :, None], u_local[:, :, :, None], p.k_write_NBGCK, one, keep


def _forward(chunks: Chunks, S_BHRKV, scale: float, passing):
    p = _bind(chunks)(chunks.q_NBHCK, chunks.k_NBHCK, chunks.g_NBHRC)
    v, beta = _flat(chunks.v_NBHRCV), _flat(chunks.beta_NBHRC)
    inverse = unit_lower_inverse(beta[..., None] * p.gram_NBGCC)
    solve = inverse * beta[..., None, :]
    w = einsum("nbgij,nbgjk->nbgik", solve, p.k_read_NBGCK)
    u_local = einsum("nbgij,nbgjv->nbgiv", solve, v)
    batch, heads, repeats, *dims = S_BHRKV.shape
    S_BG1KV = S_BHRKV.reshape(batch, heads * repeats, 1, *dims)
    states, u, S_BG1KV = passing.forward(*_passed(p, w, u_local), S_BG1KV)
    o = einsum("nbgij,nbgjv->nbgiv", p.scores_NBGCC, u[:, :, :, 0])
    o = o + einsum("nbgik,nbgkv->nbgiv", p.q_read_NBGCK, states[:, :, :, 0])
    return scale * o, S_BG1KV.reshape(S_BHRKV.shape), Saved(states, u, inverse[:, :, :, None])


def _backward(chunks: Chunks, saved: Saved, scale: float, passing, do, dS_BG1KV):
    p, pullback = jax.vjp(_bind(chunks), chunks.q_NBHCK, chunks.k_NBHCK, chunks.g_NBHRC)
    v, beta = _flat(chunks.v_NBHRCV), _flat(chunks.beta_NBHRC)
    states, u, inverse = jax.tree.map(lambda x: x[:, :, :, 0], saved)
    do = scale * _flat(do)

    w = einsum("nbgij,nbgjk->nbgik", inverse * beta[..., None, :], p.k_read_NBGCK)
    du = einsum("nbgij,nbgiv->nbgjv", p.scores_NBGCC, do)
    dS_read = einsum("nbgik,nbgiv->nbgkv", p.q_read_NBGCK, do)[:, :, :, None]
    w, du, *rest = _passed(p, w, du)
    dstates, du, dS_initial = passing.backward(w, du, dS_read, *rest, dS_BG1KV)
    dstates, du = dstates[:, :, :, 0], du[:, :, :, 0]

    # y is the gradient of the right-hand side diag(beta) (V - K_a S), on which u = T (...) rests.
    y = einsum("nbgij,nbgiv->nbgjv", inverse, du)
    dL = -jnp.tril(einsum("nbgiv,nbgjv->nbgij", y, u), -1)
    dread = -einsum("nbgiv,nbgkv->nbgik", y, states)
    dbeta = jnp.sum(y * v, axis=-1) + jnp.sum(dL * p.gram_NBGCC, axis=-1)
    dbeta = dbeta + jnp.sum(dread * p.k_read_NBGCK, axis=-1)
    gradients = Products(
        einsum("nbgiv,nbgjv->nbgij", do, u),
        beta[..., None] * dL,
        einsum("nbgiv,nbgkv->nbgik", do, states),
        beta[..., None] * dread,
        einsum("nbgjv,nbgkv->nbgjk", u, dstates),
        jnp.sum(dstates * states, axis=-1),
    )
    dq, dk, dg = pullback(gradients)
    return dq, dk, beta[..., None] * y, dg, dbeta, dS_initial


CHANNEL_DECAY = Form(_forward, _backward)

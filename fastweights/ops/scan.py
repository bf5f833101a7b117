"""The recurrent rules with chunks joined by an associative scan (`jax.lax.associative_scan`).

A chunk maps its incoming state affinely, S -> M S + Z with

    M = c I - K^T diag(b) W,    Z = K^T diag(b) U_local,

and such maps compose associatively (Blelloch 1990; for linear recurrences Martin and Cundy 2018,
arXiv 1709.04057). The chain of dependent steps shrinks from N to log2 N, at the price of products
of K x K matrices where the sequential form multiplies a state; the backward pass runs the same scan
from the end with M^T. Everything within the chunks, the gradient included, is shared with
`chunked.py`, whose symbols and shapes hold here.
"""

import functools

import jax
import jax.numpy as jnp

from fastweights.ops import chunked
from fastweights.ops.state_passing import StatePassing

einsum = functools.partial(jnp.einsum, precision="highest")


def _compose(first, second):
    """(M, Z) of `first` and then `second`; without error correction M is the factor c alone."""
    m_1, z_1 = first
    m_2, z_2 = second
    if m_1.shape[-1] == 1 and m_1.shape[-2] == 1:
        return m_2 * m_1, m_2 * z_1 + z_2
    return einsum("...ij,...jk->...ik", m_2, m_1), einsum("...ij,...jv->...iv", m_2, z_1) + z_2


def _prefix(m, z, S, *, reverse: bool):
    """States before each chunk (behind it when reversed) and after the last, from all (M, Z)."""
    m = jnp.broadcast_to(m, z.shape[:4] + m.shape[4:])
    m_all, z_all = jax.lax.associative_scan(_compose, (m, z), reverse=reverse)
    moved = (
        m_all * S[None] if m.shape[-2:] == (1, 1) else einsum("...ij,...jv->...iv", m_all, S[None])
    )
    after = moved + z_all
    if reverse:
        return jnp.concatenate([after[1:], S[None]]), after[0]
    return jnp.concatenate([S[None], after[:-1]]), after[-1]


def _transition(w, k, write, keep):
    """M of every chunk."""
    if w is None:
        return keep
    identity = jnp.eye(k.shape[-1], dtype=k.dtype)[None, None, None, None]
    return keep * identity - einsum("nbhck,nbhrcl->nbhrkl", k, write[..., None] * w)


def _forward(w, u_local, k, write, keep, S_BHRKV):
    z = einsum("nbhck,nbhrcv->nbhrkv", k, write[..., None] * u_local)
    states, S_BHRKV = _prefix(_transition(w, k, write, keep), z, S_BHRKV, reverse=False)
    u = u_local if w is None else u_local - einsum("nbhrck,nbhrkv->nbhrcv", w, states)
    return states, u, S_BHRKV


def _backward(w, du_local, dS_read, k, write, keep, dS_BHRKV):
    m = jnp.swapaxes(_transition(w, k, write, keep), -1, -2)
    z = dS_read if w is None else dS_read - einsum("nbhrck,nbhrcv->nbhrkv", w, du_local)
    dstates, dS_BHRKV = _prefix(m, z, dS_BHRKV, reverse=True)
    du = du_local + write[..., None] * einsum("nbhck,nbhrkv->nbhrcv", k, dstates)
    return dstates, du, dS_BHRKV


core = functools.partial(chunked.core, passing=StatePassing(_forward, _backward, None))

"""How states travel from chunk to chunk: one after the other, or by an associative scan.

Both ways solve the same two recurrences over chunks n (symbols as in `chunked.py`):

    forward:   U_n  = U_local_n - W_n S_n,          S_(n+1) = c_n S_n + K_n^T diag(b_n) U_n
    backward:  dU_n = dU_local_n + diag(b_n) K_n dS_(n+1),
               dS_n = c_n dS_(n+1) + dS_read_n - W_n^T dU_n

W is None for rules without error correction: then U = U_local. c is one factor, or one per row of
the state.

Shapes: as in `chunked.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class StatePassing(NamedTuple):
    """A pair of solvers.

    Attributes:
      forward: (W, U_local, K, b, c, S_0) -> (S_n before each chunk, U, S after the last chunk).
      backward: (W, dU_local, dS_read, K, b, c, dS after the last chunk)
        -> (dS_(n+1) behind each chunk, dU, dS_0).
      matrices_together: how many chunks, counted over rows and value heads, to hold in memory at
        once; None for all of them.
    """

    forward: Callable
    backward: Callable
    matrices_together: int | None


def _einsum(*args):
    return jnp.einsum(*args, precision="highest")


def _full(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """Spreads the broadcast chunk axis, which a scan runs over."""
    return jnp.broadcast_to(x, lead + x.shape[len(lead) :])


def _forward_sequential(w, u_local, k, write, keep, S_BHRKV):
    count = k.shape[:1]
    inputs = (w, u_local, k, _full(write, count), _full(keep, count))

    def body(S, chunk):
        w, u, k, write, keep = chunk
        if w is not None:
            u = u - _einsum("bhrck,bhrkv->bhrcv", w, S)
        update = _einsum("bhck,bhrcv->bhrkv", k, write[..., None] * u)
        return keep * S + update, (S, u)

    S_BHRKV, (states, u) = jax.lax.scan(body, S_BHRKV, inputs)
    return states, u, S_BHRKV


def _backward_sequential(w, du_local, dS_read, k, write, keep, dS_BHRKV):
    count = k.shape[:1]
    inputs = (w, du_local, dS_read, k, _full(write, count), _full(keep, count))

    def body(dS, chunk):
        w, du, dS_read, k, write, keep = chunk
        du = du + write[..., None] * _einsum("bhck,bhrkv->bhrcv", k, dS)
        before = keep * dS + dS_read
        if w is not None:
            before = before - _einsum("bhrck,bhrcv->bhrkv", w, du)
        return before, (dS, du)

    dS_BHRKV, (dstates, du) = jax.lax.scan(body, dS_BHRKV, inputs, reverse=True)
    return dstates, du, dS_BHRKV


SEQUENTIAL = StatePassing(_forward_sequential, _backward_sequential, 32)

"""Inverse of unit lower triangular matrices, for the error correction inside a chunk.

Only substitution and block merges: power series (Neumann, Newton-Schulz) are exact on paper and
lose every digit for near-identical keys, and `solve_triangular` is an order of magnitude slower on
CPUs.

Shapes: C matrix size, M matrices, Z base block size.
"""

import jax
import jax.numpy as jnp

BASE_BLOCK = 16


def unit_lower_inverse(L: jax.Array) -> jax.Array:
    """(I + L)^-1 for strictly lower triangular L.

    Rows are substituted in the diagonal blocks of size 16, all blocks at once. Neighbours then
    merge: the inverse of [[A, 0], [B, D]] is [[A^-1, 0], [-D^-1 B A^-1, D^-1]].

    Args:
      L: [..., C, C] with C = 16 * 2^n, in float32 or wider.
    """
    size = L.shape[-1]
    block = min(BASE_BLOCK, size)
    starts = range(0, size, block)
    diagonal = jnp.stack([L[..., i : i + block, i : i + block] for i in starts], axis=-3)
    inverse = _substitute(diagonal.reshape(-1, block, block)).reshape(diagonal.shape)
    while block < size:
        starts = range(0, size, 2 * block)
        low = [L[..., i + block : i + 2 * block, i : i + block] for i in starts]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = _matmul(_matmul(second, jnp.stack(low, axis=-3)), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([-corner, second], axis=-1)
        inverse = jnp.concatenate([upper, lower], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _substitute(L_MZZ: jax.Array) -> jax.Array:
    """Row i of the inverse is e_i - sum_(j < i) L_ij row_j."""
    size = L_MZZ.shape[-1]
    identity = jnp.zeros_like(L_MZZ) + jnp.eye(size, dtype=L_MZZ.dtype)[None]

    def body(i, X_MZZ):
        L_MZ = jax.lax.dynamic_index_in_dim(L_MZZ, i, 1, keepdims=False)
        row_MZ = jax.lax.dynamic_index_in_dim(X_MZZ, i, 1, keepdims=False)
        # L_ij is 0 for j >= i, so rows not yet substituted do not count.
        row_MZ = row_MZ - jnp.einsum("mj,mjz->mz", L_MZ, X_MZZ, precision="highest")
        return jax.lax.dynamic_update_index_in_dim(X_MZZ, row_MZ, i, 1)

    return jax.lax.fori_loop(1, size, body, identity)

"""Rotary position embedding.

Shapes: B batch, T tokens, H heads, K head dim, F pairs of turned channels.
"""

import math

import jax
import jax.numpy as jnp

from fastweights.errors import check


def rotary(
    x_BTHK: jax.Array, positions_BT: jax.Array, *, theta: float = 10_000.0, fraction: float = 1.0
) -> jax.Array:
    """Rotates pairs of channels by an angle that grows with the position.

    Channel i is paired with channel i + F (the two-halves layout), and pair i turns by
    position * theta^(-2 i / R). Su et al. 2021 (arXiv 2104.09864), eq. 34. R is the number of
    channels asked for and 2 F = R; if R is odd one channel more turns, as in transformers.

    Args:
      x_BTHK: queries or keys.
      positions_BT: integers, the position of each token within its document.
      theta: base of the wavelengths.
      fraction: share of the K channels that turn, the first R; the rest pass through.

    Returns:
      An array like x_BTHK; angles are computed in float32 or wider.

    Raises:
      UserError: when fraction * K turns less than 1 channel or more than K, or shapes do not match.
    """
    check(x_BTHK.ndim == 4, f"rotary: x must be [B, T, H, K], got shape {x_BTHK.shape}")
    check(
        positions_BT.shape == x_BTHK.shape[:2],
        f"rotary: positions must be [B, T] = {x_BTHK.shape[:2]}, got {positions_BT.shape}",
    )
    check(
        0 < theta < math.inf,
        f"rotary: theta must be a positive finite number, got {theta}",
    )
    check(math.isfinite(fraction), f"rotary: fraction must be a finite number, got {fraction}")
    head_dim = x_BTHK.shape[-1]
    asked = round(head_dim * fraction)
    half = -(-asked // 2)
    turned = 2 * half
    check(
        2 <= turned <= head_dim,
        f"rotary: fraction {fraction} of head dim {head_dim} gives {turned} channels to turn, in "
        "pairs; choose it so that these are at least 2 and at most the head dim",
    )
    acc = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    rate_F = theta ** (-jnp.arange(half, dtype=acc) / (asked / 2))
    angle_BT1F = positions_BT[:, :, None, None].astype(acc) * rate_F[None, None, None, :]
    cos, sin = jnp.cos(angle_BT1F), jnp.sin(angle_BT1F)
    x = x_BTHK.astype(acc)
    first, second, rest = x[..., :half], x[..., half:turned], x[..., turned:]
    out = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(out, axis=-1).astype(x_BTHK.dtype)

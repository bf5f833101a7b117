"""Whether the Hopper kernels can take a call; without Pallas, so that asking costs no import.

Shapes: B batch, T tokens, H query/key heads, G value heads, K key dim, V value dim.
"""

import jax
import jax.numpy as jnp

from fastweights.ops.kernels import (
    meant_device,
    obstacle_of_one_token,
    obstacle_of_sharding,
    obstacle_of_state,
    obstacle_of_taps,
)

MAX_KEY_DIM, MAX_VALUE_DIM = 256, 256
BLOCKS = 128, 64  # channels of a block of the convolution: heads that it can scale to unit length
MAX_TAPS = 8  # of the convolution
CONVOLVED_TOKENS = 128  # a block of the convolution; fewer are no loss without the kernel
TILE = 64  # head dims: `rule` pads them to a multiple; for one token that would copy the state


def on_hopper() -> bool:
    """Whether jax computes on a GPU of compute capability 9.0 (H100, H200)."""
    meant, here = meant_device()
    if meant is not None:  # it has a name and no capability
        return meant.platform == "gpu" and any(x in meant.device_kind for x in ("H100", "H200"))
    return getattr(here, "compute_capability", "") == "9.0"


def _obstacle_of_the_machine(*arrays: jax.Array) -> str | None:
    if not on_hopper():
        return "the kernels run on GPUs of compute capability 9.0"
    return obstacle_of_sharding(*arrays)


def convolution_obstacle(x_BTD: jax.Array, w_WD: jax.Array) -> str | None:
    """As `obstacle`, for the short convolution."""
    reason = _obstacle_of_the_machine(x_BTD, w_WD)
    if reason is not None:
        return reason
    if x_BTD.dtype != jnp.bfloat16:
        return f"the kernel takes bfloat16, and x is {x_BTD.dtype}"
    return obstacle_of_taps(w_WD, min(BLOCKS), MAX_TAPS)


def obstacle(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    initial_state: jax.Array | None,
    *,
    channels: bool,
    normaliser: bool = False,
) -> str | None:
    """Why the kernels cannot take a call, in half a sentence; None if they can.

    One token goes to `decode`, more to `rule`. `normaliser`: v holds one as a further channel.
    """
    one_token = q_BTHK.shape[1] == 1
    reason = _obstacle_of_the_machine(q_BTHK, k_BTHK, v_BTGV)
    if reason is not None:
        return reason
    if channels:
        return "the kernels know no decay per key channel"
    if normaliser:
        return "the kernels know no normaliser"
    kinds = (jnp.bfloat16, jnp.float32) if one_token else (jnp.bfloat16,)
    for name, x in (("q", q_BTHK), ("k", k_BTHK), ("v", v_BTGV)):
        if x.dtype not in kinds:
            return f"the kernels take bfloat16, and {name} is {x.dtype}"
    reason = obstacle_of_state(initial_state)
    if reason is not None:
        return reason
    key_dim, value_dim = q_BTHK.shape[-1], v_BTGV.shape[-1]
    if key_dim > MAX_KEY_DIM or value_dim > MAX_VALUE_DIM:
        return (
            f"the kernels take key dims up to {MAX_KEY_DIM} and value dims up to {MAX_VALUE_DIM}, "
            f"and these are {key_dim} and {value_dim}"
        )
    return obstacle_of_one_token(key_dim, value_dim, TILE) if one_token else None

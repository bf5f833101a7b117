"""Whether the TPU kernels can take a call; without Pallas, so that asking costs no import.

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

LANES = 128  # head dims and channels: padded to a multiple
VMEM_LIMIT = 48 * 2**20  # bytes; the smallest VMEM, that of a v7x core, is 64 MiB
MAX_DIM = 256  # of keys and values
BLOCKS = (LANES,)  # channels of a block of the convolution: heads that it can scale to unit length
HALO = 16  # tokens of the convolution's block of earlier ones: a whole tile in bfloat16
MAX_TAPS = 8  # of the convolution
CONVOLVED_TOKENS = 128  # fewer are no loss without the kernel
TILE = 8  # head dims, for one token; padding them would copy the state
GENERATIONS = ("v5", "v6", "TPU7")  # as they stand in the names of devices


def on_tpu() -> bool:
    """Whether jax computes on a TPU that the kernels know: v5e, v5p, v6e or 7x."""
    meant, here = meant_device()
    device = here if meant is None else meant
    if getattr(device, "platform", device) != "tpu":
        return False
    return any(x in getattr(device, "device_kind", "") for x in GENERATIONS)


def _obstacle_of_the_machine(*arrays: jax.Array) -> str | None:
    if not on_tpu():
        return "the kernels run on TPUs from v5 on"
    return obstacle_of_sharding(*arrays)


def convolution_obstacle(x_BTD: jax.Array, w_WD: jax.Array) -> str | None:
    """As `obstacle`, for the short convolution."""
    reason = _obstacle_of_the_machine(x_BTD, w_WD)
    if reason is not None:
        return reason
    if x_BTD.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the kernel takes bfloat16 and float32, and x is {x_BTD.dtype}"
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

    One token goes to `decode`, more to `rule`. A normaliser among the values needs no more than
    their float32.
    """
    del normaliser
    reason = _obstacle_of_the_machine(q_BTHK, k_BTHK, v_BTGV)
    if reason is not None:
        return reason
    if channels:
        return "the kernels know no decay per key channel"
    for name, x in (("q", q_BTHK), ("k", k_BTHK), ("v", v_BTGV)):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"the kernels take bfloat16 and float32, and {name} is {x.dtype}"
    reason = obstacle_of_state(initial_state)
    if reason is not None:
        return reason
    key_dim, value_dim = q_BTHK.shape[-1], v_BTGV.shape[-1]
    if max(key_dim, value_dim) > MAX_DIM:
        return (
            f"the kernels take head dims up to {MAX_DIM}, and these are {key_dim} and {value_dim}"
        )
    return obstacle_of_one_token(key_dim, value_dim, TILE) if q_BTHK.shape[1] == 1 else None

"""What the kernels for GPUs and for TPUs ask alike before a call; without Pallas."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from fastweights import sharding


def meant_device() -> tuple[Any, Any]:
    """(device of a mesh that only the compiler knows, or None; the device that is here).

    The first, where there is one, is what a program is compiled for.
    """
    here: Any = jax.config.jax_default_device
    if here is None or isinstance(here, str):  # a platform, or none named
        here = jax.local_devices(backend=here)[0]
    mesh = jax.sharding.get_abstract_mesh()
    meant = None if mesh.empty else mesh.abstract_device
    if meant is not None and meant.device_kind == getattr(here, "device_kind", None):
        meant = None
    return meant, here


def obstacle_of_sharding(*arrays: jax.Array) -> str | None:
    """Why no kernel can be run on each device's part, in half a sentence; None if one can."""
    reason = sharding.obstacle_to_cutting()
    if reason is not None:
        return reason
    if any(jax.typeof(x).manual_axis_type.varying for x in arrays):
        return "the kernels know no varying mesh axes, so shard_map needs check_vma=False"
    return None


def obstacle_of_taps(w_WD: jax.Array, block: int, most: int) -> str | None:
    """Why no kernel of a convolution takes these taps, in half a sentence; None if one does.

    Args:
      block: channels that a device must have a multiple of.
      most: taps at most.
    """
    taps, channels = w_WD.shape
    channels = sharding.part(channels, "heads")
    if channels % block:
        return f"the kernel takes multiples of {block} channels, and a device has {channels}"
    return f"the kernel takes up to {most} taps, and these are {taps}" if taps > most else None


def obstacle_of_state(initial_state: jax.Array | None) -> str | None:
    """Why no kernel continues a state, in half a sentence; None if one does."""
    if initial_state is None or initial_state.dtype == jnp.float32:
        return None
    return f"the kernels keep a float32 state, and these inputs ask for {initial_state.dtype}"


def obstacle_of_one_token(key_dim: int, value_dim: int, tile: int) -> str | None:
    """Why no kernel takes one token with these head dims, in half a sentence; None if one does."""
    if key_dim % tile or value_dim % tile:
        return (
            f"the kernel for one token takes head dims that are multiples of {tile}, "
            f"and these are {key_dim} and {value_dim}"
        )
    return None


@functools.cache
def say_once(name: str, reason: str) -> None:
    """Warns, once for each operation and reason, that a call falls back to XLA."""
    warnings.warn(f"{name}: runs as XLA code, for {reason}.", category=UserWarning, stacklevel=5)

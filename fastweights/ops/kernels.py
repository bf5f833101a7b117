"""What the kernels for GPUs and for TPUs ask alike before a call; without Pallas."""

import functools
import warnings
from typing import Any

import jax

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


@functools.cache
def say_once(name: str, reason: str) -> None:
    """Warns, once for each operation and reason, that a call falls back to XLA."""
    warnings.warn(f"{name}: runs as XLA code, for {reason}.", category=UserWarning, stacklevel=5)

"""Machines that need not be here: their compilers, their sizes and their speeds.

A target is a chip and a topology, such as `v5p:4x4x4` or `h200:8`. Compiling for it takes the
extra `aot` and no accelerator.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from fastweights.errors import UserError, check

# What the compilers ask of a machine without accelerators; before their first use.
ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # no CUDA libraries are installed
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask, and the question hangs
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # any that exists
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process ends on a lock file
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


class Chip(NamedTuple):
    """One device of a target, from the makers' data sheets.

    Attributes:
      dims: how many numbers its topology has; a GPU's may have its hosts in front.
      memory: bytes.
      network: bytes/s that a device sends to its neighbours, all links together: half of what the
        sheets call bidirectional.
    """

    dims: int
    memory: float
    network: float


CHIPS = {
    "v5e": Chip(2, 16e9, 200e9),
    "v6e": Chip(2, 32e9, 400e9),
    "v5p": Chip(3, 95 * 2**30, 600e9),
    "tpu7x": Chip(3, 96e9, 300e9),  # two devices a chip
    "h200": Chip(1, 141e9, 450e9),  # NVLink, one host
}

BETWEEN_HOSTS = 50e9  # bytes/s of a GPU with an adapter of 400 Gbit/s to itself


class Target(NamedTuple):
    """`hosts` is told where leaving one is slower than the chips' own network, else 1."""

    chip: Chip
    devices: list[Any]
    hosts: int


def find(name: str) -> Target:
    """The devices of a target, known to its compiler alone.

    Raises:
      UserError: no such chip, a topology that is not one, or the compilers are not installed.
    """
    kind, _, topology = name.partition(":")
    known = ", ".join(CHIPS)
    check(kind in CHIPS, f"Target '{name}' names no known chip; the chips are {known}.")
    chip = CHIPS[kind]
    sizes = topology.split("x")
    hosts = "1"
    if kind == "h200" and len(sizes) == 2:
        hosts, *sizes = sizes
    example = "x".join(["2", "4", "4"][: chip.dims])
    check(
        len(sizes) == chip.dims and all(x.isdecimal() and int(x) > 0 for x in (hosts, *sizes)),
        f"Target '{name}' needs {chip.dims} size(s) behind the colon, as in {kind}:{example}.",
    )
    os.environ |= {key: value for key, value in ENVIRONMENT.items() if key not in os.environ}
    jax.devices("cpu")  # finds the compilers
    try:
        if kind == "h200":
            described = topologies.get_topology_desc(
                "h200",
                "cuda",
                topology=f"1x{hosts}x{sizes[0]}",
                target_config=(Path(__file__).parent / "h200.txtpb").read_text(),
            )
        else:
            described = topologies.get_topology_desc(topology_name=name, platform="tpu")
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        if "not installed" in str(error) or "not implemented" in str(error):
            raise UserError(
                f"The compilers for '{kind}' are not installed; install the extra aot "
                "(pip install 'fastweights[aot]')."
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"The compiler knows no target '{name}': {reason}") from error
    return Target(chip, list(described.devices), int(hosts))

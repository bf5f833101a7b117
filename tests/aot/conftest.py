"""Compiling for a GPU without one: what the compiler needs to know before it starts."""

import os
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from fastweights import sharding, targets

os.environ |= {
    "MOSAIC_GPU_DUMP_PTXAS": "1",  # the report of registers and spills
    "MOSAIC_GPU_DUMP_RESOURCES": "1",  # shared memory
}
# A program from the cache would come without its report.
jax.config.update("jax_enable_compilation_cache", False)


def gpus(count: int):
    """H200s of one host that exist only for the compiler."""
    return np.array(targets.find(f"h200:{count}").devices)


@pytest.fixture(scope="session")
def h200():
    """A mesh of one GPU."""
    return jax.sharding.Mesh(gpus(1), ("device",))


@pytest.fixture(scope="session")
def four_h200s():
    """A mesh of four GPUs as `sharding.make_mesh` makes it."""
    return sharding.make_mesh(sharding.MeshConfig(2, 1, 2), list(gpus(4)))


@pytest.fixture
def dumps(monkeypatch):
    """Where the compiler leaves its reports; emptied after the test, for they are large."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", folder)
        yield Path(folder)

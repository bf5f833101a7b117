"""The simulator with its race detector."""

import functools

import pytest

from fastweights.ops.mosaic_gpu import tiles


@pytest.fixture
def races_found(monkeypatch):
    """Switches the detector on; calling the fixture says whether it found a race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    detecting = functools.partial(tiles.plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(tiles.plgpu, "InterpretGPUParams", detecting)
    return lambda: gpu_callbacks.get_races().races_found

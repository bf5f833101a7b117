"""The TPU kernels in Pallas' interpreter, on a TPU that is none."""

import functools

import pytest

from fastweights.ops import kernels
from fastweights.ops.mosaic_tpu import convolution, decode, rule, support


@pytest.fixture
def on_tpu(monkeypatch):
    """Calls for kernels are interpreted; returns the kernels' names and first arguments' shapes."""
    calls = []

    def interpret(module, name):
        real = getattr(module, name)

        @functools.wraps(real)
        def interpreted(first, *rest, **options):
            calls.append((module.__name__.split(".")[-1], first.shape))
            return real(first, *rest, **options, interpret=True)

        monkeypatch.setattr(module, name, interpreted)

    interpret(rule, "core")
    interpret(decode, "core")
    interpret(convolution, "short_convolution")
    monkeypatch.setattr(support, "on_tpu", lambda: True)
    kernels.say_once.cache_clear()
    return calls


@pytest.fixture
def races_found(monkeypatch):
    """Whether the simulator has seen a race in any kernel."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator

    states = []

    def recorded(**options):
        states.append(make(**options))
        return states[-1]

    make = simulator.RaceDetectionState
    monkeypatch.setattr(simulator, "RaceDetectionState", recorded)

    def found():
        assert states, "the detector was never on"
        return any(state.races_found for state in states)

    return found

"""The TPU kernels in Pallas' interpreter, on a TPU that is none."""

import functools

import pytest

from fastweights.ops import kernels
from fastweights.ops.mosaic_tpu import rule, support


@pytest.fixture
def on_tpu(monkeypatch):
    """Calls for kernels are interpreted; returns the shapes of the queries that came to them."""
    shapes = []

    def interpreted(q_BTHK, *rest, **options):
        shapes.append(q_BTHK.shape)
        return core(q_BTHK, *rest, **options, interpret=True)

    core = rule.core
    monkeypatch.setattr(rule, "core", functools.wraps(core)(interpreted))
    monkeypatch.setattr(support, "on_tpu", lambda: True)
    kernels.say_once.cache_clear()
    return shapes


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

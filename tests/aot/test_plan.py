"""A step planned for H200s that are not there."""

import dataclasses

import pytest

import tiny
from fastweights import config as config_lib
from fastweights import flops, planning, sharding, targets


@pytest.fixture(scope="module")
def plans():
    """A hybrid on two GPUs, its weights whole and cut."""
    target = targets.find("h200:2")
    config = config_lib.load(tiny.__file__, ["model.dtype=bfloat16"])
    return [
        planning.plan_step(dataclasses.replace(config, mesh=mesh), target)
        for mesh in (sharding.MeshConfig(2, 1, 1), sharding.MeshConfig(1, 2, 1))
    ]


def test_cut_weights_take_half_the_memory_and_are_gathered(plans):
    whole, cut = plans
    assert cut.bytes["parameters"] < 0.7 * whole.bytes["parameters"]
    assert cut.bytes["optimiser"] < 0.7 * whole.bytes["optimiser"]
    assert "all-gather" in cut.collectives
    assert "all-gather" not in whole.collectives and "all-reduce" in whole.collectives


def test_the_donated_state_is_counted_once(plans):
    for plan in plans:
        state = plan.bytes["parameters"] + plan.bytes["optimiser"]
        assert plan.bytes["new outputs"] < 0.1 * state
        assert 0 <= plan.bytes["batch"] < state


def test_generation_is_planned_with_its_caches():
    target = targets.find("h200:2")
    config = config_lib.load(tiny.__file__, ["model.dtype=bfloat16"])
    config = dataclasses.replace(config, mesh=sharding.MeshConfig(2, 1, 1))
    found = planning.plan_decode(config, target, 16)
    cache = flops.cache_bytes(config.model, config.batch_size, config.data.length)["total"]
    assert list(found) == ["prefill", "decode"]
    for plan in found.values():
        # Its half, and a little to number the slots by.
        assert 0.5 * cache <= plan.bytes["caches"] <= 0.6 * cache
        assert plan.bytes["new outputs"] < plan.bytes["caches"]
    assert found["prefill"].work == 16 * found["decode"].work

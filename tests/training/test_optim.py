"""Schedules, and which parameters are decayed or orthogonalised."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tiny_models
from fastweights.errors import UserError
from fastweights.model import abstract_model
from fastweights.training import optim
from fastweights.training.optim import OptimConfig

# Every letter, scanned and in the tail, with an untied head: every parameter name there is.
CONFIG = tiny_models.config("GAWLDMSKN", 10, tie_embeddings=False)


def abstract_params():
    return abstract_model(CONFIG)[1]


def by_name(tree):
    return {
        ".".join(optim.path_names(path)): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)
        )[0]
    }


def rates(steps=100, **options):
    schedule = optim.schedule(OptimConfig(lr=1.0, **options), steps)
    return np.array([float(schedule(step)) for step in range(steps + 1)])


def test_cosine_rises_from_zero_and_ends_at_the_ratio():
    values = rates(schedule="cosine", warmup_steps=10, end_lr_ratio=0.1)
    np.testing.assert_allclose(values[:11], np.arange(11) / 10, atol=1e-6)
    np.testing.assert_allclose(values[[55, 100]], [0.55, 0.1], atol=1e-6)
    assert (np.diff(values[10:]) < 0).all()


def test_warmup_stable_decay_is_flat_and_then_linear():
    values = rates(schedule="wsd", warmup_steps=10, decay_steps=20, end_lr_ratio=0.0)
    np.testing.assert_allclose(values[:11], np.arange(11) / 10, atol=1e-6)
    np.testing.assert_allclose(values[10:81], 1.0)
    np.testing.assert_allclose(values[80:], np.linspace(1, 0, 21), atol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_run_shorter_than_its_warmup_has_a_schedule(schedule):
    assert np.isfinite(rates(5, schedule=schedule, warmup_steps=10)).all()


def test_weight_matrices_are_decayed_and_nothing_else():
    mask = by_name(optim.decay_mask(abstract_params()))
    decayed = {name.split(".")[-1] for name, value in mask.items() if value}
    kept = {name.split(".")[-1] for name, value in mask.items() if not value}
    assert decayed == {"kernel", "embedding", "head"}
    system = {"D", "log_dt", "A_imag", "B_real", "B_imag", "C_real", "C_imag", "P_real", "P_imag"}
    convolutions = {f"conv_{name}" for name in "qkvx"} | {f"conv_bias_{name}" for name in "qkvx"}
    assert kept == {"scale", "A_log", "dt_bias"} | system | convolutions


def test_a_stacked_vector_is_not_taken_for_a_matrix():
    """In a scanned group A_log is two-dimensional, as a matrix is outside."""
    shapes = by_name(abstract_params())
    assert shapes["groups.layer_0.mixer.decay.A_log"].ndim == 2
    assert not by_name(optim.decay_mask(abstract_params()))["groups.layer_0.mixer.decay.A_log"]


def test_an_unknown_parameter_name_is_refused():
    with pytest.raises(UserError, match=r"parameter 'mixer\.mystery' is in neither list"):
        optim.decay_mask({"mixer": {"mystery": jnp.zeros(3)}})


def test_muon_takes_the_kernels_of_the_blocks_over_their_last_two_axes():
    dimensions = by_name(optim.muon_dimensions(abstract_params()))
    shapes = by_name(abstract_params())
    for name, value in dimensions.items():
        if name.split(".")[-1] == "kernel":
            last = shapes[name].ndim - 1
            assert (value.reduction_axis, value.output_axis) == (last - 1, last), name
        else:
            assert value is None, name


@pytest.mark.parametrize("decayed", ["matrices", "all"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_alone_shrinks_matrices_only_or_all(name, decayed):
    # Each name once a part of the model: for its update neither layer nor size counts.
    params = {}
    for path, leaf in by_name(abstract_params()).items():
        *parts, last = path.split(".")
        holder = params.setdefault(parts[0], {}) if parts else params
        holder[last] = jnp.ones((2,) * leaf.ndim)
    gradients = jax.tree.map(jnp.zeros_like, params)
    config = OptimConfig(name=name, lr=0.5, warmup_steps=0, weight_decay=0.1, decayed=decayed)
    tx = optim.make_optimizer(config, 10)
    # Jitted: op by op, Muon's iteration compiles anew for every shape.
    updates, _ = jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(gradients, params)
    for path, update in by_name(updates).items():
        shrinks = decayed == "all" or path.split(".")[-1] in optim.MATRICES
        expected = -0.05 if shrinks else 0.0
        np.testing.assert_allclose(update, expected, atol=1e-6, err_msg=path)


def test_muon_updates_are_near_orthogonal_for_each_layer_of_a_stack():
    tx = optim.make_optimizer(OptimConfig(name="muon", lr=1.0, warmup_steps=0, weight_decay=0.0), 9)
    params = {"groups": {"kernel": jnp.zeros((2, 8, 8))}}
    key = jax.random.key(0)
    gradients = {"groups": {"kernel": jax.random.normal(key, (2, 8, 8))}}
    updates, _ = tx.update(gradients, tx.init(params), params)
    singular = np.linalg.svd(np.asarray(updates["groups"]["kernel"]), compute_uv=False)
    # Newton-Schulz as Muon uses it brings all singular values to about the same size.
    assert singular.min() / singular.max() > 0.5
    assert not np.allclose(updates["groups"]["kernel"][0], updates["groups"]["kernel"][1])


def test_clipping_limits_the_global_norm():
    config = OptimConfig(clip_norm=1.0, lr=1.0, warmup_steps=0)
    clipped = optim.make_optimizer(config, 10)
    free = optim.make_optimizer(dataclasses.replace(config, clip_norm=0.0), 10)
    params = {"kernel": jnp.zeros((4, 4))}
    gradients = {"kernel": jnp.full((4, 4), 100.0)}

    def second_moment(tx):
        _, state = tx.update(gradients, tx.init(params), params)
        return optax.tree.get(state, "nu")["kernel"]

    np.testing.assert_allclose(second_moment(clipped) / 0.05, (1 / 4) ** 2, rtol=1e-4)
    np.testing.assert_allclose(second_moment(free) / 0.05, 100.0**2, rtol=1e-4)


@pytest.mark.parametrize(
    "field, value, told",
    [
        ("name", "sgd", "use one of: adamw, muon"),
        ("schedule", "step", "use one of: cosine, wsd"),
        ("nonfinite", "ignore", "use one of: stop, skip"),
        ("lr", 0.0, "it must be positive"),
        ("clip_norm", -1.0, "must not be negative"),
        ("warmup_steps", -1, "must not be negative"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(field, value, told):
    with pytest.raises(UserError, match=rf"optim\.{field} is '?{value}.*{told}"):
        OptimConfig(**{field: value})

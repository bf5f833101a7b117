"""The mixture of experts against a loop over tokens, and the number that evens it out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_models
from fastweights.errors import UserError
from fastweights.mixers.experts import ExpertsConfig, MixtureOfExperts

WIDTH = 6
CONFIG = ExpertsConfig(num_experts=5, top_k=2, dim=4, shared_dim=3)


def build(config=CONFIG):
    """(graphdef, parameters)."""
    kinds = dict(dtype=jnp.float32, param_dtype=jnp.float32, residual_scale=1.0)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: MixtureOfExperts(WIDTH, config, rngs=nnx.Rngs(0), **kinds))
    )
    return graphdef, tiny_models.fill(nnx.to_pure_dict(state))


def run(config, params, x, ids=None):
    graphdef, _ = build(config)
    return tiny_models.quick_jit(lambda p, x: nnx.merge(graphdef, p)(x, ids))(params, x)


def swiglu(params, x, expert=None):
    gate, up, down = (np.asarray(params[name]["kernel"]) for name in ("gate", "up", "down"))
    if expert is not None:
        gate, up, down = gate[expert], up[expert], down[expert]
    inner = x @ gate
    return (inner / (1 + np.exp(-inner)) * (x @ up)) @ down


def by_definition(config, params, x):
    """Token by token; also the probabilities and which experts were taken."""
    y, p, taken = np.zeros_like(x), [], np.zeros((*x.shape[:2], config.num_experts))
    for place in np.ndindex(x.shape[:2]):
        logits = x[place] @ np.asarray(params["router"]["kernel"])
        share = np.exp(logits) / np.exp(logits).sum()
        p.append(share)
        chosen = np.argsort(-share)[: config.top_k]
        taken[place][chosen] = 1
        total = share[chosen].sum() if config.normalize else 1.0
        for expert in chosen:
            y[place] += share[expert] / total * swiglu(params, x[place], expert)
        if config.shared_dim:
            gate = (x[place] @ np.asarray(params["shared_gate"]["kernel"]))[0]
            y[place] += swiglu(params["shared"], x[place]) / (1 + np.exp(-gate))
    return y, np.reshape(p, taken.shape), taken


@pytest.mark.parametrize(
    "changed",
    [{}, dict(normalize=False, shared_dim=0), dict(top_k=5), dict(num_experts=1, top_k=1)],
    ids=str,
)
def test_each_token_goes_through_its_experts(changed):
    config = dataclasses.replace(CONFIG, **changed)
    _, params = build(config)
    x = np.random.default_rng(0).standard_normal((2, 7, WIDTH)).astype(np.float32)
    ids = np.ones((2, 7), np.int32)
    ids[1, :3] = 0  # padding does not count in how evenly tokens fall
    y, balance = run(config, params, x, ids)
    want, p, taken = by_definition(config, params, x)
    np.testing.assert_allclose(y, want, atol=1e-5)
    real = ids != 0
    uneven = config.num_experts * np.sum(taken[real].mean(0) * p[real].mean(0))
    np.testing.assert_allclose(balance, uneven, rtol=1e-5)


def test_calls_without_tokens():
    _, params = build()
    y, balance = run(CONFIG, params, jnp.zeros((2, 0, WIDTH)))
    assert y.shape == (2, 0, WIDTH) and balance == 0


def test_following_its_gradient_evens_out_the_experts():
    """From tokens that nearly all go to two experts of five to all of them in use."""
    graphdef, params = build()
    skewed = params["router"]["kernel"].at[:, :2].add(1.0)
    params["router"]["kernel"] = skewed
    x = 1 + 0.5 * jax.random.normal(jax.random.key(0), (4, 32, WIDTH))

    @tiny_models.quick_jit
    def descend(params):
        def balance(kernel):
            return nnx.merge(graphdef, params | {"router": {"kernel": kernel}})(x)[1]

        def step(kernel, _):
            value, gradient = jax.value_and_grad(balance)(kernel)
            return kernel - 0.2 * gradient, value

        return jax.lax.scan(step, params["router"]["kernel"], length=200)

    kernel, values = descend(params)
    assert values[0] > 4 and values[-1] < 2.5
    chosen = jax.lax.top_k(x @ kernel, 2)[1]
    assert set(np.unique(chosen)) == set(range(5))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(top_k=9), r"top_k is 9, more than num_experts 5"),
        (dict(num_experts=0), r"num_experts is 0; give an integer"),
        (dict(dense_layers=(-1,)), r"dense_layers is -1"),
    ],
)
def test_bad_options_are_refused(options, told):
    with pytest.raises(UserError, match=told):
        dataclasses.replace(CONFIG, **options)


def test_dense_layers_beyond_the_stack_are_refused():
    with pytest.raises(UserError, match=r"dense_layers has \[1\] but the model has 1 layers"):
        tiny_models.config("G", 1, mlp="moe", moe=tiny_models.EXPERTS)


@pytest.mark.parametrize(
    ("dense", "group", "groups", "tail"),
    [
        ((), "GA", 3, "G"),
        ((1, 3, 5), "GA", 3, "G"),
        ((0, 1, 4, 5), "GAGA", 1, "GAG"),
        ((2,), "GAGAGA", 1, "G"),
        ((2, 6), "GAGA", 1, "GAG"),
        ((0, 3), "GAGAGAG", 1, ""),
    ],
)
def test_groups_are_equal_in_their_mlps(dense, group, groups, tail):
    moe = dataclasses.replace(tiny_models.EXPERTS, dense_layers=dense)
    layout = tiny_models.config("GA", 7, mlp="moe", moe=moe).layout
    assert (layout.group, layout.num_groups, layout.tail) == (group, groups, tail)

"""The step: the same update however rows are cut, and none at all when a number is not finite."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastweights import config as config_lib
from fastweights import planning, sharding
from fastweights.data import train_dataset
from fastweights.training import optim
from fastweights.training.state import init_state, make_blueprint
from fastweights.training.step import compile_step, place_batch
from runs import TINY

STEPS = 3


# One attention layer compiles in a fraction of the time; for what does not depend on the mixer.
PLAIN = ("model.pattern=A", "model.num_layers=1")


@functools.cache
def tiny(*overrides: str) -> config_lib.Config:
    return config_lib.load(TINY, overrides)


@functools.cache
def build(config: config_lib.Config, devices: int):
    """Compiled step, a function that makes a fresh state, and mesh of a config."""
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:devices])
    tx = optim.make_optimizer(config.optim, config.steps)
    blueprint = make_blueprint(config.model, tx, mesh)
    compiled = compile_step(config, blueprint, tx, mesh)
    return compiled, lambda: init_state(config.model, tx, blueprint, config.seed), mesh


def setup(config: config_lib.Config, devices: int = 1):
    """Compiled step, fresh state and mesh of a config."""
    compiled, fresh, mesh = build(config, devices)
    return compiled, fresh(), mesh


@functools.cache
def train(config: config_lib.Config, devices: int = 1) -> tuple[list[dict], dict]:
    """Metrics of the first steps, and the parameters after them, as NumPy."""
    compiled, state, mesh = setup(config, devices)
    dataset = train_dataset(config.data, seed=config.seed, rows=config.batch_size)
    history = []
    for step in range(STEPS):
        state, metrics = compiled(state, place_batch(dataset[step], mesh))
        history.append(jax.device_get(metrics))
    return history, jax.device_get(state["params"])


def assert_same_training(config, other, *, devices=1, other_devices=1, rtol=1e-5):
    history, params = train(config, devices)
    other_history, other_params = train(other, other_devices)
    for ours, theirs in zip(history, other_history, strict=True):
        for name in ("loss", "accuracy", "grad_norm", "target_tokens", "z"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=rtol, err_msg=name)
    jax.tree.map(
        # Adam divides by the gradient's size, so rounding in a tiny gradient shows at lr's scale.
        lambda a, b: np.testing.assert_allclose(a, b, atol=0.02 * config.optim.lr),
        params,
        other_params,
    )


# Each axis of a mesh is cut in one of them.
MESHES = [("mesh.data=2", "mesh.fsdp=4"), ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=4")]
SLICES = ("mesh.data=2", "mesh.sequence=4")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_eight_devices_train_as_one(mesh):
    assert_same_training(tiny(), tiny(*mesh), other_devices=8)


def test_slices_of_rows_train_as_whole_rows():
    """Targets behind the border of a slice, microbatches, pieces of the loss, answers alone."""
    slices = (*SLICES, "accum_steps=4", "loss_chunk=3")
    assert_same_training(tiny(*PLAIN), tiny(*PLAIN, *slices), other_devices=8)
    assert tiny().data.answers(None) < tiny().data.length, "logits are made for all tokens"


@pytest.mark.parametrize(
    ("mesh", "tied"), [(MESHES[0], True), (MESHES[1], True), (SLICES, True), (SLICES, False)]
)
def test_the_heads_gradient_is_summed_over_devices_once(mesh, tied):
    """And so is the embedding's, which is the same sum if they are one.

    Not for every piece of the loss: no collective in a loop is as large as a device's head.
    """
    options = ("loss_chunk=3", "model.vocab_size=512", f"model.tie_embeddings={tied}")
    config = tiny(*PLAIN, *mesh, *options)
    compiled, _, sizes = build(config, 8)
    head = config.model.d_model * config.model.vocab_size // sizes.shape["tensor"]
    collectives = [
        found
        for found in planning.instructions(compiled.as_text())
        if re.match("all-|reduce-scatter|collective", found.kind)
    ]
    pieces = [size for found in collectives if found.times > 1 for size in arrays(found.shape)]
    assert max(pieces, default=0) < head / sizes.shape["fsdp"]
    sums = [size for found in collectives if "reduce" in found.kind for size in arrays(found.shape)]
    assert sum(size >= head for size in sums) == (1 if tied else 2)


def arrays(text: str) -> list[int]:
    """Entries of each array in an HLO type."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", text)
    return [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]


def test_muon_trains_alike_on_a_mesh():
    muon = (*PLAIN, "optim.name=muon")
    assert_same_training(tiny(*muon), tiny(*muon, *MESHES[1]), other_devices=8)


def test_experts_train_alike_on_a_mesh():
    experts = (*PLAIN, "model.mlp=moe", "model.moe.num_experts=4", "model.moe.dim=8")
    experts += ("model.moe.shared_dim=8", "balance_loss=0.1")
    assert_same_training(tiny(*experts), tiny(*experts, *MESHES[1]), other_devices=8)


def test_a_decoder_trains_alike_on_a_mesh():
    """Its documents' last tokens lie on other devices than what it gives back."""
    decoder = (*PLAIN, "data.kind=compression", "model.decoder=positions")
    decoder += ("data.compression.train=((8,1.0),)", "data.compression.test=((8,),)")
    mesh = ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2", "mesh.sequence=2")
    assert_same_training(tiny(*decoder), tiny(*decoder, *mesh), other_devices=8)


def test_parameters_are_really_cut_over_the_mesh():
    _, state, _ = setup(tiny(*MESHES[1]), 8)
    kernel = state["params"]["groups"]["layer_0"]["mixer"]["qkv"]["q"]["kernel"]
    moment = state["opt"][1].mu["groups"]["layer_0"]["mixer"]["qkv"]["q"]["kernel"]
    for array in (kernel, moment):
        piece = array.sharding.shard_shape(array.shape)
        assert np.prod(array.shape) == 8 * np.prod(piece)


CUT = ("accum_steps=4", "loss_chunk=5")


@pytest.mark.parametrize("overrides", [CUT, ("model.remat=dots",)], ids=str)
def test_how_a_step_is_cut_does_not_change_it(overrides):
    assert_same_training(tiny(*PLAIN), tiny(*PLAIN, *overrides))


def test_accumulation_weighs_microbatches_by_their_target_tokens():
    """Rows of one document have more targets than rows cut short; a mean of means would differ."""
    history, _ = train(tiny(*PLAIN))
    config = tiny(*PLAIN, *CUT)
    dataset = train_dataset(config.data, seed=config.seed, rows=config.batch_size)
    counts = [(dataset[0]["targets"][i::4] >= 0).sum() for i in range(4)]
    assert len(set(counts)) > 1, "the microbatches are alike, so this test shows nothing"
    np.testing.assert_allclose(train(config)[0][0]["loss"], history[0]["loss"], rtol=1e-6)


def test_z_loss_pulls_the_log_partition_down():
    plain, _ = train(tiny(*PLAIN))
    pulled, _ = train(tiny(*PLAIN, "z_loss=1.0"))
    # The loss itself is reported without the penalty.
    np.testing.assert_allclose(pulled[0]["loss"], plain[0]["loss"], rtol=1e-6)
    assert pulled[0]["grad_norm"] > 1.5 * plain[0]["grad_norm"]
    assert pulled[-1]["z"] < plain[-1]["z"]


def test_the_compiled_step_refuses_another_shape():
    compiled, state, mesh = setup(tiny(*PLAIN))
    dataset = train_dataset(tiny().data, seed=0, rows=8)
    short = {name: rows[:4] for name, rows in dataset[0].items()}
    with pytest.raises(TypeError, match="compiled"):
        compiled(state, place_batch(short, mesh))


def test_a_step_that_is_not_finite_changes_nothing_and_names_the_gradients():
    config = tiny(*PLAIN)
    compiled, state, mesh = setup(config)
    kernel = state["params"]["groups"]["layer_0"]["mixer"]["out"]
    kernel["kernel"] = kernel["kernel"].at[0, 0, 0].set(jnp.nan)
    before = jax.device_get(state)
    dataset = train_dataset(config.data, seed=0, rows=config.batch_size)
    after, metrics = compiled(state, place_batch(dataset[0], mesh))
    assert not metrics["finite"]
    assert metrics["bad_gradients"].any()
    assert int(after["skipped"]) == 1 and int(after["step"]) == 1
    for part in ("params", "opt"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after[part]), before[part])


def test_state_spaces_learn_a_batch_beside_attention():
    model = ("model.pattern=MSA", "model.num_layers=3", "model.mlp=none")
    config = tiny(*model, "model.mixers.S.d_state=4", "optim.warmup_steps=0", "optim.lr=0.01")
    compiled, state, mesh = setup(config)
    batch = train_dataset(config.data, seed=config.seed, rows=config.batch_size)[0]
    losses = []
    for _ in range(8):
        state, metrics = compiled(state, place_batch(batch, mesh))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0], losses

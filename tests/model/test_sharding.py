"""Meshes, where parameters lie on them, and that eight devices compute what one does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tiny_models
from fastweights import model, sharding
from fastweights.errors import UserError
from fastweights.sharding import MeshConfig
from fastweights.training.loss import training_loss


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((-1, 1, 1), (8, 1, 1, 1)),
        ((2, -1, 2), (2, 2, 2, 1)),
        ((1, 2, 4), (1, 2, 4, 1)),
        ((1, 2, 1, -1), (1, 2, 1, 4)),
    ],
)
def test_mesh_shape(sizes, shape):
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    names = ("data", "fsdp", "tensor", "sequence")
    assert tuple(mesh.shape.items()) == tuple(zip(names, shape, strict=True))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((-1, 3, 1), r"Mesh \(-1, 3, 1, 1\) fixes 3 devices, which does not divide the 8 present"),
        ((2, 2, 1), r"Mesh \(2, 2, 1, 1\) takes 4 devices but 8 are present; set one axis to -1"),
        ((-1, -1, 1), r"Mesh \(-1, -1, 1, 1\) has more than one -1"),
        ((2, 2, 1, 3), r"Mesh \(2, 2, 1, 3\) takes 12 devices but 8 are present"),
        ((0, 1, 1), r"Mesh axis data is 0; give a positive number"),
    ],
)
def test_bad_meshes_are_refused(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        sharding.make_mesh(MeshConfig(*sizes))


def shardings(cfg, sizes):
    _, shapes, axes = model.abstract_model(cfg)
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    return mesh, sharding.param_shardings(axes, shapes, mesh)


def test_parameters_are_cut_by_their_logical_axes():
    _, specs = shardings(tiny_models.config("GA", 3, tie_embeddings=False), (2, 2, 2))
    group, tail = specs["groups"]["layer_0"], specs["tail"]["layer_0"]
    assert specs["embedding"].spec == PartitionSpec("tensor", "fsdp")
    assert specs["head"].spec == PartitionSpec("fsdp", "tensor")
    assert group["mixer"]["qkv"]["q"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert tail["mixer"]["qkv"]["q"]["kernel"].spec == PartitionSpec("fsdp", "tensor")
    assert tail["mixer"]["read_out"]["out"]["kernel"].spec == PartitionSpec("tensor", "fsdp")
    assert tail["mlp"]["down"]["kernel"].spec == PartitionSpec("tensor", "fsdp")
    assert tail["mixer"]["decay"]["A_log"].is_fully_replicated
    assert tail["mixer_norm"]["scale"].is_fully_replicated


def test_every_matrix_is_cut_and_every_small_parameter_is_whole():
    for letter in "AWLDGKNMS":
        _, specs = shardings(tiny_models.config(letter, 1), (2, 2, 2))
        for path, spec in jax.tree_util.tree_leaves_with_path(specs):
            is_matrix = path[-1].key in ("kernel", "embedding")
            assert spec.is_fully_replicated != is_matrix, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("overrides", "sizes", "sentence"),
    [
        (
            dict(vocab_size=17),
            (1, 1, 8),
            r"Parameter embedding cannot be cut: its dimension 0 \(vocab\) is 17, which mesh axis "
            r"'tensor' of size 8",
        ),
        (
            dict(d_model=12),
            (1, 8, 1),
            r"dimension 1 \(embed\) is 12, which mesh axis 'fsdp' of size 8",
        ),
        (
            dict(mlp_dim=20),
            (1, 1, 8),
            r"Parameter tail/layer_0/mlp/down/kernel .*\(mlp\) is 20, which mesh axis 'tensor'",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(overrides, sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        shardings(tiny_models.config("GA", 1, **overrides), sizes)


def test_two_axes_on_one_mesh_axis_are_refused():
    mesh = sharding.make_mesh(MeshConfig(1, 1, 8))
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    with pytest.raises(UserError, match=r"Parameter w puts two .*'heads' and 'mlp'.*'tensor'"):
        sharding.param_shardings({"w": ("heads", "mlp")}, shapes, mesh)
    with pytest.raises(UserError, match=r"Parameter w has the unknown logical axis 'hats'"):
        sharding.param_shardings({"w": ("hats", None)}, shapes, mesh)
    with pytest.raises(UserError, match=r"Parameter w has 2 dimensions but 1 logical axes"):
        sharding.param_shardings({"w": ("heads",)}, shapes, mesh)


def test_rows_that_do_not_divide_are_refused():
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    sharding.check_batch(8, mesh)
    with pytest.raises(UserError, match=r"6 rows cannot be cut over data x fsdp = 4 devices"):
        sharding.check_batch(6, mesh)
    with jax.set_mesh(mesh), pytest.raises(UserError, match=r"dimension 0 \(batch\) is 6"):
        sharding.constrain(jnp.zeros((6, 2)), "batch", None)


def test_tokens_are_cut_where_the_mesh_divides_them():
    """A run's rows must divide; evals have rows of other lengths, which stay whole."""
    mesh = sharding.make_mesh(MeshConfig(2, 1, 1, 4))
    sharding.check_batch(2, mesh, 12)
    with pytest.raises(UserError, match=r"Rows of 10 tokens cannot be cut over sequence = 4"):
        sharding.check_batch(2, mesh, 10)
    rows, cut = (PartitionSpec(("data", "fsdp"), *tokens) for tokens in ((), ("sequence",)))
    assert sharding.batch_sharding(mesh).spec == rows
    assert sharding.batch_sharding(mesh, 10).spec == rows
    assert sharding.batch_sharding(mesh, 12).spec == cut
    one = sharding.make_mesh(MeshConfig(8, 1, 1, 1))
    assert sharding.batch_sharding(one, 12).spec == rows
    with jax.set_mesh(mesh):
        for length, spec in ((10, rows), (12, cut)):
            x = sharding.constrain(jnp.zeros((2, length)), "batch", "tokens")
            assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)


def test_constrain():
    x = jnp.arange(16.0).reshape(8, 2)
    assert sharding.constrain(x, "batch", None) is x
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: sharding.constrain(x, "batch", "mlp"))(x)
    assert y.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")
    assert sharding.batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp"))
    assert sharding.replicated(mesh).is_fully_replicated


ROWS, TOKENS = 4, 16
# Attention last: its logits are float32 whatever the inputs are, and the layers behind it would
# make more of what is rounded there.
LETTERS = "WLDGKNSMA"


def packed_batch():
    """Rows of a few documents with padding between and around them, some tokens without target."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 4, (ROWS, TOKENS)), axis=1)
    ids[1, 6:10], ids[2, 3], ids[3] = 0, 0, 1
    return {
        "tokens": rng.integers(0, tiny_models.VOCAB, ids.shape),
        "targets": np.where(rng.random(ids.shape) < 0.8, rng.integers(0, 16, ids.shape), -1),
        "segment_ids": ids,
        "positions": np.tile(np.arange(TOKENS), (ROWS, 1)),
    }


def test_eight_devices_compute_what_one_does():
    """Loss, its sums and every gradient of a model with every letter, rows, weights and tokens cut.

    In float64: only then is any difference one of method. Short forms of the rules compile in half
    the time; `test_sequence_parallel` cuts the others. `test_step` trains on more meshes.
    """
    short = {
        letter: dataclasses.replace(getattr(tiny_models.MIXERS, letter), implementation="reference")
        for letter in "LDKNSM"
    }
    short["S"] = dataclasses.replace(short["S"], mode="diagonal")
    mixers = dataclasses.replace(tiny_models.MIXERS, **short)
    kinds = dict(dtype="float64", param_dtype="float64", mixers=mixers, mlp="none")
    with jax.enable_x64(True):
        cfg = tiny_models.config(LETTERS, len(LETTERS), **kinds)
        graphdef, shapes, axes = model.abstract_model(cfg)
        params, batch = tiny_models.noisy_params(cfg), packed_batch()

        def loss(params, batch):
            options = dict(loss_chunk=3, z_loss=0.1, total=jnp.float64(ROWS * TOKENS))
            return training_loss(model.bind(graphdef, params), batch, **options)

        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        expected = tiny_models.quick_jit(value_and_grad)(params, batch)
        mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2, sequence=2, data=1))
        where = sharding.param_shardings(axes, shapes, mesh)
        with jax.set_mesh(mesh):
            actual = tiny_models.quick_jit(
                value_and_grad,
                in_shardings=(where, sharding.batch_sharding(mesh, TOKENS)),
                out_shardings=(sharding.replicated(mesh), where),
            )(params, batch)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        scale = float(np.abs(e).max())
        np.testing.assert_allclose(
            a, e, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path)
        )

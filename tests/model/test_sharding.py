"""Meshes, where parameters lie on them, and that eight devices compute what one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tiny_models
from fastweights import model, sharding
from fastweights.errors import UserError
from fastweights.sharding import MeshConfig


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((-1, 1, 1), (8, 1, 1)), ((2, -1, 2), (2, 2, 2)), ((1, 2, 4), (1, 2, 4))],
)
def test_mesh_shape(sizes, shape):
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "tensor"), shape, strict=True))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((-1, 3, 1), r"Mesh \(-1, 3, 1\) fixes 3 devices, which does not divide the 8 present"),
        ((2, 2, 1), r"Mesh \(2, 2, 1\) takes 4 devices but 8 are present; set one axis to -1"),
        ((-1, -1, 1), r"Mesh \(-1, -1, 1\) has more than one -1"),
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


def test_constrain():
    x = jnp.arange(16.0).reshape(8, 2)
    assert sharding.constrain(x, "batch", None) is x
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: sharding.constrain(x, "batch", "mlp"))(x)
    assert y.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")
    assert sharding.batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp"))
    assert sharding.replicated(mesh).is_fully_replicated


@pytest.mark.parametrize(("pattern", "sizes"), [("GA", (1, 2, 4)), ("MS", (2, 2, 2))])
def test_eight_devices_compute_what_one_does(pattern, sizes):
    """Loss and every gradient, in float64: only then is any difference one of method.

    Packed rows, with two layers in a scanned group. `test_step` trains on more meshes.
    """
    with jax.enable_x64(True):
        mixers = tiny_models.replace_mixer("G", num_heads=2, head_dim=4, conv_size=2)
        cfg = tiny_models.config(pattern, 2, dtype="float64", param_dtype="float64", mixers=mixers)
        graphdef, shapes, axes = model.abstract_model(cfg)
        params = tiny_models.noisy_params(cfg)
        tokens = np.asarray(tiny_models.tokens((8, 9)))
        ids = np.where(np.arange(9) < np.arange(8)[:, None], 1, 2).astype(np.int32)

        def loss(params, tokens, ids):
            logits, _ = model.bind(graphdef, params)(tokens, segment_ids_BT=ids)
            log_p = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

        expected = tiny_models.quick_jit(jax.value_and_grad(loss))(params, tokens, ids)
        mesh = sharding.make_mesh(MeshConfig(*sizes))
        where = sharding.param_shardings(axes, shapes, mesh)
        rows = sharding.batch_sharding(mesh)
        with jax.set_mesh(mesh):
            step = tiny_models.quick_jit(
                jax.value_and_grad(loss),
                in_shardings=(where, rows, rows),
                out_shardings=(sharding.replicated(mesh), where),
            )
            actual = step(params, tokens, ids)
        for (path, a), e in zip(
            jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
        ):
            # Softmax attention takes its logits in float32 whatever the inputs are.
            scale = float(np.abs(e).max())
            np.testing.assert_allclose(
                a, e, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path)
            )

"""Folders of published models go in and come out: the same function, then the same bytes."""

import dataclasses
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import published
import tiny_models
from fastweights import interop, mixers, sharding
from fastweights.errors import UserError
from fastweights.interop import safetensors

ALL = published.PUBLISHED + published.GEOMETRIES
by_name = {"ids": lambda folder: folder.name}


@pytest.mark.parametrize("folder", published.GEOMETRIES, **by_name)
def test_logits_of_other_geometries(folder):
    case = published.read(folder)
    logits = case.logits(case.params, case.reference["input_ids"])
    published.close(logits, case.reference["logits"])


def assert_given_back(source, params, config, tmp_path) -> None:
    """Exports, from what an import has written down, the folder that `source` was read from."""
    interop.save_record(source, tmp_path)
    record = interop.load_record(tmp_path)
    assert record is not None
    interop.export_imported(params, config, record, tmp_path / "out")
    published.assert_same_folder(tmp_path / "out", source.folder)


@pytest.mark.parametrize("folder", ALL, **by_name)
def test_export_gives_back_what_was_imported(folder, tmp_path):
    """Every tensor byte for byte, with its name and dtype, what was kept aside among them."""
    case = published.read(folder)
    assert_given_back(case.source, case.params, case.config, tmp_path)


def rename(folder: pathlib.Path, out: pathlib.Path, change, metadata=None) -> pathlib.Path:
    """A copy of a folder of one file with other names, and perhaps another tag."""
    out.mkdir()
    (out / "config.json").write_text((folder / "config.json").read_text())
    file = safetensors.File(folder / "model.safetensors")
    names = {change(name): name for name in file.entries}
    entries = {new: file.entries[old] for new, old in names.items()}
    safetensors.write(
        out / "model.safetensors",
        entries,
        file.metadata if metadata is None else metadata,
        lambda name: file.read(names[name]),
    )
    return out


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model." + 3 * "language_model."])
def test_any_prefix_is_read_and_given_back(prefix, tmp_path):
    folder = published.DATA / "geometries" / "qwen3_5_irregular"
    source = interop.open_checkpoint(
        rename(folder, tmp_path / "in", lambda name: name.replace("model.", prefix))
    )
    case = published.read(folder)
    assert source.published.keys() == case.source.published.keys()
    assert_given_back(source, case.params, case.config, tmp_path)


def test_a_tied_head_that_is_written_out_is_given_back(tmp_path):
    case = published.read(published.DATA / "geometries" / "mamba")
    folder = rename(case.source.folder, tmp_path / "in", lambda name: name)
    file = case.source.files["model.safetensors"]
    embedding = "backbone.embeddings.weight"
    entries = file.entries | {"lm_head.weight": file.entries[embedding]}
    safetensors.write(
        folder / "model.safetensors",
        entries,
        file.metadata,
        lambda name: file.read(embedding if name == "lm_head.weight" else name),
    )
    source = interop.open_checkpoint(folder)
    assert source.model == case.source.model
    assert_given_back(source, case.params, case.config, tmp_path)


def test_what_mlx_writes_is_told_by_its_tag(tmp_path):
    """It adds the one to norms that are centred elsewhere and puts a convolution's one last."""
    case = published.read(published.DATA / "geometries" / "qwen3_5_irregular")
    file = case.source.files["model.safetensors"]
    centred = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")

    def tensor(name):
        name = name.removeprefix("language_model.")
        x = file.read(name)
        if name.endswith(centred):
            return x.astype(np.float32) + 1
        return np.moveaxis(x, 1, 2) if name.endswith("conv1d.weight") else x

    kinds = {np.dtype(np.float32): "F32", np.dtype(jnp.bfloat16): "BF16"}
    entries = {}
    for name in file.entries:
        x = tensor(name)
        entries[f"language_model.{name}"] = safetensors.Entry(kinds[x.dtype], x.shape)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_bytes((case.source.folder / "config.json").read_bytes())
    path = tmp_path / "in" / "model.safetensors"
    safetensors.write(path, entries, {"format": "mlx"}, tensor)
    source = interop.open_checkpoint(tmp_path / "in")
    params = interop.load_params(source, case.config, published.one_device())
    jax.tree.map(np.testing.assert_array_equal, params, case.params)
    assert_given_back(source, params, case.config, tmp_path)
    # Without the tag the numbers are not asked; the convolution's shape does not fit.
    safetensors.write(path, entries, {}, tensor)
    with pytest.raises(UserError, match=r"conv1d.weight' has shape \[58, 3, 1\] where"):
        interop.open_checkpoint(tmp_path / "in")


def test_reading_holds_one_tensor_at_a_time(tmp_path):
    """Twelve layers of 1.3 MB: NumPy never holds much more than its largest tensor."""
    mixer = mixers.Mamba2Config(num_heads=8, head_dim=16, value_head_dim=64)
    config = tiny_models.config(
        "N", 12, mlp="none", d_model=256, mixers=mixers.MixerConfigs(N=mixer)
    )
    params = tiny_models.noisy_params(config)
    interop.export_new(params, config, tmp_path / "out", "bfloat16")
    source = interop.open_checkpoint(tmp_path / "out")
    largest = max(e.nbytes for file in source.files.values() for e in file.entries.values())
    tracemalloc.start()
    loaded = interop.load_params(source, source.model, published.one_device())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
    # In float32 each takes twice its bytes in the file; the rest is what tracing programs takes.
    assert peak < 2 * largest + 4_000_000 < total / 2


def test_parameters_are_cut_over_the_mesh_and_may_be_narrow():
    """Matrices in bfloat16 hold the same numbers, and gates stay wide."""
    case = published.read(published.DATA / "geometries" / "qwen3_5_irregular")
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=2))
    narrow = dataclasses.replace(case.config, param_dtype="bfloat16")
    params = interop.load_params(case.source, narrow, mesh)
    jax.tree.map(np.testing.assert_array_equal, params, case.params)
    layer = params["groups"]["layer_1"]
    kernel = layer["mlp"]["up"]["kernel"]
    assert kernel.shape == (1, 32, 40) and kernel.dtype == jnp.bfloat16
    assert kernel.addressable_shards[0].data.shape == (1, 16, 20)
    assert layer["mixer"]["decay"]["A_log"].dtype == jnp.float32
    assert layer["mixer"]["read_out"]["norm"]["scale"].dtype == jnp.float32

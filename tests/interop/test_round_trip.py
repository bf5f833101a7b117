"""Folders of published models go in and come out: the same function, then the same bytes."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import published
from fastweights import interop, sharding
from fastweights.interop import safetensors

ALL = published.PUBLISHED + published.GEOMETRIES
by_name = {"ids": lambda folder: folder.name}


@pytest.mark.parametrize("folder", published.GEOMETRIES, **by_name)
def test_logits_of_other_geometries(folder):
    case = published.read(folder)
    logits = case.logits(case.params, case.reference["input_ids"])
    published.close(logits, case.reference["logits"])


@pytest.mark.parametrize("folder", ALL, **by_name)
def test_export_gives_back_what_was_imported(folder, tmp_path):
    """Every file byte for byte: tensors, names, dtypes, their order, what was kept aside."""
    case = published.read(folder)
    interop.save_record(case.source, tmp_path)
    record = interop.load_record(tmp_path)
    interop.export_imported(case.params, case.config, record, tmp_path / "out")
    published.assert_same_folder(tmp_path / "out", folder)


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
        lambda name: file.raw(names[name]),
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
    interop.save_record(source, tmp_path)
    record = interop.load_record(tmp_path)
    interop.export_imported(case.params, case.config, record, tmp_path / "out")
    published.assert_same_folder(tmp_path / "out", tmp_path / "in")


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

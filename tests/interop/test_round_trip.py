"""Folders of published models go in and come out: the same function, then the same bytes."""

import dataclasses
import pathlib

import jax
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


def test_parameters_are_cut_over_the_mesh_as_they_are_read():
    case = published.read(published.DATA / "published" / "tiny_qwen3_next")
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=2))
    params = interop.load_params(case.source, case.config, mesh)
    jax.tree.map(np.testing.assert_array_equal, params, case.params)
    kernel = params["groups"]["layer_0"]["mlp"]["up"]["kernel"]
    whole = kernel.shape
    assert kernel.addressable_shards[0].data.shape == (*whole[:2], whole[2] // 2, whole[3] // 2)


def test_a_narrower_parameter_dtype_keeps_gates_wide():
    case = published.read(published.DATA / "geometries" / "qwen3_5_irregular")
    narrow = dataclasses.replace(case.config, param_dtype="bfloat16")
    params = interop.load_params(case.source, narrow, published.one_device())
    mixer = params["groups"]["layer_1"]["mixer"]
    assert str(mixer["qkv"]["q"]["kernel"].dtype) == "bfloat16"
    assert str(mixer["decay"]["A_log"].dtype) == "float32"
    assert str(mixer["read_out"]["norm"]["scale"].dtype) == "float32"

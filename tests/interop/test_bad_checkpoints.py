"""What can't be read is refused in one sentence that names the file, field or tensor."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

import import_hf
import published
from fastweights import interop
from fastweights.errors import UserError
from fastweights.interop import safetensors
from fastweights.interop.safetensors import Entry

GEOMETRIES = published.DATA / "geometries"
SHARD = "model.safetensors-00002-of-00003.safetensors"


def edit_config(text=False, **fields):
    """Sets fields, of the text model's part with `text`; None removes one."""

    def edit(folder):
        path = folder / "config.json"
        tree = json.loads(path.read_text())
        holder = tree["text_config"] if text else tree
        for name, value in fields.items():
            holder[name] = value
        path.write_text(json.dumps(tree))

    return edit


def edit_tensors(file="model.safetensors", *, drop=(), **changed):
    """Drops tensors, and sets others to (name, entry); `__` in a keyword stands for a dot."""
    changed = {name.replace("__", "."): told for name, told in changed.items()}

    def edit(folder):
        old = safetensors.File(folder / file)
        entries = {n: e for n, e in old.entries.items() if n not in drop} | changed
        kinds = safetensors.DTYPES | safetensors.OTHERS
        data = {n: np.zeros(e.shape, kinds[e.dtype]) for n, e in changed.items()}
        data |= {n: old.read(n) for n in entries if n not in changed}
        safetensors.write(folder / file, entries, old.metadata, lambda name: data[name])

    return edit


def edit_header(old, new):
    """Replaces what a header says and leaves the tensors as they lie."""

    def edit(folder):
        path = folder / "model.safetensors"
        contents = path.read_bytes()
        end = 8 + int.from_bytes(contents[:8], "little")
        header = contents[8:end].replace(old.encode(), new.encode())
        assert header != contents[8:end]
        path.write_bytes(len(header).to_bytes(8, "little") + header + contents[end:])

    return edit


def both(first, second):
    return lambda folder: (first(folder), second(folder))


def truncate(file, keep):
    def edit(folder):
        contents = (folder / file).read_bytes()
        (folder / file).write_bytes(contents[: int(len(contents) * keep)])

    return edit


def overwrite(file, text):
    return lambda folder: (folder / file).write_text(text)


def edit_index(name, file):
    def edit(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][name] = file
        path.write_text(json.dumps(index))

    return edit


MAMBA = [
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    (overwrite("config.json", "{"), "config.json' is not valid JSON"),
    (overwrite("config.json", "[]"), "is no JSON object"),
    (edit_config(model_type="gpt2"), "model_type='gpt2', which is not supported; known: qwen3_5_t"),
    (edit_config(model_type=[]), r"model_type=\[\], which is not supported"),
    (edit_config(tie_word_embeddings="no"), "tie_word_embeddings='no'; write a boolean"),
    (edit_config(hidden_act="gelu"), "hidden_act='gelu', which is not supported"),
    (edit_config(use_bias=True), "use_bias=True, which is not supported"),
    (edit_config(hidden_size="32"), "hidden_size='32'; it must be an integer"),
    (edit_config(hidden_size=0), "hidden_size=0; it must be an integer of at least 1"),
    (edit_config(layer_norm_epsilon=0), "layer_norm_epsilon=0; it must be a positive number"),
    (edit_config(hidden_size=16), r"\[260, 32\] where config.json asks for \[260, 16\]"),
    (edit_config(num_hidden_layers=3), "has no tensor 'layers.2.norm.weight', which its config"),
    (edit_config(num_hidden_layers=1), "has 10 tensors that Mamba does not have, such as 'backbo"),
    (
        edit_config(quantization_config={"quant_method": "gptq"}),
        "quantization_config={'quant_method': 'gptq'}: packed or quantised",
    ),
    (lambda folder: (folder / "model.safetensors").unlink(), "has neither .*index.json nor model"),
    (truncate("model.safetensors", 0.8), "in/model.safetensors' is damaged .*file not fully cov"),
    (truncate("model.safetensors", 0.001), "damaged .*invalid header length"),
    (overwrite("model.safetensors", "no"), "damaged or no safetensors file .*header too small"),
    (edit_header('"F32"', '"F33"'), "damaged or no safetensors file .*unknown variant `F33`"),
    (edit_header("[64,5]", "[64,7]"), "damaged or no safetensors file .*invalid shape"),
    (
        edit_tensors(backbone__layers__0__mixer__A_log=Entry("F32", (5, 64))),
        r"A_log' has shape \[5, 64\] where config.json asks for \[64, 5\]",
    ),
    (
        edit_tensors(backbone__layers__0__mixer__A_log=Entry("U8", (64, 5))),
        "tensor 'backbone.layers.0.mixer.A_log' has dtype U8, so it is packed or quantised",
    ),
    (
        both(
            edit_tensors(backbone__layers__0__mixer__A_log=Entry("U8", (64, 5))),
            edit_header('"U8"', '"F8_E4M3"'),
        ),
        "tensor 'backbone.layers.0.mixer.A_log' has dtype F8_E4M3, so it is packed or quantised",
    ),
    (
        edit_tensors(backbone__layers__1__mixer__in_proj__qweight=Entry("I32", (4, 4))),
        "is packed or quantised .tensor 'backbone.layers.1.mixer.in_proj.qweight'",
    ),
    (
        edit_tensors(drop=["backbone.layers.1.mixer.D"]),
        "has no tensor 'layers.1.mixer.D', which its config.json asks for",
    ),
    (
        edit_tensors(backbone__layers__0__mixer__in_proj__bias=Entry("F32", (4,))),
        "has 1 tensors that Mamba does not have, such as 'backbone.layers.0.mixer.in_proj.bias'",
    ),
    (
        edit_tensors(layers__0__norm__weight=Entry("F32", (32,))),
        "which are the same tensor; remove one",
    ),
    (
        edit_tensors(lm_head__weight=Entry("BF16", (260, 32))),
        "tie_word_embeddings.*, but 'lm_head.weight' differs from it",
    ),
]
VISION = [
    (
        lambda folder: (folder / SHARD).unlink(),
        f"index.json' names the file '{SHARD}', which is no",
    ),
    (edit_index("model.norm.weight", "gone.safetensors"), "names the file 'gone.safetensors'"),
    (edit_index("model.norm.weight", "../x.safetensors"), "which is not in the same folder"),
    (edit_index("model.norm.weight", SHARD), "puts tensor 'model.norm.weight' in '.*not hold it"),
    (edit_tensors(SHARD, extra=Entry("F32", (1,))), "holds tensor 'extra', which .* not know of"),
    (edit_config(text=True, attention_bias=True), "attention_bias=True, which is not supported"),
    (edit_config(text=True, output_gate_type="sigmoid"), "output_gate_type='sigmoid', which is n"),
    (edit_config(text=True, attn_output_gate=False), "attn_output_gate=False, which is not supp"),
    (
        edit_config(text=True, rope_parameters={"rope_type": "yarn"}),
        "rope_type='yarn' in rope_parameters, which is",
    ),
    (
        edit_config(text=True, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "rope_type='yarn' in rope_scaling",
    ),
    (
        edit_config(text=True, rope_parameters={"rope_type": "default", "type": "linear"}),
        "'linear'",
    ),
    (edit_config(text=True, layer_types=[["full_attention"]] * 3), "layer type"),
    (edit_config(text=True, rope_parameters=3), "rope_parameters=3; it must be an object"),
    (edit_config(text=True, layer_types=["full_attention"]), "layer_types for 1 layers but num_h"),
    (edit_config(text=True, layer_types=3), "layer_types=3; it must be a list"),
    (edit_config(text_config=3), "text_config=3; it must be an object"),
    (edit_config(text=True, layer_types=["mamba"] * 3), "the layer type 'mamba', which is not"),
    (
        edit_config(text=True, linear_num_key_heads=4),
        "num_heads is 6, which num_qk_heads 4 does no",
    ),
]
SPARSE = [(edit_config(mlp_only_layers=3), "mlp_only_layers=3; it must be a list of layers")]
CASES = [
    (name, *case)
    for name, cases in (("mamba", MAMBA), ("qwen3_5_vision", VISION), ("qwen3_next_sparse", SPARSE))
    for case in cases
]


@pytest.mark.parametrize(("name", "edit", "told"), CASES, ids=[case[2][:40] for case in CASES])
def test_it_is_refused(name, edit, told, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(GEOMETRIES / name, folder)
    edit(folder)
    with pytest.raises(UserError, match=told) as caught:
        interop.open_checkpoint(folder)
    assert "\n" not in str(caught.value) and re.search(r"[;:]", str(caught.value))


def test_nothing_is_written_of_what_is_refused(tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(GEOMETRIES / "mamba", folder)
    truncate("model.safetensors", 0.5)(folder)
    with pytest.raises(UserError, match="damaged"):
        import_hf.main([str(folder), "--workdir", str(tmp_path / "run")])
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_error_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(interop, "save_record", fail)
    with pytest.raises(UserError, match=r"Writing '.*run' failed .*No space left"):
        import_hf.main([str(GEOMETRIES / "mamba"), "--workdir", str(tmp_path / "run")])
    assert not list(tmp_path.iterdir())


def test_parameters_too_narrow_for_a_tensor_are_refused():
    source = interop.open_checkpoint(published.DATA / "published" / "tiny_mamba2")
    narrow = dataclasses.replace(source.model, param_dtype="bfloat16")
    with pytest.raises(UserError, match=r"is float32, which bfloat16 parameters cannot hold; set"):
        interop.load_params(source, narrow, published.one_device())


@pytest.mark.parametrize("scale", ["rope_scaling", "rope_parameters"])
def test_older_configs_say_the_same(scale, tmp_path):
    """A base at the top level, null where there is nothing to scale; the interval for the list."""
    folder = tmp_path / "in"
    shutil.copytree(GEOMETRIES / "qwen3_5_vision", folder)
    edit_config(
        text=True,
        rope_parameters=None,
        rope_theta=5e5,
        partial_rotary_factor=0.5,
        layer_types=None,
        full_attention_interval=2,
        **({"rope_scaling": None} if scale == "rope_scaling" else {}),
    )(folder)
    before = interop.open_checkpoint(GEOMETRIES / "qwen3_5_vision")
    assert interop.open_checkpoint(folder).model == before.model

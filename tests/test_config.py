"""Configs: every file builds, names and types are checked, JSON gives the same config back."""

import dataclasses
import pathlib

import pytest

from fastweights import config as config_lib
from fastweights.config import Config
from fastweights.data import check_vocab, vocab_size
from fastweights.errors import UserError
from fastweights.model import abstract_model
from runs import ROOT, TINY

FILES = sorted((ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize(
    "spec",
    [
        *map(str, FILES),
        f"{ROOT}/configs/mqar.py:pattern=GG",
        f"{ROOT}/configs/lm.py:size=150m,pattern=GGGGGGGA",
        f"{ROOT}/configs/lm.py:size=400m",
        TINY,
    ],
    ids=lambda spec: pathlib.Path(spec).name,
)
def test_every_config_builds_a_model_for_its_data(spec):
    config = config_lib.load(spec)
    abstract_model(config.model)
    check_vocab(vocab_size(config.data), config.model.vocab_size)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_says_how_to_run_it(path):
    text = path.read_text()
    script = "scripts/sweep.py" if "def sweep(" in text else "train.py"
    assert f"python {script} --config configs/{path.name} --workdir" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_config_ignores_its_argument(path):
    with pytest.raises(UserError, match="config argument 'nonesuch' does not exist"):
        config_lib.load(f"{path}:nonesuch")


def test_a_config_argument_without_its_value_says_how_to_give_one():
    with pytest.raises(UserError, match=r"'size' has no value; write size=VALUE, .* size=tiny"):
        config_lib.load(f"{ROOT}/configs/lm.py:size")


def test_json_gives_the_same_config_back():
    config = config_lib.load(TINY, ["optim.lr=0.25", "data.mqar.train=((8, 2, 1),)"])
    assert config_lib.from_json(config_lib.to_json(config)) == config


def test_a_field_added_since_a_config_was_stored_has_its_default():
    tree = config_lib.flat(Config())
    assert "z_loss" in tree
    assert config_lib.freeze({"steps": 7}) == dataclasses.replace(Config(), steps=7)


def test_differences_name_the_leaves():
    one, other = config_lib.load(TINY), config_lib.load(TINY, ["optim.lr=0.5", "log.every=7"])
    assert config_lib.differences(one, other) == {"optim.lr": (1e-3, 0.5), "log.every": (1, 7)}


@pytest.mark.parametrize(
    "name, safe",
    [("steps", True), ("log.every", True), ("mesh.fsdp", True), ("optim.lr", False),
     ("seed", False), ("batch_size", False), ("data.length", False), ("loss_chunk", False)],
)  # fmt: skip
def test_only_fields_that_leave_the_state_and_data_alone_are_safe(name, safe):
    assert name in config_lib.flat(Config())
    assert config_lib.is_safe(name) == safe


def test_every_safe_entry_names_a_field():
    names = config_lib.flat(Config())
    for entry in config_lib.SAFE:
        assert any(n == entry or n.startswith(entry) for n in names), entry


@pytest.mark.parametrize(
    "arg, expected",
    [
        (None, {"size": "s", "width": 3, "small": False}),
        ("small", {"size": "s", "width": 3, "small": True}),
        ("size=m,width=4", {"size": "m", "width": 4, "small": False}),
        ("small=false,size=x=y", {"size": "x=y", "width": 3, "small": False}),
    ],
)
def test_config_arguments_take_the_type_of_their_default(arg, expected):
    parsed = config_lib.parse_arg(arg, size="s", width=3, small=False)
    assert parsed.to_dict() == expected


@pytest.mark.parametrize(
    "arg, told", [("widht=4", "did you mean 'width'"), ("width=x", "type int")]
)
def test_bad_config_arguments_are_named(arg, told):
    with pytest.raises(UserError, match=told):
        config_lib.parse_arg(arg, size="s", width=3)


@pytest.mark.parametrize(
    "field, told",
    [
        ("mesh.pipeline=2", "known: mesh.data, mesh.fsdp, mesh.sequence, mesh.tensor."),
        ("pipeline=2", "known: accum_steps, balance_loss, batch_size, checkpoint, data,"),
        ("log.zzz.qqqqqq=2", "known: log.every, log.profile_start"),
    ],
)
def test_of_a_field_like_no_other_what_its_group_has_is_told(field, told):
    with pytest.raises(UserError) as caught:
        config_lib.load(TINY, [field])
    assert told in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "tree, told",
    [
        ({"step": 3}, "'step' does not exist; did you mean 'steps'"),
        ({"steps": 2.5}, "'steps' takes a value of type int, got 2.5"),
        ({"steps": True}, "'steps' takes a value of type int, got True"),
        ({"model": 3}, "'model' is 3; it must be a group of fields"),
        ({"model": {"d_model": "wide"}}, "'model.d_model' takes a value of type int, got 'wide'"),
    ],
)
def test_a_stored_config_of_wrong_names_or_types_is_refused(tree, told):
    with pytest.raises(UserError) as caught:
        config_lib.freeze(tree)
    assert told in str(caught.value)


def test_an_integer_serves_where_a_float_is_asked():
    config = config_lib.freeze({"z_loss": 1})
    assert config.z_loss == 1.0 and type(config.z_loss) is float

"""Runs trained as one program are the runs that train.py would make of them."""

import functools
import itertools
import json
import types

import numpy as np
import pytest

import train
from fastweights import config as config_lib
from fastweights.errors import UserError
from fastweights.training import group, metrics, run_folder
from runs import TINY, assert_same_run, final_state, read_losses, train_command

FIELDS = (
    "data.on_device=true", "data.mqar.train=((16,3,1.0),)", "model.pattern=A", "eval.every=4",
    "model.num_layers=1", "optim.clip_norm=0.0",
)  # fmt: skip
POINTS = {"a": ("seed=0",), "b": ("seed=1", "optim.lr=0.003"), "c": ("seed=0", "optim.lr=1e30")}


def members(folder, *more, points=POINTS):
    return {
        folder / name: config_lib.load(TINY, [*FIELDS, *fields, *more])
        for name, fields in points.items()
    }


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """Groups of equal members share a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "make_program", functools.cache(group.make_program))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    assert group.train(folder / "group", members(folder), lambda step: False)
    return folder


def evaluated(folder):
    return json.loads((folder / "evals/recall-12.json").read_text())


def test_a_member_is_the_run_that_train_makes(trained, tmp_path):
    assert train.main(train_command(tmp_path, *FIELDS, *POINTS["b"])[1:]) == 0
    alone, member = read_losses(tmp_path), read_losses(trained / "b")
    assert alone.keys() == member.keys() == set(range(1, 13))
    np.testing.assert_allclose(list(member.values()), list(alone.values()), rtol=1e-5)
    for name, array in final_state(tmp_path).items():
        if not name.startswith("params") or name.endswith("embedding"):
            continue
        np.testing.assert_allclose(
            final_state(trained / "b")[name], array, rtol=1e-3, atol=1e-5, err_msg=name
        )
    for one, other in zip(
        evaluated(tmp_path)["rows"], evaluated(trained / "b")["rows"], strict=True
    ):
        assert one["nll"] == pytest.approx(other["nll"], rel=1e-4)
    # Another rate and seed make another run.
    assert max(abs(read_losses(trained / "a")[s] - member[s]) for s in member) > 0.01


def test_a_member_that_diverges_says_so_and_stops_no_other(trained):
    assert run_folder.failure(trained / "c").startswith("not finite at step ")
    assert not run_folder.is_done(trained / "c")
    assert max(read_losses(trained / "c"), default=0) < 12
    for name in "ab":
        assert run_folder.is_done(trained / name) and not run_folder.failure(trained / name)


def test_members_side_by_side_leave_those_behind_that_have_ended(trained, tmp_path, monkeypatch):
    """As on a GPU: two of four diverge, and the others end as they do one after the other."""
    monkeypatch.setattr(group, "_side_by_side", lambda: True)
    widths, make = [], group.make_program.__wrapped__

    def watched(config, size):
        program = make(config, size)

        def advance(*args):
            widths.append(len(args[-1]))
            return program.advance(*args)

        return program._replace(advance=advance)

    monkeypatch.setattr(group, "make_program", watched)
    points = {
        "c": POINTS["c"],
        "a": POINTS["a"],
        "d": ("seed=1", "optim.lr=1e30"),
        "b": POINTS["b"],
    }
    assert group.train(tmp_path / "group", members(tmp_path, points=points), lambda step: False)
    assert widths == sorted(widths, reverse=True) and set(widths) == {4, 2}
    for name in "ab":
        alone, beside = read_losses(trained / name), read_losses(tmp_path / name)
        assert alone.keys() == beside.keys()
        np.testing.assert_allclose(list(beside.values()), list(alone.values()), rtol=1e-5)
        assert evaluated(tmp_path / name)["step"] == evaluated(trained / name)["step"]
    for name in "cd":
        assert run_folder.failure(tmp_path / name).startswith("not finite at step ")


def test_a_group_stopped_twice_ends_as_one_that_was_not(trained, tmp_path, monkeypatch):
    # A step takes two looks at a clock that goes on by 3 seconds each.
    clock = itertools.count(step=3)
    monkeypatch.setattr(group, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    for last in (5, 9):

        def stop(step: int, last: int = last) -> bool:
            return step >= last

        assert not group.train(tmp_path / "group", members(tmp_path), stop)
    assert group.train(tmp_path / "group", members(tmp_path), lambda step: False)
    for name in "ab":
        assert_same_run(tmp_path / name, trained / name)
        assert evaluated(tmp_path / name) == evaluated(trained / name)
        # Of the 6 seconds of a step each of three members has a share, and of two once `c` ended.
        records = metrics.read_metrics(tmp_path / name, "train")
        want = [2.0 * r["step"] + max(r["step"] - 3.0, 0.0) for r in records]
        assert [r["seconds"] for r in records] == want
    assert run_folder.failure(tmp_path / "c") == run_folder.failure(trained / "c")


def test_a_run_good_enough_ends_there_and_the_others_go_on(trained, tmp_path):
    recall = [
        {r["step"]: r["recall/mean"] for r in metrics.read_metrics(trained / name, "eval")}
        for name in "ab"
    ]
    # A limit that one of the runs reaches at step 8 and the other does not.
    best = int(recall[1][8] > recall[0][8])
    limit = recall[best][8]
    assert limit > max(recall[best][4], *recall[1 - best].values()), recall
    assert group.train(
        tmp_path / "group", members(tmp_path, f"eval.stop_at={limit}"), lambda step: False
    )
    ends = [max(read_losses(tmp_path / name)) for name in "ab"]
    assert ends[best] == 8 and ends[1 - best] == 12
    assert (tmp_path / "ab"[best] / "evals/recall-8.json").is_file()


@pytest.mark.parametrize(
    ("during", "found", "stops"),
    [
        ("recall", {"recall/mean": 0.8}, False),
        ("recall", {"recall/mean": 0.9}, True),
        ("recall", {"ablation/mean": 0.9}, False),
        ("recall,length", {"recall/mean": 0.9}, False),
        ("recall,length", {"recall/mean": 0.9, "length/mean": 0.5}, False),
        ("recall,length", {"recall/mean": 0.9, "length/mean": 0.9, "age/last": 0.1}, True),
    ],
)
def test_a_run_ends_where_all_that_it_is_asked_in_training_is_good_enough(during, found, stops):
    config = config_lib.load(TINY, [*FIELDS, "eval.stop_at=0.9", f"eval.during={during}"])
    assert config.eval.stops([found]) == stops


def test_train_ends_at_the_eval_that_is_good_enough(tmp_path, capsys):
    argv = train_command(tmp_path, *FIELDS, *POINTS["b"], "eval.stop_at=1e-9")[1:]
    assert train.main(argv) == 0
    ended = max(read_losses(tmp_path))
    assert ended < 12 and run_folder.is_done(tmp_path)
    assert "eval.stop_at 1e-09 is reached" in capsys.readouterr().out
    before = final_state(tmp_path)
    assert train.main(argv) == 0
    assert max(read_losses(tmp_path)) == ended
    np.testing.assert_array_equal(final_state(tmp_path)["step"], before["step"])


def test_members_that_have_too_little_in_common_are_refused(tmp_path):
    others = {
        "a": ("seed=0",),
        "b": ("seed=1", "batch_size=16"),
    }
    with pytest.raises(UserError, match="differ in more than seed and learning rate"):
        group.train(tmp_path / "group", members(tmp_path, points=others), lambda step: False)
    with pytest.raises(UserError, match=r"are no tasks with data\.on_device=true"):
        group.train(tmp_path / "group", members(tmp_path, "data.on_device=false"), lambda s: False)


def test_a_group_is_of_the_members_it_was_begun_with(trained):
    fewer = {path: config for path, config in members(trained).items() if path.name != "c"}
    with pytest.raises(UserError, match="holds a group of other runs"):
        group.train(trained / "group", fewer, lambda step: False)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (("data.kind=text", "eval.final=ppl", "eval.every=0"), "text is read on the host"),
        (("eval.stop_at=0.9", "eval.every=0"), "stop_at is 0.9 but the evals in training are"),
    ],
)
def test_options_that_contradict_each_other_are_named(fields, told):
    with pytest.raises(UserError, match=told):
        config_lib.load(TINY, [*FIELDS, *fields])

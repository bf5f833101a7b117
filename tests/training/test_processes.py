"""Processes of one device each train as one process does, and end together."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import runs
import train
from fastweights.training import processes

# One layer and one shape to evaluate: compiling is most of what a process costs here.
PLAIN = (
    "model.pattern=A",
    "model.num_layers=1",
    "model.mlp=none",
    "data.mqar.test=((16,3),)",
)
# When step 40 is logged and one is killed, the checkpoint of step 15 is whole, for the save at step
# 30 has waited for it, and the end is far.
LONG = ("checkpoint.every=15", "steps=56")


def start(
    workdir: pathlib.Path, count: int, *overrides: str, devices: int = 1
) -> list[subprocess.Popen[str]]:
    """A run of so many processes that notice within eight seconds that one is dead."""
    address = f"127.0.0.1:{runs.free_port()}"
    together = ["--multihost", "--coordinator", address, "--num_processes", count, "--silence", 8]
    command = runs.train_command(workdir, *PLAIN, *overrides)
    each = [(*command, *together, "--process_id", index) for index in range(count)]
    return [runs.start(*one, devices=devices) for one in each]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[pathlib.Path, list[str]]:
    """A run that two processes finish undisturbed, and what each printed."""
    workdir = tmp_path_factory.mktemp("processes") / "two"
    ends = list(map(runs.finish, start(workdir, 2, *LONG)))
    assert [code for code, _ in ends] == [0, 0], ends
    return workdir, [output for _, output in ends]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> pathlib.Path:
    """The same run in one process."""
    workdir = tmp_path_factory.mktemp("processes") / "one"
    train.main(runs.train_command(workdir, *PLAIN, *LONG)[1:])
    return workdir


def assert_close_losses(workdir: pathlib.Path, other: pathlib.Path) -> None:
    ours, theirs = runs.read_losses(workdir), runs.read_losses(other)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)


def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint(
    two, one, tmp_path, capsys
):
    finished, (output, other_output) = two
    assert "process 1 of 2: 1 of 2 devices are here" in other_output
    assert "step 56/56" in output and "step 56/56" not in other_output
    assert_close_losses(finished, one)
    results = [
        json.loads((run / "evals" / "recall-56.json").read_text()) for run in (finished, one)
    ]
    assert results[0]["rows"][0]["answers"] == results[1]["rows"][0]["answers"]
    workdir = shutil.copytree(finished, tmp_path / "run")
    train.main(runs.train_command(workdir, *PLAIN, *LONG, "steps=59")[1:])
    assert "resuming from step 56" in capsys.readouterr().out
    assert sorted(runs.read_losses(workdir)) == list(range(1, 60))


def kill_one(processes: list[subprocess.Popen[str]], victim: int, workdir: pathlib.Path) -> None:
    """Kills a process at step 40; the others must name it, and end."""
    count = len(processes)
    runs.signal_at_step(processes[victim], workdir, 40, signal.SIGKILL)
    for index, (code, output) in enumerate(map(runs.finish, processes)):
        said = re.findall(r"^error: (process \d of \d has given no sign of life)", output, re.M)
        assert (code, said) == (
            (-signal.SIGKILL, []) if index == victim
            else (1, [f"process {victim} of {count} has given no sign of life"])
        ), output  # fmt: skip


def go_on(workdir: pathlib.Path, *overrides: str, devices: int = 1) -> None:
    """Two processes finish a killed run; what was trained before must come out again."""
    before = runs.read_losses(workdir)
    (code, output), _ = map(runs.finish, start(workdir, 2, *overrides, devices=devices))
    assert code == 0, output
    after = runs.read_losses(workdir)
    first = resumed_from(output)
    again = [step for step in before if step > first]
    assert first > 0 and len(again) >= 5, "it began anew, or trained nothing twice"
    assert {step: before[step] for step in again} == {step: after[step] for step in again}


def test_when_process_0_dies_the_other_names_it_and_a_restart_ends_bit_for_bit_alike(two, tmp_path):
    """Not only its losses: also parameters and optimiser state of the last checkpoint."""
    workdir = tmp_path / "run"
    kill_one(start(workdir, 2, *LONG), 0, workdir)
    go_on(workdir, *LONG)
    runs.assert_same_run(workdir, two[0])


def test_a_dead_process_of_four_is_named_and_two_go_on_bit_for_bit(one, tmp_path):
    """Four processes cut rows and tokens between them; two go on for the four.

    As many devices in the same order sum in the same order.
    """
    workdir, mesh = tmp_path / "four", ("mesh.data=2", "mesh.sequence=2")
    kill_one(start(workdir, 4, *LONG, *mesh), 2, workdir)
    go_on(workdir, *LONG, *mesh, devices=2)
    assert_close_losses(workdir, one)


def resumed_from(output: str) -> int:
    """The step that a run went on from."""
    found = re.search(r"resuming from step (\d+)", output)
    return int(found[1]) if found else 0


def test_sigterm_to_one_process_saves_and_ends_both(tmp_path):
    workdir = tmp_path / "run"
    processes = start(workdir, 2, "steps=100000", "checkpoint.every=100000")
    runs.signal_at_step(processes[1], workdir, 5, signal.SIGTERM)
    (code, output), (other_code, other_output) = map(runs.finish, processes)
    assert (code, other_code) == (0, 0), output + other_output
    assert "stopped by SIGTERM at step" in output
    assert len(list((workdir / "checkpoints").iterdir())) == 1


def test_an_abort_goes_on_once_process_0_is_known_to_live():
    """The process that aborts would else go on with its signs of life."""
    script = """
import os, types
from fastweights.training import processes
with processes._slow_abort(types.SimpleNamespace(await_life=lambda patience: None), 1000):
    os.abort()
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=runs.ROOT, timeout=60, check=False)
    assert ended.returncode == -signal.SIGABRT


def test_one_sign_of_life_may_be_from_before(tmp_path):
    path = tmp_path / "process-0"
    other = processes._Other(path)
    waiting = threading.Thread(target=other.await_life, args=(60,), daemon=True)
    waiting.start()
    for sign, goes_on in (("", True), ("1", True), ("2", False)):
        path.write_text(sign)
        assert other.cause_of_death(60) == ""
        waiting.join(0.5 if goes_on else 20)
        assert waiting.is_alive() == goes_on

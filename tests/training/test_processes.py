"""Processes of one device each train as one process does, and end together."""

import contextlib
import json
import pathlib
import re
import signal
import socket
import subprocess

import numpy as np
import pytest

import runs
import train
from fastweights.errors import UserError
from fastweights.training import processes

# One layer and one shape to evaluate: compiling is most of what a process costs here.
PLAIN = (
    "model.pattern=A",
    "model.num_layers=1",
    "model.mlp=none",
    "checkpoint.every=3",
    "data.mqar.test=((16,3),)",
)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    workdir: pathlib.Path, count: int, *overrides: str, devices: int = 1
) -> list[subprocess.Popen[str]]:
    """A run of so many processes that notice within eight seconds that one is dead."""
    address = f"127.0.0.1:{free_port()}"
    together = ["--multihost", "--coordinator", address, "--num_processes", count, "--silence", 8]
    command = runs.train_command(workdir, *PLAIN, *overrides)
    each = [(*command, *together, "--process_id", index) for index in range(count)]
    return [runs.start(*one, devices=devices) for one in each]


def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint(tmp_path, capsys):
    workdir = tmp_path / "two"
    (code, output), (other_code, other_output) = map(runs.finish, start(workdir, 2, "steps=6"))
    assert (code, other_code) == (0, 0), output + other_output
    assert "process 1 of 2: 1 of 2 devices are here" in other_output
    assert "step 6/6" in output and "step 6/6" not in other_output
    # The schedule ends with the steps, so the comparison runs to the same end from the start.
    short = tmp_path / "short"
    train.main(runs.train_command(short, *PLAIN, "steps=6")[1:])
    ours, theirs = runs.read_losses(workdir), runs.read_losses(short)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)
    results = [
        json.loads((run / "evals" / "recall-6.json").read_text()) for run in (workdir, short)
    ]
    assert results[0]["rows"][0]["answers"] == results[1]["rows"][0]["answers"]
    train.main(runs.train_command(workdir, *PLAIN, "steps=9")[1:])
    assert "resuming from step 6" in capsys.readouterr().out
    assert sorted(runs.read_losses(workdir)) == list(range(1, 10))


def test_a_dead_process_is_named_and_the_run_goes_on_bit_for_bit(tmp_path):
    """Four processes cut rows and tokens between them. One is killed; then two go on for the four.

    As many devices in the same order sum in the same order.
    """
    workdir, alone = tmp_path / "four", tmp_path / "one"
    mesh = ("mesh.data=2", "mesh.sequence=2", "checkpoint.every=20", "steps=44")
    processes = start(workdir, 4, *mesh)
    runs.signal_at_step(processes[2], workdir, 30, signal.SIGKILL)
    for index, (code, output) in enumerate(map(runs.finish, processes)):
        said = re.findall(r"^error: (process \d of 4 has given no sign of life)", output, re.M)
        assert (code, said) == (
            (-signal.SIGKILL, []) if index == 2
            else (1, ["process 2 of 4 has given no sign of life"])
        ), output  # fmt: skip
    before = runs.read_losses(workdir)
    (code, output), _ = map(runs.finish, start(workdir, 2, *mesh, devices=2))
    assert code == 0, output
    after = runs.read_losses(workdir)
    again = [step for step in before if step > resumed_from(output)]
    assert len(again) >= 5, "nothing was trained twice"
    assert {step: before[step] for step in again} == {step: after[step] for step in again}
    train.main(runs.train_command(alone, *PLAIN, "steps=44")[1:])
    theirs = runs.read_losses(alone)
    assert after.keys() == theirs.keys()
    np.testing.assert_allclose(list(after.values()), list(theirs.values()), rtol=1e-5)


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


def test_a_coordinator_without_a_port_is_refused():
    with pytest.raises(UserError, match=r"--coordinator is '10\.0\.0\.1'; write it as host:port"):
        processes.initialize("10.0.0.1", 1, 0, 2)


def test_a_coordinator_that_never_answers_is_named():
    with pytest.raises(UserError, match=r"no coordinator answers at 127\.0\.0\.1:\d+ \(Conn"):
        processes.initialize(f"127.0.0.1:{free_port()}", 2, 1, 1)


def test_a_process_without_a_device_says_so(monkeypatch):
    """As JAX has it when a node runs more processes than it has GPUs."""

    def none_left():
        raise RuntimeError("no visible GPU")

    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(processes.jax, "local_device_count", none_left)
    with pytest.raises(UserError, match=r"process 0 of 2 has no device .*no visible GPU.*no more"):
        processes.initialize("127.0.0.1:1", 2, 0, 1)


def test_a_process_that_waits_in_vain_for_the_others_says_so(tmp_path):
    command = runs.train_command(tmp_path / "run", *PLAIN)
    code, output = runs.run(
        *command, "--multihost", "--coordinator", f"127.0.0.1:{free_port()}",
        "--num_processes", 2, "--process_id", 0, "--init_timeout", 2,
    )  # fmt: skip
    assert code != 0
    assert "process 0 of 2: joining the others at 127.0.0.1" in output and "within 2 s" in output

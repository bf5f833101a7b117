"""Two processes of one device train as one process does, and end together."""

import contextlib
import json
import pathlib
import signal
import socket
import subprocess

import numpy as np
import pytest

import runs
import train
from fastweights.errors import UserError
from fastweights.training import processes

PLAIN = ("model.pattern=A", "model.num_layers=1", "checkpoint.every=3")


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_two(workdir: pathlib.Path, *overrides: str) -> list[subprocess.Popen[str]]:
    together = ["--multihost", "--coordinator", f"127.0.0.1:{free_port()}", "--num_processes", 2]
    command = runs.train_command(workdir, *PLAIN, *overrides)
    return [runs.start(*command, *together, "--process_id", index) for index in range(2)]


def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint(tmp_path, capsys):
    workdir = tmp_path / "two"
    (code, output), (other_code, other_output) = map(runs.finish, start_two(workdir, "steps=6"))
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


def test_sigterm_to_one_process_saves_and_ends_both(tmp_path):
    workdir = tmp_path / "run"
    processes = start_two(workdir, "steps=100000", "checkpoint.every=100000")
    runs.signal_at_step(processes[1], workdir, 5, signal.SIGTERM)
    (code, output), (other_code, other_output) = map(runs.finish, processes)
    assert (code, other_code) == (0, 0), output + other_output
    assert "stopped by SIGTERM at step" in output
    assert len(list((workdir / "checkpoints").iterdir())) == 1


def test_a_coordinator_without_a_port_is_refused():
    with pytest.raises(UserError, match=r"--coordinator is '10\.0\.0\.1'; write it as host:port"):
        processes.initialize("10.0.0.1", 1, 0, 2)


def test_a_process_that_waits_in_vain_says_so(tmp_path):
    command = runs.train_command(tmp_path / "run", *PLAIN)
    code, output = runs.run(
        *command, "--multihost", "--coordinator", f"127.0.0.1:{free_port()}",
        "--num_processes", 2, "--process_id", 1, "--init_timeout", 2,
    )  # fmt: skip
    assert code != 0
    assert "process 1 of 2: joining the others at 127.0.0.1" in output and "within 2 s" in output

"""Starting the commands as a user would, for tests that need a process to kill."""

import contextlib
import csv
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np

from fastweights import sharding
from fastweights.training import optim, run_folder
from fastweights.training.checkpoint import Checkpoints
from fastweights.training.state import make_blueprint

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = "tests/tiny.py"


def start(script: str, *args: object, devices: int = 1, **env: str) -> subprocess.Popen[str]:
    """Starts a command of the repo on simulated devices; its output is read by `finish`."""
    return subprocess.Popen(
        [sys.executable, script, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)} | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and everything printed."""
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def run(script: str, *args: object, devices: int = 1, **env: str) -> tuple[int, str]:
    return finish(start(script, *args, devices=devices, **env))


def train(workdir: pathlib.Path, *overrides: str, devices: int = 1, spec: str = TINY) -> str:
    """Trains to the end; fails the test if the command does."""
    code, output = run(*train_command(workdir, *overrides, spec=spec), devices=devices)
    assert code == 0, output
    return output


def train_command(workdir: pathlib.Path, *overrides: str, spec: str = TINY) -> list[str]:
    fields = [f"--config.{override}" for override in overrides]
    return ["train.py", "--config", spec, "--workdir", str(workdir), *fields]


def signal_at_step(process: subprocess.Popen[str], workdir: pathlib.Path, step: int, number: int):
    """Sends a signal once the run has logged `step`; fails if it ends before."""
    deadline = time.monotonic() + 200
    while logged_step(workdir) < step:
        assert process.poll() is None, finish(process)[1]
        assert time.monotonic() < deadline, "the run never reached the step"
        time.sleep(0.005)
    process.send_signal(number)


def kill_at_step(process: subprocess.Popen[str], workdir: pathlib.Path, step: int) -> None:
    signal_at_step(process, workdir, step, signal.SIGKILL)
    finish(process)


def logged_step(workdir: pathlib.Path) -> int:
    losses = read_losses(workdir)
    return max(losses, default=0)


def read_losses(workdir: pathlib.Path) -> dict[int, float]:
    """Step -> training loss; a step logged twice fails the test."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    losses = [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]
    assert len(dict(losses)) == len(losses), "a step stands twice in metrics.jsonl"
    return dict(losses)


def final_state(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint by its path."""
    config = run_folder.load_config(workdir)
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    blueprint = make_blueprint(config.model, optim.make_optimizer(config.optim, config.steps), mesh)
    with Checkpoints(workdir, config.checkpoint) as checkpoints:
        state, position = checkpoints.restore(checkpoints.steps()[-1], blueprint.abstract)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    arrays = {".".join(optim.path_names(path)): np.asarray(leaf) for path, leaf in leaves}
    return arrays | {"data_position": np.asarray(position)}


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
    """Parameters, optimiser state, data position and logged losses agree bit for bit."""
    assert read_losses(one) == read_losses(other)
    states = final_state(one), final_state(other)
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_table(path: pathlib.Path, *rows: dict[str, object]) -> pathlib.Path:
    """Rows as a CSV with the columns of all."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path

"""A run that was killed and started again is the run that was never killed, bit for bit."""

import pathlib
import random
import shutil
import signal

import numpy as np
import pytest

import runs

STEPS = 40
LONG = (f"steps={STEPS}", "checkpoint.every=3")
RARE = (f"steps={STEPS}", "checkpoint.every=1000")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    runs.train(workdir, *LONG)
    return workdir


def whole_steps(workdir: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


def test_sigkill_at_any_time_changes_nothing(uninterrupted, tmp_path):
    """During the first save; while later ones are written; and once more near the end.

    Halves of a later checkpoint, as a kill in the middle of a write leaves them, are passed over
    and cleaned up.
    """
    workdir, rng = tmp_path / "killed", random.Random(0)
    command = runs.train_command(workdir, *LONG)
    runs.kill_at_step(runs.start(*command), workdir, 3)
    runs.kill_at_step(runs.start(*command), workdir, rng.randint(8, 16))
    saved = whole_steps(workdir)
    assert saved, "no checkpoint was written before the kill"
    # What orbax has on disk before the rename that makes a step whole.
    torn = workdir / "checkpoints" / "39.orbax-checkpoint-tmp"
    shutil.copytree(workdir / "checkpoints" / str(saved[-1]), torn)
    (torn / "commit_success.txt").unlink(missing_ok=True)
    (torn / "_CHECKPOINT_METADATA").unlink()
    process = runs.start(*command)
    runs.signal_at_step(process, workdir, rng.randint(26, 36), signal.SIGKILL)
    _, output = runs.finish(process)
    assert f"resuming from step {saved[-1]} of {STEPS}" in output
    assert not torn.exists()
    saved = whole_steps(workdir)
    assert f"resuming from step {saved[-1]} " in runs.train(workdir, *LONG)
    runs.assert_same_run(uninterrupted, workdir)


@pytest.fixture(scope="module")
def terminated(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run ended by SIGTERM. No save is due on its own: what is there is what SIGTERM saved."""
    workdir = tmp_path_factory.mktemp("runs") / "terminated"
    process = runs.start(*runs.train_command(workdir, *RARE))
    runs.signal_at_step(process, workdir, 10, signal.SIGTERM)
    code, output = runs.finish(process)
    assert code == 0
    assert "stopped by SIGTERM at step" in output
    assert not (workdir / "DONE").exists()
    assert whole_steps(workdir)[0] >= 10
    return workdir


def test_after_sigterm_the_same_command_goes_on(uninterrupted, terminated, tmp_path):
    workdir = pathlib.Path(shutil.copytree(terminated, tmp_path / "run"))
    output = runs.train(workdir, *RARE)
    assert f"resuming from step {whole_steps(terminated)[0]} " in output
    runs.assert_same_run(uninterrupted, workdir)


def test_another_mesh_goes_on_within_rounding(uninterrupted, terminated, tmp_path):
    workdir = pathlib.Path(shutil.copytree(terminated, tmp_path / "run"))
    runs.train(workdir, *RARE, "mesh.fsdp=2", "mesh.tensor=2", devices=4)
    ours, theirs = runs.read_losses(workdir), runs.read_losses(uninterrupted)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)


def test_a_finished_run_says_so_and_only_evaluates(uninterrupted, tmp_path):
    workdir = tmp_path / "finished"
    shutil.copytree(uninterrupted, workdir)
    shutil.rmtree(workdir / "evals")
    output = runs.train(workdir, *LONG)
    assert "this run is finished, evaluating only" in output
    assert (workdir / "evals" / f"recall-{STEPS}.json").is_file()
    assert (workdir / "metrics.jsonl").read_text().count('"kind": "final"') == 1
    runs.assert_same_run(uninterrupted, workdir)

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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    runs.train(workdir, *LONG)
    return workdir


def test_sigkill_at_random_steps_three_times_changes_nothing(uninterrupted, tmp_path):
    workdir = tmp_path / "killed"
    rng = random.Random(0)
    for window in ((4, 10), (14, 20), (26, 36)):
        process = runs.start(*runs.train_command(workdir, *LONG))
        runs.kill_at_step(process, workdir, rng.randint(*window))
    output = runs.train(workdir, *LONG)
    assert "resuming from step" in output
    runs.assert_same_run(uninterrupted, workdir)


def test_sigterm_saves_exits_with_zero_and_the_same_command_goes_on(uninterrupted, tmp_path):
    workdir = tmp_path / "terminated"
    # No save is due on its own, so what the restart finds is what SIGTERM saved.
    command = runs.train_command(workdir, *LONG[:1], "checkpoint.every=1000")
    process = runs.start(*command)
    runs.signal_at_step(process, workdir, 10, signal.SIGTERM)
    code, output = runs.finish(process)
    assert code == 0
    assert "stopped by SIGTERM at step" in output
    assert not (workdir / "DONE").exists()
    code, output = runs.run(*command)
    assert code == 0
    resumed = int(output.split("resuming from step ")[1].split()[0])
    assert resumed >= 10
    runs.assert_same_run(uninterrupted, workdir)


def test_kill_in_the_middle_of_a_write_leaves_the_last_whole_checkpoint(uninterrupted, tmp_path):
    """Halves of a later checkpoint, with and without its data, are passed over and cleaned up."""
    workdir = tmp_path / "torn"
    process = runs.start(*runs.train_command(workdir, *LONG))
    runs.kill_at_step(process, workdir, 8)
    whole = sorted((workdir / "checkpoints").iterdir(), key=lambda path: path.name)
    whole = [path for path in whole if path.name.isdigit()]
    assert whole, "no checkpoint was written before the kill"
    # What orbax has on disk before the rename that makes a step whole.
    torn = workdir / "checkpoints" / "39.orbax-checkpoint-tmp"
    shutil.copytree(whole[-1], torn)
    (torn / "commit_success.txt").unlink(missing_ok=True)
    (torn / "_CHECKPOINT_METADATA").unlink()
    output = runs.train(workdir, *LONG)
    assert f"resuming from step {max(int(path.name) for path in whole)} " in output
    assert not torn.exists()
    runs.assert_same_run(uninterrupted, workdir)


def test_sigkill_during_the_first_save_starts_over(uninterrupted, tmp_path):
    """Before any checkpoint is whole nothing is lost but the steps themselves."""
    workdir = tmp_path / "early"
    process = runs.start(*runs.train_command(workdir, *LONG))
    runs.kill_at_step(process, workdir, 3)
    runs.train(workdir, *LONG)
    runs.assert_same_run(uninterrupted, workdir)


def test_another_mesh_goes_on_within_rounding(uninterrupted, tmp_path):
    workdir = tmp_path / "remeshed"
    process = runs.start(*runs.train_command(workdir, *LONG))
    runs.kill_at_step(process, workdir, 12)
    runs.train(workdir, *LONG, "mesh.fsdp=2", "mesh.tensor=2", devices=4)
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

"""Sweeps whose processes are jobs of a Slurm on this machine: `make test-slurm`."""

import json
import re
import signal

import pytest

import runs
import sweep
from conftest import said, wait_for
from fastweights.errors import UserError


def command(workdir, *fields, slurm="time=5"):
    return [
        "scripts/sweep.py", "--config", runs.TINY, "--workdir", workdir, "--jobs", 2,
        "--slurm", slurm, *(f"--config.{field}" for field in fields),
    ]  # fmt: skip


def jobs() -> list[str]:
    return said("squeue", "--noheader", "--format=%i").split()


def test_points_run_as_jobs_and_a_failed_one_is_told(cluster, tmp_path):
    code, output = runs.run(*command(tmp_path, "optim.lr=1e30", "optim.clip_norm=0"))
    assert code == 1 and output.count("FAILED (exit 2)") == 2, output
    assert "not finite" in output
    code, output = runs.run(*command(tmp_path))
    assert code == 0 and "2 of 2 runs done" in output, output
    assert len(list(tmp_path.glob("*/DONE"))) == 2 and not jobs()
    scripts = [path.read_text() for path in tmp_path.glob(".slurm/*_submission.sh")]
    assert len(scripts) == 4 and all("#SBATCH --time=5\n" in script for script in scripts)


def test_a_job_that_is_warned_saves_is_queued_again_and_ends_as_an_undisturbed_one(
    cluster, tmp_path
):
    fields = ("steps=400", "checkpoint.every=400")
    only = ("--only", "pattern=A")
    process = runs.start(*command(tmp_path / "warned", *fields), *only)
    run = tmp_path / "warned" / "pattern=A,seed=0"
    runs.signal_at_step(process, run, 5, 0)
    (job,) = jobs()
    said("scancel", "--signal=USR2", job)
    log = run / "log.txt"
    wait_for(lambda: "stopped by SIGTERM" in log.read_text(), cluster)
    # Slurm has a job that was queued again wait two minutes, so that its old self is gone for sure.
    wait_for(
        lambda: "PENDING" in said("squeue", "--format=%T") or "resuming" in log.read_text(), cluster
    )
    said("scontrol", "update", f"jobid={job}", "starttime=now+10")
    code, output = runs.finish(process)
    assert code == 0, output
    (step,) = re.findall(r"resuming from step (\d+)", log.read_text())
    assert 5 <= int(step) < 400
    assert len(json.loads((run / "run.json").read_text())["starts"]) == 2
    whole = tmp_path / "whole"
    runs.train(whole, "model.pattern=A", *fields)
    runs.assert_same_run(run, whole)


@pytest.mark.parametrize("how", ["scancel", "Ctrl-C"])
def test_a_cancelled_job_and_an_interrupted_sweep_save_and_go_on_later(cluster, tmp_path, how):
    fields = ("steps=100000", "checkpoint.every=100000", "log.every=1")
    process = runs.start(*command(tmp_path, *fields), "--only", "pattern=A")
    run = tmp_path / "pattern=A,seed=0"
    runs.signal_at_step(process, run, 5, signal.SIGINT if how == "Ctrl-C" else 0)
    if how == "scancel":
        said("scancel", *jobs())
    code, output = runs.finish(process)
    told = "interrupted" if how == "Ctrl-C" else "stopped  pattern=A,seed=0: the same command"
    assert code == (130 if how == "Ctrl-C" else 1) and told in output, output
    wait_for(lambda: not jobs(), cluster)
    assert "stopped by SIGTERM" in (run / "log.txt").read_text()
    assert not (run / "FAILED").exists() and list(run.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("slurm", "told"),
    [
        ("time=5,partition=none", "Slurm takes no job .*Invalid partition name"),
        ("time=5,partitions=main", r"can't be used .Unavailable parameter.s.: \['partitions'\]"),
    ],
)
def test_what_slurm_refuses_is_told(cluster, tmp_path, slurm, told):
    with pytest.raises(UserError, match=told):
        sweep.main([str(part) for part in command(tmp_path, slurm=slurm)[1:]])

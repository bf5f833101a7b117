"""The launch files are whole, and what they start train.py understands."""

import os
import shlex
import subprocess
import time

import pytest
import yaml

import train
from runs import ROOT, TINY

LAUNCH = ROOT / "scripts" / "launch"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands that only note their arguments, in the place of Slurm's; the notes."""
    notes = tmp_path / "notes"
    for name in ("srun", "scontrol"):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\necho {name} "$@" >> {notes}\nexit ${{CODE_OF_{name}:-0}}\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return notes


@pytest.mark.parametrize(
    ("done", "code", "queued"),
    [(False, 0, ["scontrol requeue 7"]), (True, 0, []), (False, 2, [])],
    ids=["stopped by SIGTERM", "finished", "failed"],
)
def test_a_slurm_job_is_queued_again_if_it_was_stopped(
    slurm, tmp_path, monkeypatch, done, code, queued
):
    monkeypatch.setenv("CODE_OF_srun", str(code))
    if done:
        (tmp_path / "DONE").touch()
    arguments = [TINY, str(tmp_path), "--config.mesh.fsdp=4"]
    job = subprocess.run(["bash", LAUNCH / "slurm.sbatch", *arguments], check=False)
    assert job.returncode == code
    started, *then = slurm.read_text().splitlines()
    assert then == queued
    args, config = train.parse_args(started.partition(" train.py ")[2].split())
    assert args.multihost and args.workdir == tmp_path and config.mesh.fsdp == 4


def test_a_jobset_starts_one_process_a_pod():
    job_set = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    shell, flag, line = container["command"]
    assert (shell, flag) == ("sh", "-c")
    pods = []
    for index in range(spec["completions"]):
        command, behind = line.replace("$JOB_COMPLETION_INDEX", str(index)).split(" & ")
        command = shlex.split(command)
        assert command[:2] == ["python", "train.py"]
        args, config = train.parse_args(command[2:])
        assert f"[ -e {args.workdir}/DONE ]" in behind
        pods.append(args.process_id)
        assert args.multihost and args.num_processes == spec["parallelism"]
        name = job_set["metadata"]["name"]
        port = container["ports"][0]["containerPort"]
        assert args.coordinator == f"{name}-{job['name']}-0-0.{name}:{port}"
        # data takes what fsdp leaves, so all devices of all pods have a place.
        assert config.mesh.data == -1
    assert pods == list(range(spec["parallelism"]))
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


@pytest.mark.parametrize("finished", [True, False])
def test_a_drained_pod_fails_unless_the_run_is_finished(tmp_path, finished):
    """With a stand-in for python that gets SIGTERM, saves, and exits well."""
    job_set = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    line = pod["containers"][0]["command"][2].replace("/runs/lm", str(tmp_path))
    python = tmp_path / "python"
    saved = f"trap 'touch {tmp_path}/saved; exit 0' TERM"
    python.write_text(f"#!/bin/sh\n{saved}\ntouch {tmp_path}/up\nwhile :; do sleep 0.05; done\n")
    python.chmod(0o755)
    if finished:
        (tmp_path / "DONE").touch()
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = subprocess.Popen(["sh", "-c", line], env=os.environ | {"PATH": path})
    while not (tmp_path / "up").exists():
        time.sleep(0.05)
    process.terminate()
    assert (process.wait(20) == 0) == finished
    assert (tmp_path / "saved").exists()

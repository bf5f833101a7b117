"""Launching: what a Slurm job does with its process, tried here without Slurm."""

import concurrent.futures
import os
import signal
import sys
import threading
import time

import pytest

import sweep
from fastweights import launching
from fastweights.errors import UserError

CHILD = """
import os, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.kill(os.getpid(), signal.SIGUSR2)
print("ready", os.environ["OF_OURS"], os.environ["OF_BOTH"], flush=True)
time.sleep(60)
"""


def test_a_warned_job_has_its_process_save_and_outlive_the_warning_itself(tmp_path, monkeypatch):
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    monkeypatch.setenv("OF_BOTH", "theirs")
    env = {"OF_OURS": "ours", "OF_BOTH": "ours"}
    job = launching.Job([sys.executable, "-c", CHILD], log, env)
    ended = []

    def warned(*_):
        job.stop()
        ended.append(log.read_text().split())

    def warn():
        while "ready" not in log.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR2)

    old = signal.signal(signal.SIGUSR2, warned)
    try:
        thread = threading.Thread(target=warn, daemon=True)
        thread.start()
        assert job() == 0
        thread.join()
        assert signal.getsignal(signal.SIGUSR2) is warned
    finally:
        signal.signal(signal.SIGUSR2, old)
    # The handler came back only when the process had saved.
    assert ended == [["before", "ready", "ours", "theirs", "saved"]]


def test_options_are_slurms_own():
    found = launching.read_options("time=240, partition=gpu,gpus_per_node=1")
    assert found == {"time": 240, "partition": "gpu", "gpus_per_node": 1}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("partition=gpu", "gives no time limit; add time=MINUTES"),
        ("time=two", "gives no time limit"),
        ("time=5,gpu", "has the part 'gpu'; write KEY=VALUE"),
        ("", "has the part ''; write KEY=VALUE"),
        ("time=5", r'submitit is not installed; run: pip install "fastweights\[slurm\]"'),
    ],
)
def test_a_sweep_on_slurm_says_what_it_lacks(tmp_path, monkeypatch, text, told):
    monkeypatch.setitem(sys.modules, "submitit", None)
    command = ["--config", "tests/tiny.py", "--workdir", str(tmp_path / "runs"), "--slurm", text]
    with pytest.raises(UserError, match=told):
        sweep.main(command)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("allowed", "expected"), [("3, 5", ["3", "3", "5", "5"]), ("", [""] * 4)])
def test_processes_share_the_gpus_evenly(tmp_path, monkeypatch, allowed, expected):
    """All four wait for each other, so they run at the same time."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    child = (
        "import os, pathlib, time\n"
        "pathlib.Path(f'{os.getpid()}.up').touch()\n"
        "end = time.monotonic() + 60\n"
        "while len(list(pathlib.Path('.').glob('*.up'))) < 4 and time.monotonic() < end:\n"
        "    time.sleep(0.01)\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    monkeypatch.chdir(tmp_path)
    launch = launching.here({}, jobs=4)
    logs = [tmp_path / f"{n}.log" for n in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda log: launch([sys.executable, "-c", child], log), logs))
    assert codes == [0] * 4
    assert sorted(log.read_text().strip() for log in logs) == expected
    # Given back: the next one gets the first again.
    assert launch([sys.executable, "-c", child], logs[0]) == 0
    assert logs[0].read_text().split()[1:] == expected[:1] * bool(allowed)

"""A sweep killed at random, with all its processes, and started again as a user would."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import collect
from runs import ROOT

KILLS = 5
CONFIG = f"""
from fastweights.config import load_dict
from fastweights.sweeps import grid

def get_config(arg=None):
    config = load_dict({str(ROOT / "tests/tiny.py")!r})
    config.data.mqar.train = ((16, 3, 1.0),)
    config.data.on_device, config.model.num_layers = True, 1
    config.model.pattern = "A"
    config.steps, config.checkpoint.every = 16, 2
    return config

def sweep():
    return grid({{"optim.lr": [0.001], "seed": [0, 1]}})
"""


def test_a_sweep_killed_five_times_ends_with_the_table_of_an_undisturbed_one(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(CONFIG)

    def start(name):
        command = ["scripts/sweep.py", "--config", str(config), "--workdir", str(tmp_path / name)]
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    assert start("whole").wait(timeout=300) == 0
    times, killed = random.Random(0), 0
    for _ in range(KILLS):
        process = start("killed")
        # While it starts, compiles, trains, saves or evaluates.
        time.sleep(times.uniform(2, 7))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed
    assert start("killed").wait(timeout=300) == 0

    def table(name):
        """Collect's rows without the seconds, which no two runs share."""
        rows = collect.collect(tmp_path / name, "recall")
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    assert table("killed") == table("whole")
    assert {row["status"] for row in table("whole")} == {"done"}
    assert len({row["nll"] for row in table("whole")}) == len(table("whole"))

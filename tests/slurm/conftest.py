"""A Slurm of one node on this machine, with its own keys, ports and folder, run by this user."""

import contextlib
import getpass
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="session")
def cluster():
    """Its `SLURM_CONF` is in the environment while tests run."""
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {missing[0]} here; on Debian: apt-get install slurm-wlm munge")
    # A socket's path has to be short, and munge's open to all.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        start_munge(folder, stack)
        conf = folder / "slurm.conf"
        host = socket.gethostname().split(".")[0]
        conf.write_text(
            CONF.format(
                folder=folder, host=host, ports=free_ports(), user=getpass.getuser(),
                cpus=os.cpu_count(),
            )
        )  # fmt: skip
        os.environ["SLURM_CONF"] = str(conf)
        stack.callback(os.environ.pop, "SLURM_CONF")
        for name in ("slurmctld", "slurmd"):
            daemon(stack, folder, name, name, "-D", "-f", str(conf))
        wait_for(lambda: "idle" in said("sinfo", "--noheader", "--format=%t"), folder)
        yield folder


def start_munge(folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    options = {"key-file": key} | {
        f"{name}-file": folder / f"munge.{name}" for name in ("pid", "log", "seed")
    }
    options = {"socket": folder / "munge.socket"} | options
    arguments = [f"--{name}={value}" for name, value in options.items()]
    daemon(stack, folder, "munged", "munged", "--foreground", *arguments)
    wait_for((folder / "munge.socket").exists, folder)


def daemon(stack: contextlib.ExitStack, folder: pathlib.Path, name: str, *command: str) -> None:
    """Starts a daemon in the foreground, and ends it with the tests."""
    log = stack.enter_context((folder / f"{name}.out").open("w"))
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)

    stack.callback(end)


def free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(2)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def wait_for(condition, folder: pathlib.Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.out"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)

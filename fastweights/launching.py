"""Where the processes of a sweep run: on this machine, or as jobs of Slurm through submitit.

A Slurm job whose time runs out, or that another preempts, is warned by a signal: its process saves
as at any SIGTERM, and the job is queued again and goes on.
"""

import contextlib
import importlib
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastweights.errors import UserError, check

Launch = Callable[[Sequence[str], pathlib.Path], int]
"""(command, log) -> exit code, once the process has ended; its output is appended to the log."""

POLL_SECONDS = 3.0
# Slurm's names for how a job can end.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "NODE_FAIL",
         "BOOT_FAIL", "PREEMPTED", "REVOKED")  # fmt: skip
WARNING = signal.SIGUSR2  # submitit's


def start(
    command: Sequence[str], log: pathlib.Path, env: Mapping[str, str], **fixed: str
) -> subprocess.Popen[bytes]:
    """The command on this machine; what `env` has holds where the environment says nothing."""
    env = env | os.environ | fixed
    with log.open("a") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)


def here(env: Mapping[str, str], jobs: int) -> Launch:
    """Launches processes on this machine, `jobs` at a time.

    If more than one, each gets one of the machine's GPUs, the least taken.
    """
    running = dict.fromkeys(_gpus() if jobs > 1 else (), 0)
    if running:  # They may have to share one.
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **env}
    lock = threading.Lock()

    def launch(command: Sequence[str], log: pathlib.Path) -> int:
        if not running:
            return start(command, log, env).wait()
        with lock:
            gpu = min(running, key=running.__getitem__)
            running[gpu] += 1
        try:
            return start(command, log, env, CUDA_VISIBLE_DEVICES=gpu).wait()
        finally:
            with lock:
                running[gpu] -= 1

    return launch


def _gpus() -> list[str]:
    """The NVIDIA GPUs that processes here may use, as CUDA_VISIBLE_DEVICES names them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return []
    return found.stdout.split()


class Job:
    """What submitit calls inside a Slurm job."""

    def __init__(self, command: Sequence[str], log: pathlib.Path, env: Mapping[str, str]):
        self.started = (command, log, env)
        self.child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        # Slurm sends the warning to every process of a job, and it would end one that does not
        # expect it. A process starts out with ignoring what its parent ignored.
        ours = signal.signal(WARNING, signal.SIG_IGN)
        try:
            self.child = start(*self.started)
        finally:
            signal.signal(WARNING, ours)
        return self.child.wait()

    def stop(self) -> None:
        """Has the process save and end; called from a signal handler while `__call__` waits."""
        if self.child is not None:
            self.child.terminate()
            # `wait` is taken already, by what this interrupted.
            os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT)

    def checkpoint(self) -> Any:
        """For submitit, which calls this when the warning comes: what to queue instead."""
        submitit = importlib.import_module("submitit")

        self.stop()
        return submitit.helpers.DelayedSubmission(Job(*self.started))


def read_options(text: str) -> dict[str, Any]:
    """`partition=gpu,time=240` as a dict; numbers become integers.

    Raises:
      UserError: a part is no KEY=VALUE, or the time limit is missing.
    """
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        check(
            bool(name and equals and value),
            f"--slurm has the part '{part}'; write KEY=VALUE,KEY=VALUE, such as "
            "time=240,partition=gpu,gpus_per_node=1.",
        )
        options[name] = int(value) if value.isdecimal() else value
    check(
        isinstance(options.get("time"), int),
        f"--slurm '{text}' gives no time limit; add time=MINUTES (a job that needs more is queued "
        "again and goes on).",
    )
    return options


@contextlib.contextmanager
def slurm(folder: pathlib.Path, text: str, env: Mapping[str, str]) -> Iterator[Launch]:
    """Launches processes as Slurm jobs; those that still run when the block is left by an error,
    such as Ctrl-C, are cancelled, which has them save.

    Args:
      folder: for submitit's files, on a disk that the nodes share.
      text: options as `read_options` reads them, by submitit's names, which are sbatch's.
      env: as in `start`.

    Raises:
      UserError: submitit or Slurm is not installed, or an option is none.
    """
    options = read_options(text)
    try:
        submitit = importlib.import_module("submitit")
    except ImportError as error:
        raise UserError(
            'submitit is not installed; run: pip install "fastweights[slurm]".'
        ) from error
    try:
        executor = submitit.SlurmExecutor(folder.absolute(), max_num_timeout=1000)
        executor.update_parameters(job_name="fastweights", **options)
    except (RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise UserError(f"--slurm '{text}' can't be used ({said}); see `sbatch --help`.") from error
    jobs: list[Any] = []

    def launch(command: Sequence[str], log: pathlib.Path) -> int:
        try:
            job = executor.submit(Job(command, log.absolute(), env))
        except submitit.core.utils.FailedJobError as error:
            raise UserError(
                f"Slurm takes no job with --slurm '{text}': {str(error).strip().splitlines()[-1]}"
            ) from error
        jobs.append(job)
        return _wait(job, log)

    try:
        yield launch
    except BaseException:
        for job in jobs:
            job.cancel(check=False)
        raise


def _wait(job: Any, log: pathlib.Path) -> int:
    """The exit code of a job's process; that of a killed one for a job that left none.

    submitit would ask Slurm's accounting, which not every cluster keeps, and without it wait for
    ever for a job that was cancelled or killed.
    """
    ended = 0
    while not job.paths.result_pickle.exists():
        # Asked again: a job on its way back into the queue is in no state for a moment, and a
        # shared disk may show the file later than Slurm the end.
        ended = ended + 1 if _has_ended(job.job_id) else 0
        if ended > 2:
            return -signal.SIGKILL
        time.sleep(POLL_SECONDS)
    error = job.exception()
    if error is None:
        return job.result()
    with log.open("a") as out:
        out.write(f"{error}\nerror: the Slurm job {job.job_id} could not run its process\n")
    return 1


def _has_ended(job_id: str) -> bool:
    """Whether Slurm neither runs the job nor has it waiting; False when it can't be asked."""
    command = ["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job_id]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return found.stdout.strip() in ("", *ENDED)
    return "Invalid job id" in found.stderr

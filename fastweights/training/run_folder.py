"""The run folder: where training, eval, sweep, collect and plot meet.

config.json     the whole configuration
run.json        id, versions, git commit, and each start of the run
metrics.jsonl   one JSON object a line: training and eval metrics by step
checkpoints/    orbax, one folder a step
evals/          one JSON file an eval and step
alive/          signs of life of the processes of a run, where there are several
tokenizer.json  of an imported model; a run on text has its data's
DONE            written last, when all steps are trained and the final evals are on disk
FAILED          why the run ended before that; removed when it goes on
"""

import fcntl
import importlib.metadata
import json
import pathlib
import platform
import shutil
import subprocess
import sys
import time
import uuid
from typing import IO, Any

from fastweights import config as config_lib
from fastweights.errors import UserError, check
from fastweights.files import read_json, write_atomic

VERSIONS_OF = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def check_config(workdir: pathlib.Path, config: config_lib.Config) -> dict[str, tuple[Any, Any]]:
    """Compares the config with the one of the folder's checkpoints.

    Returns:
      Field -> (stored, asked) where they differ, all safe to change; empty for a new folder.

    Raises:
      UserError: a field differs that a resumed run may not change.
    """
    saved = [
        int(path.parent.name)
        for path in workdir.glob("checkpoints/*/_CHECKPOINT_METADATA")
        if path.parent.name.isdigit()
    ]
    # Without a checkpoint there is nothing that another config could spoil.
    if not saved or not (workdir / "config.json").is_file():
        return {}
    check(
        max(saved) <= config.steps,
        f"'{workdir}' is at step {max(saved)}, beyond steps={config.steps}; raise steps or use "
        "another --workdir.",
    )
    changed = config_lib.differences(load_config(workdir), config)
    if max(saved) == 0:
        # An imported model that has not trained: only what it is can't be changed.
        refused = [
            name
            for name in changed
            if name.startswith("model.") and not name.endswith(config_lib.FREE)
        ]
    else:
        refused = [name for name in changed if not config_lib.is_safe(name)]
    if refused:
        fields = "; ".join(
            f"{name}: stored {changed[name][0]!r}, asked {changed[name][1]!r}" for name in refused
        )
        raise UserError(
            f"'{workdir}' holds a run with another config ({fields}); "
            "use a new --workdir or give back these values."
        )
    return changed


def claim(workdir: pathlib.Path) -> IO[str]:
    """Makes the folder and locks it for this process, until the returned file is closed.

    Raises:
      UserError: the folder can't be written, or another process has it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("w")
    except OSError as error:
        raise _unwritable(workdir, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UserError(
            f"'{workdir}' is in use by another process that trains in it; wait for that one or use "
            "another --workdir."
        ) from error
    return lock


def in_use(workdir: pathlib.Path) -> bool:
    """Whether a process trains in the folder now."""
    try:
        with (workdir / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, and so nobody who ever claimed it
        return False
    return False


def open_run(workdir: pathlib.Path, config: config_lib.Config, step: int) -> None:
    """Stores the config and notes this start, from `step` on; comes after a restore that worked.

    Raises:
      UserError: the folder can't be written, or its run.json is broken.
    """
    try:
        _note_start(workdir / "run.json")
        write_atomic(workdir / "config.json", config_lib.to_json(config))
        (workdir / "FAILED").unlink(missing_ok=True)
        if step < config.steps:
            # A finished run that goes on (with more steps) is not finished any more.
            (workdir / "DONE").unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(workdir, error) from error


def _unwritable(workdir: pathlib.Path, error: OSError) -> UserError:
    return UserError(
        f"workdir '{workdir}' can't be written ({error.strerror}); "
        "choose another --workdir or free it."
    )


def load_config(workdir: pathlib.Path) -> config_lib.Config:
    """The config a run was started with.

    Raises:
      UserError: no run there, or its config can't be read.
    """
    path = workdir / "config.json"
    check(path.is_file(), f"'{workdir}' holds no run (no config.json); check --workdir.")
    try:
        return config_lib.freeze(read_json(path))
    except UserError as error:
        raise UserError(f"the config of '{workdir}' can't be used: {error}") from error


def read_info(workdir: pathlib.Path) -> dict[str, Any]:
    return read_json(workdir / "run.json")


def is_done(workdir: pathlib.Path) -> bool:
    return (workdir / "DONE").is_file()


def mark_done(workdir: pathlib.Path, step: int) -> None:
    write_atomic(workdir / "DONE", f"{step}\n")
    # Of another process that wanted the folder meanwhile.
    (workdir / "FAILED").unlink(missing_ok=True)


def failure(workdir: pathlib.Path) -> str:
    """Why the run ended early, in one line; "" where it did not."""
    path = workdir / "FAILED"
    return " ".join(path.read_text().split()) if path.is_file() else ""


def mark_failed(workdir: pathlib.Path, cause: str) -> None:
    write_atomic(workdir / "FAILED", f"{cause}\n")


def clear_results(workdir: pathlib.Path) -> None:
    """Removes what an earlier run left that is to be trained anew from the first step."""
    (workdir / "DONE").unlink(missing_ok=True)
    for name in ("evals", "checkpoints"):
        shutil.rmtree(workdir / name, ignore_errors=True)


def _note_start(path: pathlib.Path) -> None:
    """Adds this start to run.json; the id stays for the life of the folder."""
    fresh = {"id": uuid.uuid4().hex[:8], "starts": []}
    info = read_json(path) if path.is_file() else fresh
    check(
        isinstance(info, dict) and fresh.keys() <= info.keys(),
        f"'{path}' is not what a run writes there; restore or delete it.",
    )
    info["starts"].append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": platform.node(),
            "command": sys.argv,
            "git": git_commit(),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in VERSIONS_OF},
        }
    )
    write_atomic(path, json.dumps(info, indent=2) + "\n")


def git_commit() -> str:
    """The source's commit, with "+" when the tree differs from it; "" outside a checkout."""
    source = str(pathlib.Path(__file__).parent)
    command = ["git", "-C", source, "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

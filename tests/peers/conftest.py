"""Makes the random models with a python that has transformers and torch: this one or another."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("torch_models.py")


def run_torch(*arguments) -> None:
    """Runs `torch_models.py`; torch and jax are never in one process."""
    python = os.environ.get("TORCH_PYTHON") or sys.executable
    command = [python, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> pathlib.Path:
    """A folder with a folder a model."""
    folder = tmp_path_factory.mktemp("models")
    run_torch("make", folder)
    return folder

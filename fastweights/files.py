"""Writing files so that neither a reader nor a kill meets half of one, and reading them back."""

import json
import os
import pathlib
from typing import Any

from fastweights.errors import UserError


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes the whole file or leaves the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: pathlib.Path) -> Any:
    """The contents of a JSON file.

    Raises:
      UserError: it is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(f"'{path}' is not valid JSON ({error}); restore or delete it.") from error

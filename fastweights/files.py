"""Writing files so that neither a reader nor a kill meets half of one, and reading them back."""

import json
import os
import pathlib
from typing import Any

from fastweights.errors import UserError, check


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes the whole file or leaves the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_figure(figure: Any, out: pathlib.Path) -> None:
    """Saves a matplotlib figure under the name that `--out` gave, and makes its folder.

    Raises:
      UserError: `out` can't be written, is a folder, or its ending is no known format.
    """
    remedy = "name a .png, .svg or .pdf file in a folder that can be written."
    # Without an ending matplotlib would write to another name than it was given.
    check(bool(out.suffix) and not out.is_dir(), f"--out '{out}' is no picture's name; {remedy}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--out '{out}' can't be written ({error}); {remedy}") from error


def read_json(path: pathlib.Path) -> Any:
    """The contents of a JSON file.

    Raises:
      UserError: it is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(f"'{path}' is not valid JSON ({error}); restore or delete it.") from error

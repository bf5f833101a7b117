"""Writing files so that neither a reader nor a kill meets half of one, and reading them back."""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
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


@contextlib.contextmanager
def new_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A hidden folder beside `out` to write into, which becomes `out` when the block has worked.

    So a folder named `out` is always whole, and after an error there is none.

    Raises:
      UserError: `out` exists or cannot be written.
    """
    out = out.absolute()
    check(not out.exists(), f"'{out}' exists already; name a new folder or remove it.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(
            f"'{out}' cannot be written ({error.strerror}); name another folder."
        ) from error
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)  # mkdtemp's folders are for their owner alone
        partial.rename(out)
    except OSError as error:
        raise UserError(
            f"Writing '{out}' failed ({error}); free space or name another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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

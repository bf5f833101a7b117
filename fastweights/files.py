"""Writing files so that neither a reader nor a kill meets half of one."""

import os
import pathlib


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Writes the whole file or leaves the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

"""What an imported run remembers of the folder it came from, so that it can be written back.

`interop/` in the run's folder holds `record.json` (every tensor's name, dtype and shape, file by
file), `aside/` (for each of those files one with its tensors that are no part of the model) and
`files/`, copies of all small files beside the tensors: config, index, tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from fastweights.data.tokenizer import TOKENIZER
from fastweights.errors import UserError
from fastweights.files import read_json
from fastweights.interop import safetensors
from fastweights.interop.checkpoint import FAMILIES, Checkpoint, is_aside

FOLDER, RECORD, ASIDE, FILES = "interop", "record.json", "aside", "files"
# Weights in other formats, which may lie in the same folder, are not taken along.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")


@dataclasses.dataclass(frozen=True)
class Record:
    """A stored record.

    Attributes:
      model_type: of the source's config, which names the family.
      mlx: whether MLX wrote the source.
      files: file name -> (its entries in order, its metadata).
      folder: where the record lies.
    """

    model_type: str
    mlx: bool
    files: Mapping[str, tuple[dict[str, safetensors.Entry], dict[str, str]]]
    folder: pathlib.Path

    @property
    def copied(self) -> list[pathlib.Path]:
        """The copies of small files."""
        return sorted((self.folder / FILES).iterdir())

    def aside(self, file: str) -> safetensors.File:
        """The tensors of one file that are no part of the model."""
        return safetensors.File(self.folder / ASIDE / file)


def save(checkpoint: Checkpoint, workdir: pathlib.Path) -> None:
    """Writes the record of `checkpoint` into a run's folder, and its tokenizer beside it."""
    folder = workdir / FOLDER
    (folder / FILES).mkdir(parents=True)
    for path in sorted(checkpoint.folder.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, folder / FILES / path.name)
    if (folder / FILES / TOKENIZER).is_file():
        shutil.copyfile(folder / FILES / TOKENIZER, workdir / TOKENIZER)
    (folder / ASIDE).mkdir()
    for name, file in checkpoint.files.items():
        aside = {n: entry for n, entry in file.entries.items() if is_aside(n)}
        safetensors.write(folder / ASIDE / name, aside, {}, file.read)
    record = {
        "model_type": read_json(checkpoint.folder / "config.json")["model_type"],
        "mlx": checkpoint.mlx,
        "files": {
            name: {
                "metadata": file.metadata,
                "tensors": {n: [e.dtype, list(e.shape)] for n, e in file.entries.items()},
            }
            for name, file in checkpoint.files.items()
        },
    }
    (folder / RECORD).write_text(json.dumps(record) + "\n")


def end_ids(workdir: pathlib.Path) -> list[int]:
    """The tokens that end a text by the generation_config.json or config.json of an import.

    Empty for a run that was not imported, or where neither says so.
    """
    for name in ("generation_config.json", "config.json"):
        path = workdir / FOLDER / FILES / name
        tree = read_json(path) if path.is_file() else {}
        text = tree.get("text_config") or {}
        found = tree.get("eos_token_id", text.get("eos_token_id"))
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def load(workdir: pathlib.Path) -> Record | None:
    """The record in a run's folder; None for a run that was not imported.

    Raises:
      UserError: it can't be read.
    """
    folder = workdir / FOLDER
    if not folder.exists():
        return None
    try:
        stored: Any = read_json(folder / RECORD)
        files = {
            name: (
                {
                    n: safetensors.Entry(d, tuple(shape))
                    for n, (d, shape) in told["tensors"].items()
                },
                dict(told["metadata"]),
            )
            for name, told in stored["files"].items()
        }
        found = Record(stored["model_type"], stored["mlx"], files, folder)
        if found.model_type not in {name for family in FAMILIES for name in family.model_types}:
            raise ValueError(f"model_type {found.model_type!r} is not known")
        for part in (FILES, ASIDE):
            if not (folder / part).is_dir():
                raise ValueError(f"its folder {part} is gone")
        return found
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"'{folder / RECORD}' is not what an import writes there ({error}); import again."
        ) from error

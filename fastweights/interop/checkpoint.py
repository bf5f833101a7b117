"""A folder with a published model: which family it is, and its tensors by their common names.

Names are compared without what stands before `layers`, `embed_tokens`, `lm_head` and so on, for the
same model is saved as `model.layers...`, `model.language_model.layers...`, with that part three
times over, or as `language_model.model.layers...`. Tensors of vision towers and of layers that
predict a second token are no part of the model here: they are kept aside and given back on export.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastweights.errors import UserError, check
from fastweights.files import read_json
from fastweights.interop import mamba, mamba2, olmo_hybrid, qwen3_5, qwen3_next, safetensors
from fastweights.interop.family import Family
from fastweights.interop.fields import Fields, decode
from fastweights.interop.tensors import Row
from fastweights.model import ModelConfig

FAMILIES: tuple[Family, ...] = (
    qwen3_5.FAMILY,
    qwen3_next.FAMILY,
    olmo_hybrid.FAMILY,
    mamba2.FAMILY,
    mamba.FAMILY,
)
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "embeddings.weight")
PREFIXES = ("model", "language_model", "backbone")
ASIDE = ("visual.", "vision_tower.", "mtp.")
# Ends of names that only packed or quantised checkpoints have: GPTQ, AWQ, bitsandbytes, FP8 blocks.
PACKED = ("qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map", "weight_scale_inv")
PACKED += ("weight_scale", "input_scale", "weight_packed")


def canonical(name: str) -> str:
    """A tensor's name without what may stand before it."""
    parts = name.split(".")
    while parts[0] in PREFIXES and len(parts) > 1:
        parts.pop(0)
    return ".".join(parts)


def is_aside(name: str) -> bool:
    """Whether a tensor is no part of the text model."""
    return canonical(name).startswith(ASIDE)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open folder.

    Attributes:
      folder: where it is.
      family: which family it belongs to.
      model: what its config describes.
      dtype: that the config names, "float32" where it names none.
      files: file name -> open file, as the index orders them.
      index: the index file's contents, None for a single file.
      published: canonical name -> (file name, name there), of the text model's tensors.
    """

    folder: pathlib.Path
    family: Family
    model: ModelConfig
    dtype: str
    files: Mapping[str, safetensors.File]
    index: Mapping[str, Any] | None
    published: Mapping[str, tuple[str, str]]

    @property
    def mlx(self) -> bool:
        """Whether MLX wrote the files: their own tag says so."""
        return any(file.metadata.get("format") == "mlx" for file in self.files.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the text model's tensors by canonical name."""
        return {name: self._entry(name).shape for name in self.published}

    def _entry(self, name: str) -> safetensors.Entry:
        file, stored = self.published[name]
        return self.files[file].entries[stored]

    def read(self, name: str) -> np.ndarray:
        """A tensor by its canonical name, copied out of its file."""
        file, stored = self.published[name]
        return self.files[file].read(stored)

    def rows(self) -> list[Row]:
        """The family's table for this checkpoint."""
        context = self.family.context(self.model, self.shapes, self.mlx)
        return list(self.family.table(self.model, context))

    def check_tensors(self) -> None:
        """Holds names, shapes and dtypes to the family's table.

        Raises:
          UserError: the first tensor that is missing, unknown, packed, or of another shape.
        """
        shapes = self.shapes
        rows = self.rows()
        wanted = {n: s for row in rows for n, s in zip(row.names, row.shapes, strict=True)}
        if self.model.tie_embeddings and HEAD in shapes:
            wanted[HEAD] = next(wanted[name] for name in EMBEDDINGS if name in wanted)
        for name in shapes:
            stored = self.published[name][1]
            check(
                not name.endswith(PACKED),
                f"'{self.folder}' is packed or quantised (tensor '{stored}'); give the original "
                "in float32, bfloat16 or float16.",
            )
        for name, shape in wanted.items():
            check(
                name in shapes,
                f"'{self.folder}' has no tensor '{name}', which its config.json asks for; give the "
                "whole checkpoint.",
            )
            stored, entry = self.published[name][1], self._entry(name)
            check(entry.dtype in safetensors.DTYPES, safetensors.packed(stored, entry.dtype))
            check(
                entry.shape == shape,
                f"tensor '{stored}' has shape {list(entry.shape)} where config.json asks for "
                f"{list(shape)}; the two do not belong together.",
            )
        unknown = [self.published[name][1] for name in shapes if name not in wanted]
        check(
            not unknown,
            f"'{self.folder}' has {len(unknown)} tensors that {self.family.name} does not have, "
            f"such as '{unknown[0] if unknown else ''}'; it is another model.",
        )
        if self.model.tie_embeddings and HEAD in shapes:
            embedding = next(name for name in EMBEDDINGS if name in wanted)
            check(
                np.array_equal(self.read(HEAD), self.read(embedding)),
                f"'{self.folder}' says that its head is its embedding (tie_word_embeddings), but "
                f"'{self.published[HEAD][1]}' differs from it; correct config.json.",
            )


def open_checkpoint(folder: pathlib.Path) -> Checkpoint:
    """Opens a folder and holds it to its family's table; reads headers only.

    Raises:
      UserError: what is missing, damaged or not supported; names the file, field or tensor.
    """
    path = folder / "config.json"
    check(path.is_file(), f"'{folder}' has no config.json; name the folder of a published model.")
    raw = read_json(path)
    check(isinstance(raw, dict), f"'{path}' is no JSON object; restore it.")
    tree = decode(raw)
    known = {name: family for family in FAMILIES for name in family.model_types}
    kind = tree.get("model_type")
    check(
        isinstance(kind, str) and kind in known,
        f"'{path}' has model_type={kind!r}, which is not supported; known: {', '.join(known)}.",
    )
    family = known[kind]
    text = family.unwrap(tree)
    for config in (tree, text):
        quantised = config.get("quantization_config")
        check(
            not quantised,
            f"'{path}' has quantization_config={quantised!r}: packed or quantised checkpoints are "
            "not supported; give the original.",
        )
    files, index = _open_files(folder)
    published: dict[str, tuple[str, str]] = {}
    for file, opened in files.items():
        for name in opened.entries:
            if is_aside(name):
                continue
            short = canonical(name)
            check(
                short not in published,
                f"'{folder}' has '{name}' and '{published.get(short, ('', ''))[1]}', which are "
                "the same tensor; remove one of them.",
            )
            published[short] = (file, name)
    flags = [config.get("tie_word_embeddings") for config in (tree, text)]
    told = [flag for flag in flags if flag is not None]
    for flag in told:
        check(
            isinstance(flag, bool), f"'{path}' has tie_word_embeddings={flag!r}; write a boolean."
        )
    tied = any(told) if told else family.tied_by_default
    fields = Fields(text, f"'{path}'")
    model = family.read(fields, tied or HEAD not in published)
    dtype = next((c[n] for c in (text, tree) for n in ("dtype", "torch_dtype") if c.get(n)), None)
    found = Checkpoint(folder, family, model, str(dtype or "float32"), files, index, published)
    found.check_tensors()
    return found


def _open_files(
    folder: pathlib.Path,
) -> tuple[dict[str, safetensors.File], Mapping[str, Any] | None]:
    """The files that hold the tensors: those of the index, or the only one."""
    path = folder / INDEX
    if not path.is_file():
        single = folder / "model.safetensors"
        check(
            single.is_file(),
            f"'{folder}' has neither {INDEX} nor model.safetensors; only safetensors are read.",
        )
        return {single.name: safetensors.File(single)}, None
    index = read_json(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise UserError(f"'{path}' has no weight_map; restore it.")
    files: dict[str, safetensors.File] = {}
    for name in dict.fromkeys(map(str, places.values())):
        check(
            pathlib.PurePath(name).name == name,
            f"'{path}' names the file '{name}', which is not in the same folder; correct it.",
        )
        check(
            (folder / name).is_file(),
            f"'{path}' names the file '{name}', which is not there; download it.",
        )
        files[name] = safetensors.File(folder / name)
    for name, file in places.items():
        check(
            name in files[file].entries,
            f"'{path}' puts tensor '{name}' in '{file}', which does not hold it; download both.",
        )
    for file, opened in files.items():
        for name in opened.entries:
            check(
                places.get(name) == file,
                f"'{folder / file}' holds tensor '{name}', which '{path}' does not know of; "
                "download both.",
            )
    return files, index

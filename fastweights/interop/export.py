"""Writes a run's parameters as a published model: what was imported as it came, or a new folder."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fastweights.errors import check
from fastweights.files import new_folder
from fastweights.interop import safetensors
from fastweights.interop.checkpoint import (
    EMBEDDINGS,
    FAMILIES,
    HEAD,
    INDEX,
    canonical,
    is_aside,
)
from fastweights.interop.express import express
from fastweights.interop.record import TOKENIZER, Record
from fastweights.interop.tensors import Row
from fastweights.model import ModelConfig

SHARD_BYTES = 5 * 10**9
NAMES = {dtype.name: name for name, dtype in safetensors.DTYPES.items()}


def export_imported(params: Any, config: ModelConfig, record: Record, out: pathlib.Path) -> None:
    """Writes `out` with the source's files, names and dtypes, and what was kept aside."""
    family = next(f for f in FAMILIES if record.model_type in f.model_types)
    stored = [pair for told, _ in record.files.values() for pair in told.items()]
    shapes = {canonical(n): e.shape for n, e in stored if not is_aside(n)}
    rows = family.table(config, family.context(config, shapes, record.mlx))
    tensor = tensors_of(params, list(rows))
    with new_folder(out) as partial:
        for path in record.copied:
            shutil.copyfile(path, partial / path.name)
        for file, (told, metadata) in record.files.items():
            aside = record.aside(file)

            def produce(name: str, told=told, aside=aside) -> np.ndarray:
                if is_aside(name):
                    return aside.read(name)
                return _cast(tensor(canonical(name)), told[name].dtype, name)

            safetensors.write(partial / file, told, metadata, produce)


def export_new(
    params: Any,
    config: ModelConfig,
    out: pathlib.Path,
    dtype: str,
    *,
    end_id: int | None = None,
    tokenizer: pathlib.Path | None = None,
) -> str:
    """Writes `out` for a model that was trained from scratch here.

    Args:
      dtype: of the tensors, but for those that a family keeps in float32.
      end_id: of the token that ends a text.
      tokenizer: a tokenizer.json to copy.

    Returns:
      The name of its family.

    Raises:
      UserError: no family has all parts of the model; names those that are missing.
    """
    family, tree = express(config)
    tensors = entries(config, dtype)
    shards = safetensors.split_shards(tensors, SHARD_BYTES)
    tensor = tensors_of(params, list(family.table(config, family.context(config, {}, False))))

    def produce(name: str) -> np.ndarray:
        return _cast(tensor(canonical(name)), tensors[name].dtype, name)

    # Left out, the last three would mean some other model's tokens.
    ends = {"eos_token_id": end_id, "bos_token_id": None, "pad_token_id": None}
    with new_folder(out) as partial:
        written = json.dumps(tree | ends | {"dtype": dtype}, indent=2)
        (partial / "config.json").write_text(written + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / TOKENIZER)
        places = {}
        for i, shard in enumerate(shards, start=1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            file = file if len(shards) > 1 else "model.safetensors"
            safetensors.write(partial / file, shard, {"format": "pt"}, produce)
            places |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(entry.nbytes for entry in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return family.name


def entries(config: ModelConfig, dtype: str) -> dict[str, safetensors.Entry]:
    """What `export_new` writes by name; arguments and errors are its own."""
    family, _ = express(config)
    return {
        _full(family.prefix, name): safetensors.Entry("F32" if row.wide else NAMES[dtype], shape)
        for row in family.table(config, family.context(config, {}, False))
        for name, shape in zip(row.names, row.shapes, strict=True)
    }


def _full(prefix: str, name: str) -> str:
    return name if name == HEAD else prefix + name


def tensors_of(params: Any, rows: list[Row]) -> Callable[[str], np.ndarray]:
    """Parameters (or gradients) as published: a tensor by canonical name, made when asked for."""
    places = {name: (row, i) for row in rows for i, name in enumerate(row.names)}

    def tensor(name: str) -> np.ndarray:
        if name == HEAD and name not in places:  # tied, and written out all the same
            name = next(name for name in EMBEDDINGS if name in places)
        row, i = places[name]
        parts = []
        for param in row.params:
            leaf = functools.reduce(lambda tree, key: tree[key], param.path, params)
            lead = len(param.index)
            if math.prod(leaf.shape[:lead]) == 1:  # an only slice is the whole
                parts.append(np.asarray(leaf).reshape(leaf.shape[lead:]))
            else:
                parts.append(np.asarray(_slice(leaf, param.index)))
        return row.join(parts)[i]

    return tensor


# The index is an argument, so that all layers share one program.
@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def _slice(leaf: jax.Array, index: tuple[int, ...]) -> jax.Array:
    for i in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)
    return leaf


def _cast(tensor: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """The tensor in the dtype it is published in, rounded to nearest."""
    with np.errstate(over="ignore"):
        cast = tensor.astype(safetensors.DTYPES[dtype])
    check(
        dtype != "F16" or bool(np.isfinite(cast).all()) or not np.isfinite(tensor).all(),
        f"tensor '{name}' has grown beyond float16, in which its source keeps it; export it from "
        "an earlier step.",
    )
    return cast

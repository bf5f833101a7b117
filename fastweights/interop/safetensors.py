"""Files of safetensors, read a tensor at a time and written a file at a time by the library.

What is here is what the library does not say in a user's words: which file and tensor is at fault,
and what to do about it.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fastweights.errors import UserError, check

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
# Those that are only passed through.
OTHERS = {"BOOL": np.dtype(np.bool)}
OTHERS |= {f"{k.upper()}{8 * n}": np.dtype(f"{k}{n}") for k in "iu" for n in (1, 2, 4, 8)}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return (DTYPES | OTHERS)[self.dtype].itemsize * math.prod(self.shape)


class File:
    """One file, open: no tensor is read before it is asked for.

    Attributes:
      path: where it is.
      entries: name -> `Entry`, in the order of the bytes.
      metadata: strings by name.

    Raises:
      UserError: no such file, cut short, no safetensors file, or a tensor of a dtype that NumPy
        does not have.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        check(path.is_file(), f"'{path}' is missing; download the whole folder again.")
        try:
            self._file: Any = safe_open(path, "numpy")
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"'{path}' is damaged or no safetensors file ({error}); download it again."
            ) from error
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.entries: dict[str, Entry] = {}
        for name in self._file.offset_keys():
            told = self._file.get_slice(name)
            dtype = told.get_dtype()
            check(dtype in DTYPES or dtype in OTHERS, packed(name, dtype))
            self.entries[name] = Entry(dtype, tuple(told.get_shape()))

    def read(self, name: str) -> np.ndarray:
        """A tensor, copied out of the file."""
        return self._file.get_tensor(name)


def packed(name: str, dtype: str) -> str:
    """Why a tensor of this dtype is refused."""
    return (
        f"tensor '{name}' has dtype {dtype}, so it is packed or quantised, which is not supported; "
        "give the original in float32, bfloat16 or float16."
    )


def write(
    path: pathlib.Path,
    entries: Mapping[str, Entry],
    metadata: Mapping[str, str],
    produce: Callable[[str], np.ndarray],
) -> None:
    """Writes a file; `produce(name)` gives each tensor, in any layout.

    All its tensors are held in memory at once, for so the library wants them; it also orders them
    by dtype and name. The caller writes into a folder that nobody sees before it is whole.
    """
    tensors = {}
    for name, entry in entries.items():
        # Tensors are taken from memory as they lie, whatever their strides.
        tensor = np.require(produce(name), requirements="C")
        told = (DTYPES | OTHERS)[entry.dtype], entry.shape
        assert (tensor.dtype, tensor.shape) == told, (name, tensor.dtype, tensor.shape, entry)
        tensors[name] = tensor
    save_file(tensors, path, dict(metadata) or None)


def split_shards(entries: Mapping[str, Entry], limit: int) -> Sequence[dict[str, Entry]]:
    """Entries in files of at most `limit` bytes each, or of a single larger tensor."""
    shards: list[dict[str, Entry]] = [{}]
    room = limit
    for name, entry in entries.items():
        if shards[-1] and entry.nbytes > room:
            shards.append({})
            room = limit
        shards[-1][name] = entry
        room -= entry.nbytes
    return shards

"""The safetensors format, read and written a tensor at a time.

A file is eight bytes with the length of its header, the header (JSON: name -> dtype, shape and
offsets, and string metadata), then the tensors' bytes, row-major and little-endian. Written here
instead of taken from the library of that name: its writer wants all tensors of a file in memory at
once, and its reader gives bfloat16 only through a framework.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fastweights.errors import UserError, check

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
# Bytes an element of the dtypes that are only passed through.
OTHER_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8}
OTHER_SIZES |= {"I64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
LONGEST_HEADER = 100_000_000  # the library's own limit


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        known = DTYPES.get(self.dtype)
        size = known.itemsize if known else OTHER_SIZES[self.dtype]
        return size * math.prod(self.shape)


class File:
    """One file, mapped into memory: nothing is read before it is asked for.

    Attributes:
      entries: name -> `Entry`, in the order of the bytes.
      metadata: strings by name.

    Raises:
      UserError: no such file, cut short, or no safetensors file.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        check(path.is_file(), f"'{path}' is missing; download the whole folder again.")
        size = path.stat().st_size
        header, start = self._header(size)
        self.metadata = {k: str(v) for k, v in (header.pop("__metadata__", None) or {}).items()}
        self.entries: dict[str, Entry] = {}
        self._offsets: dict[str, int] = {}
        places = []
        for name, told in header.items():
            try:
                dtype, shape = str(told["dtype"]), tuple(int(n) for n in told["shape"])
                begin, end = (start + int(n) for n in told["data_offsets"])
            except (KeyError, TypeError, ValueError) as error:
                raise self._broken(f"the entry of '{name}' can't be read") from error
            if dtype not in DTYPES and dtype not in OTHER_SIZES:
                raise UserError(
                    f"tensor '{name}' in '{path}' has dtype {dtype}, which is not known here; "
                    "give a checkpoint in float32, bfloat16 or float16."
                )
            places.append((begin, end, name, Entry(dtype, shape)))
        for begin, end, name, entry in sorted(places, key=lambda place: place[:2]):
            if min(entry.shape, default=0) < 0 or begin < start or end - begin != entry.nbytes:
                raise self._broken(f"'{name}' does not lie where its header says")
            if end > size:
                raise self._broken(f"it ends inside '{name}': {size:,} of {end:,} bytes")
            self.entries[name], self._offsets[name] = entry, begin
        self._bytes = np.memmap(path, np.uint8, "r")

    def _header(self, size: int) -> tuple[dict[str, Any], int]:
        with self.path.open("rb") as stream:
            first = stream.read(8)
            if len(first) < 8:
                raise self._broken(f"it has {size} bytes")
            (length,) = struct.unpack("<Q", first)
            if length > min(size - 8, LONGEST_HEADER):
                raise self._broken(f"its header of {length:,} bytes does not fit its {size:,}")
            try:
                header = json.loads(stream.read(length))
            except ValueError as error:
                raise self._broken("its header is no JSON") from error
        if not isinstance(header, dict):
            raise self._broken("its header is no JSON object")
        return header, 8 + length

    def _broken(self, reason: str) -> UserError:
        return UserError(
            f"'{self.path}' is damaged or no safetensors file ({reason}); download it again."
        )

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8, not read yet."""
        begin = self._offsets[name]
        return self._bytes[begin : begin + self.entries[name].nbytes]

    def read(self, name: str) -> np.ndarray:
        """A tensor of one of `DTYPES`, not read yet: a view of the mapped file."""
        entry = self.entries[name]
        return self.raw(name).view(DTYPES[entry.dtype]).reshape(entry.shape)


def write(
    path: pathlib.Path,
    entries: Mapping[str, Entry],
    metadata: Mapping[str, str],
    produce: Callable[[str], np.ndarray],
) -> None:
    """Writes a file; `produce(name)` gives each tensor when its turn has come, in any layout.

    The caller writes into a folder that nobody sees before it is whole.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, entry in entries.items():
        end = begin + entry.nbytes
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, entry in entries.items():
            data = np.ascontiguousarray(produce(name)).reshape(-1).view(np.uint8)
            assert data.nbytes == entry.nbytes, (name, data.nbytes, entry)
            stream.write(data)  # type: ignore[arg-type]


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

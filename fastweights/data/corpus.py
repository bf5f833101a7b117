"""A corpus: packed rows of a training and a held-out split, in memory or on disk.

On disk it is a folder with `meta.json`, `train.array_record`, `held_out.array_record` and, unless
the tokenizer is bytes, a copy of its `tokenizer.json`. A record is one row of
`fastweights.data.packing` as little-endian integers. `scripts/prepare_data.py` writes it.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator
from itertools import batched
from typing import Any, Protocol, cast

import grain
import numpy as np

from fastweights.data.packing import pack
from fastweights.data.source import Documents, split_documents
from fastweights.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from fastweights.errors import UserError, check

FORMAT = "fastweights rows"
VERSION = 1
META = "meta.json"
SPLITS = ("train", "held_out")
DTYPES = ("uint16", "uint32")
META_KEYS = {"length": int, "dtype": str, "tokenizer": str, "vocab_size": int, "splits": dict}
SPLIT_KEYS = {
    "file": str, "file_bytes": int, "rows": int, "documents": int, "targets": int, "bytes": int,
}  # fmt: skip


class Rows(Protocol):
    """Random access to packed rows; a list of arrays will do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


@dataclasses.dataclass
class Counts:
    """What a split holds.

    Attributes:
      rows: packed rows.
      documents: documents.
      targets: predicted tokens: every token of every document and an end-of-document token each.
      bytes: UTF-8 bytes of the documents.
    """

    rows: int = 0
    documents: int = 0
    targets: int = 0
    bytes: int = 0

    def bits_per_byte(self, nats_per_target: float) -> float:
        """Bits per byte of text from the mean loss (nats) over *all* targets of the split.

        The bytes are counted in the text itself, so the figure compares across tokenizers.
        End-of-document targets add their loss and no bytes.
        """
        return nats_per_target * self.targets / self.bytes / math.log(2)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Packed text.

    Attributes:
      length: inputs of a row, in tokens.
      tokenizer: what encoded the text.
      rows: packed rows by split ("train", "held_out").
      counts: what each split holds.
    """

    length: int
    tokenizer: Tokenizer
    rows: dict[str, Rows]
    counts: dict[str, Counts]


def pack_documents(
    documents: Iterable[str], tokenizer: Tokenizer, length: int, counts: Counts
) -> Iterator[np.ndarray]:
    """Encodes and packs documents into rows and counts them on the way."""

    def encoded() -> Iterator[np.ndarray]:
        for texts in batched(documents, 256):
            for text, ids in zip(texts, tokenizer.encode_many(texts), strict=True):
                counts.documents += 1
                counts.bytes += len(text.encode())
                counts.targets += len(ids) + 1
                yield ids

    for row in pack(encoded(), length, tokenizer.eod_id):
        counts.rows += 1
        yield row


def corpus_in_memory(
    documents: Documents, *, tokenizer: str, length: int, held_out: float
) -> Corpus:
    """Packs documents without writing them; for corpora of a few megabytes."""
    encoder = load_tokenizer(tokenizer)
    rows: dict[str, Rows] = {}
    counts = {name: Counts() for name in SPLITS}
    for name, part in zip(SPLITS, split_documents(documents, held_out), strict=True):
        rows[name] = list(pack_documents(part(), encoder, length, counts[name]))
    return Corpus(length, encoder, rows, counts)


def open_corpus(path: str) -> Corpus:
    """Opens a prepared corpus and checks that it is whole.

    Raises:
      UserError: if a file is missing, truncated, or disagrees with `meta.json`.
    """
    meta = read_meta(path)
    name = meta["tokenizer"]
    tokenizer = load_tokenizer(name if name == BYTES else os.path.join(path, name))
    check(
        tokenizer.vocab_size == meta["vocab_size"],
        f"{path!r} was prepared with {meta['vocab_size']} token ids but its tokenizer now has "
        f"{tokenizer.vocab_size}; prepare the data again.",
    )
    rows: dict[str, Rows] = {}
    counts = {}
    for split in SPLITS:
        entry = meta["splits"][split]
        file = os.path.join(path, entry["file"])
        rows[split] = _open_rows(file, entry["rows"], entry["file_bytes"], meta["dtype"])
        counts[split] = Counts(
            **{key: entry[key] for key in ("rows", "documents", "targets", "bytes")}
        )
    return Corpus(meta["length"], tokenizer, rows, counts)


def read_meta(path: str) -> dict[str, Any]:
    """The contents of a corpus' `meta.json`.

    Raises:
      UserError: if it is missing, not of this format and version, or lacks what is needed.
    """
    file = os.path.join(path, META)
    remedy = "prepare the data with scripts/prepare_data.py"
    check(os.path.isfile(file), f"There is no {META} in {path!r}; {remedy}.")
    try:
        with open(file, encoding="utf-8") as stream:
            meta = json.load(stream)
    except ValueError as error:
        raise UserError(f"{file!r} is not JSON ({error}); {remedy} again.") from error
    kind = meta.get("format") if isinstance(meta, dict) else None
    check(kind == FORMAT, f"{file!r} describes {kind!r}, not {FORMAT!r}; {remedy}.")
    check(
        meta.get("version") == VERSION,
        f"{file!r} has format version {meta.get('version')} but this code reads {VERSION}; "
        f"{remedy} again.",
    )
    _check_keys(file, "", meta, META_KEYS)
    _check_keys(file, "splits.", meta["splits"], dict.fromkeys(SPLITS, dict))
    for split in SPLITS:
        _check_keys(file, f"splits.{split}.", meta["splits"][split], SPLIT_KEYS)
    check(
        meta["dtype"] in DTYPES,
        f"{file!r} has dtype {meta['dtype']!r}, not one of {', '.join(DTYPES)}; {remedy} again.",
    )
    return meta


def _check_keys(file: str, prefix: str, values: dict[str, Any], kinds: dict[str, type]) -> None:
    remedy = "prepare the data with scripts/prepare_data.py again"
    for key, kind in kinds.items():
        check(key in values, f"{file!r} lacks {prefix + key!r}; {remedy}.")
        check(
            type(values[key]) is kind,
            f"{file!r} has {values[key]!r} for {prefix + key!r}, not of type {kind.__name__}; "
            f"{remedy}.",
        )


class ArrayRecordRows:
    """The rows of an ArrayRecord file.

    Args:
      path: the file.
      dtype: the integers' type, "uint16" or "uint32"; little-endian.
    """

    def __init__(self, path: str, dtype: str):
        records = grain.sources.ArrayRecordDataSource(path)
        self._path = path
        self._records = cast(grain.sources.RandomAccessDataSource[bytes], records)
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int, /) -> np.ndarray:
        try:
            record = self._records[index]
        except RuntimeError as error:  # The reader's error for bytes that fail their checksum.
            raise UserError(
                f"Row {index} of the data file {self._path!r} can't be read ({error}); copy the "
                "file again or prepare the data again."
            ) from error
        return np.frombuffer(record, self._dtype)


def _open_rows(file: str, rows: int, file_bytes: int, dtype: str) -> ArrayRecordRows:
    check(
        os.path.isfile(file),
        f"The data file {file!r} is missing; copy it again or prepare the data again.",
    )
    seen = os.path.getsize(file)
    check(
        seen == file_bytes,
        f"The data file {file!r} has {seen} bytes but {META} says {file_bytes}; it is truncated or "
        "changed, so copy it again or prepare the data again.",
    )
    try:
        opened = ArrayRecordRows(file, dtype)
        count = len(opened)
    except Exception as error:  # The reader's errors share no class of their own.
        raise UserError(
            f"The data file {file!r} is no readable ArrayRecord ({error}); copy it again or "
            "prepare the data again."
        ) from error
    check(
        count == rows,
        f"The data file {file!r} holds {count} rows but {META} says {rows}; copy it again or "
        "prepare the data again.",
    )
    return opened

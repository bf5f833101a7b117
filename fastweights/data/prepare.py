"""Writes a corpus to disk, whole or not at all."""

import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from fastweights.data.corpus import (
    FORMAT,
    META,
    SPLITS,
    VERSION,
    Counts,
    open_corpus,
    pack_documents,
    read_meta,
)
from fastweights.data.source import Documents, split_documents
from fastweights.data.tokenizer import BYTES, TOKENIZER, Tokenizer, load_tokenizer
from fastweights.errors import check
from fastweights.files import new_folder


def prepare_corpus(
    documents: Documents,
    out: str,
    *,
    length: int,
    tokenizer: str = BYTES,
    held_out: float = 0.01,
) -> dict[str, Any]:
    """Splits, encodes and packs documents and writes them to the folder `out`.

    The files are written to a hidden folder beside `out`, opened once, and moved into place at the
    end: a folder named `out` is always complete.

    Args:
      documents: starts a pass over the documents; it is called several times.
      out: a folder that does not exist yet.
      length: inputs of a row, in tokens.
      tokenizer: "bytes" or the path of a tokenizer.json, which is copied into `out`.
      held_out: share of the documents to hold out.

    Returns:
      What `meta.json` says.

    Raises:
      UserError: for bad arguments, bad input, or an `out` that exists or cannot be written.
    """
    check(length >= 1, f"The row length is {length}; it must be at least 1 token.")
    with new_folder(pathlib.Path(out)) as partial:
        encoder = load_tokenizer(tokenizer)
        parts = dict(zip(SPLITS, split_documents(documents, held_out), strict=True))
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "length": length,
            "dtype": "uint16" if encoder.vocab_size <= 2**16 else "uint32",
            "tokenizer": BYTES if tokenizer == BYTES else TOKENIZER,
            "vocab_size": encoder.vocab_size,
            "eod_id": encoder.eod_id,
            "splits": {},
        }
        if tokenizer != BYTES:
            shutil.copyfile(tokenizer, partial / TOKENIZER)
        for name, part in parts.items():
            path = partial / f"{name}.array_record"
            counts = _write_rows(str(path), part, encoder, length, meta["dtype"])
            meta["splits"][name] = {
                "file": path.name,
                "file_bytes": path.stat().st_size,
                **vars(counts),
            }
        with (partial / META).open("w", encoding="utf-8") as stream:
            json.dump(meta, stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())
        open_corpus(str(partial))  # A disk that filled up unnoticed shows here, before the move.
    return read_meta(out)


def _write_rows(
    path: str, documents: Documents, tokenizer: Tokenizer, length: int, dtype: str
) -> Counts:
    counts = Counts()
    # One record a group: a row is read without its neighbours.
    writer = ArrayRecordWriter(path, "group_size:1")
    try:
        try:
            for row in pack_documents(documents(), tokenizer, length, counts):
                writer.write(row.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
                if not writer.ok():  # A full disk, say; closing the writer raises what it was.
                    break
        finally:
            writer.close()
    except RuntimeError as error:  # The record writer knows only this one.
        raise OSError(str(error)) from error
    return counts

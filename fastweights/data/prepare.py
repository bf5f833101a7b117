"""Writes a corpus to disk, whole or not at all."""

import json
import os
import shutil
import tempfile
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
from fastweights.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from fastweights.errors import UserError, check


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
    out = os.path.abspath(out)
    check(
        not os.path.exists(out),
        f"The output {out!r} exists already; name a new folder or remove it.",
    )
    encoder = load_tokenizer(tokenizer)
    parts = dict(zip(SPLITS, split_documents(documents, held_out), strict=True))
    try:
        os.makedirs(os.path.dirname(out), exist_ok=True)
        partial = tempfile.mkdtemp(prefix=f".{os.path.basename(out)}.", dir=os.path.dirname(out))
    except OSError as error:
        raise UserError(
            f"The output {out!r} cannot be written ({error.strerror}); name another folder."
        ) from error
    try:
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "length": length,
            "dtype": "uint16" if encoder.vocab_size <= 2**16 else "uint32",
            "tokenizer": BYTES if tokenizer == BYTES else "tokenizer.json",
            "vocab_size": encoder.vocab_size,
            "eod_id": encoder.eod_id,
            "splits": {},
        }
        if tokenizer != BYTES:
            shutil.copyfile(tokenizer, os.path.join(partial, "tokenizer.json"))
        for name, part in parts.items():
            file = f"{name}.array_record"
            path = os.path.join(partial, file)
            counts = _write_rows(path, part, encoder, length, meta["dtype"])
            meta["splits"][name] = {
                "file": file,
                "file_bytes": os.path.getsize(path),
                **vars(counts),
            }
        with open(os.path.join(partial, META), "w", encoding="utf-8") as stream:
            json.dump(meta, stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())
        open_corpus(partial)  # A disk that filled up unnoticed shows here, before the move.
        os.chmod(partial, 0o777 & ~_umask())  # mkdtemp's folders are for their owner alone.
        os.rename(partial, out)
    except (OSError, RuntimeError) as error:  # The record writer knows only RuntimeError.
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"Writing {out!r} failed ({error}); free space or name another folder."
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return read_meta(out)


def _write_rows(
    path: str, documents: Documents, tokenizer: Tokenizer, length: int, dtype: str
) -> Counts:
    counts = Counts()
    # One record a group: a row is read without its neighbours.
    writer = ArrayRecordWriter(path, "group_size:1")
    try:
        for row in pack_documents(documents(), tokenizer, length, counts):
            writer.write(row.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            if not writer.ok():  # A full disk, say; closing the writer raises what it was.
                break
    finally:
        writer.close()
    return counts


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Documents: where they are read from and which of them are held out.

A document is a string. Plain text files are one document each (or several, with a separator), JSONL
files one a line, parquet files one a row.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence

from fastweights.errors import UserError, check

Documents = Callable[[], Iterator[str]]
"""Starts a fresh pass over the documents, always in the same order."""


def read_documents(
    paths: Sequence[str], *, text_field: str = "text", separator: str = ""
) -> Iterator[str]:
    """Yields the documents of the files in order; empty ones are left out.

    Args:
      paths: `.jsonl`, `.parquet`, or anything else as UTF-8 text.
      text_field: the field (JSONL) or column (parquet) that holds the text.
      separator: if given, text files are cut into documents wherever it stands.

    Raises:
      UserError: naming the file (and line) that cannot be read, and why.
    """
    for path in paths:
        check(os.path.exists(path), f"There is no input file {path!r}; check the path.")
        check(
            not os.path.isdir(path),
            f"The input {path!r} is a folder; name its files, such as {path.rstrip('/')}/*.txt.",
        )
        suffix = os.path.splitext(path)[1].lower()
        if suffix == ".jsonl":
            found = _read_jsonl(path, text_field)
        elif suffix == ".parquet":
            found = _read_parquet(path, text_field)
        else:
            found = _read_text(path, separator)
        for text in filter(None, found):
            check(
                _encodes(text),
                f"{path!r} has a document with half a surrogate pair, which is no text; mend it.",
            )
            yield text


def builtin_documents() -> Iterator[str]:
    """The English help text that ships inside CPython (`pydoc_data.topics`), by name of topic.

    About 0.4 MB; its exact content depends on the version of Python. Topics share whole sections
    (more than half of a topic's text may stand in another one too), so each paragraph is kept where
    it comes first and nowhere else: held-out topics would be no test otherwise.
    """
    from pydoc_data import topics

    seen = set()
    for _, text in sorted(topics.topics.items()):
        fresh = []
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())  # The same section may be indented otherwise.
            if words and words not in seen:
                fresh.append(paragraph)
                seen.add(words)
        if fresh:
            yield "\n\n".join(fresh)


def _read_text(path: str, separator: str) -> Iterator[str]:
    try:
        # Without newline="" the text read would differ from the file's bytes, which are counted.
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path!r} is not UTF-8 text (byte {error.start}); unpack or convert it, "
            "or give JSONL or parquet."
        ) from error
    yield from text.split(separator) if separator else (text,)


def _read_jsonl(path: str, text_field: str) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"Line {number} of {path!r}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where} is not JSON ({error}); mend or remove it.") from error
            fields = ", ".join(map(repr, record)) if isinstance(record, dict) else "no fields"
            check(
                isinstance(record, dict) and text_field in record,
                f"{where} has no field {text_field!r} but {fields}; name another as text field.",
            )
            check(
                isinstance(record[text_field], str),
                f"{where} holds {type(record[text_field]).__name__} in {text_field!r}, not text; "
                "name another text field or mend the line.",
            )
            yield record[text_field]


def _read_parquet(path: str, text_field: str) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            f"Reading {path!r} needs pyarrow; install it with: pip install 'fastweights[parquet]'."
        ) from error
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            check(
                text_field in names,
                f"{path!r} has no column {text_field!r} but {', '.join(map(repr, names))}; "
                "name another as text field.",
            )
            for batch in file.iter_batches(columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    check(
                        text is None or isinstance(text, str),
                        f"{path!r} holds {type(text).__name__} in {text_field!r}, not text; "
                        "name another text field.",
                    )
                    yield text or ""
    except pa.ArrowException as error:
        raise UserError(f"{path!r} is no readable parquet file ({error}); replace it.") from error


def split_documents(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """Splits into (train, held out) so that about `share` of the documents is held out.

    A hash of the text decides, so the order of the files does not matter and copies of a document
    fall on one side. Both parts get at least one document. A lone document is cut in two at a
    line's end, its last `share` held out.

    Raises:
      UserError: if there is no text, or all documents are copies of one too short to cut.
    """
    check(
        0 < share < 1,
        f"The held-out share is {share}; it must lie between 0 and 1, for example 0.01.",
    )
    hashes = sorted({_hash(text) for text in documents()})
    check(bool(hashes), "The input holds no text; give files with at least one document.")
    if len(hashes) == 1:
        text = next(documents())
        cut = text.rfind("\n", 0, int(len(text) * (1 - share))) + 1
        check(
            0 < cut < len(text),
            f"The input is one document of {len(text)} characters that cannot be cut at a line's "
            "end into a training and a held-out part; give more text.",
        )
        return (lambda: iter((text[:cut],))), (lambda: iter((text[cut:],)))
    count = min(max(1, round(share * len(hashes))), len(hashes) - 1)
    limit = hashes[count - 1]
    return (
        lambda: (text for text in documents() if _hash(text) > limit),
        lambda: (text for text in documents() if _hash(text) <= limit),
    )


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

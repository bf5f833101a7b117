"""Documents to rows of fixed length, and rows to batches.

All documents form one stream in which an end-of-document token opens each document and one more
closes the last:

    eod a b c eod d e eod

Row i holds the tokens i*T .. i*T + T of the stream: T inputs, and T targets one further on. So
every token is predicted exactly once, the first of a document from the eod that opens it; the last
token of a document predicts the next eod; nothing is predicted from another document's tokens, for
a new segment begins at each eod. A document that does not fit continues in the next row, there as a
segment of its own without the earlier part in view. Only the last row of a stream may be shorter.

Because the eod token occurs nowhere else, segment ids and positions follow from the tokens and are
not stored.

Array legend: R rows, T inputs of a row.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

Batch = dict[str, np.ndarray]


def pack(documents: Iterable[np.ndarray], length: int, eod_id: int) -> Iterator[np.ndarray]:
    """Yields rows of `length + 1` tokens; the last may have fewer, but at least 2."""
    buffer: list[np.ndarray] = []
    size = 0

    def full_rows() -> Iterator[np.ndarray]:
        nonlocal buffer, size
        stream = np.concatenate(buffer)
        start = 0
        while len(stream) - start > length:
            yield stream[start : start + length + 1]
            start += length
        # The last token of a row is also the first of the next: here a target, there an input.
        buffer, size = [stream[start:]], len(stream) - start

    for document in documents:
        buffer += [np.array([eod_id]), document]
        size += 1 + len(document)
        if size > length:
            yield from full_rows()
    buffer.append(np.array([eod_id]))
    yield from full_rows()
    if size > 1:
        yield buffer[0]


def unpack(rows: Iterable[np.ndarray], eod_id: int) -> Iterator[np.ndarray]:
    """The documents whose `pack` gave these rows."""
    pieces = [row if i == 0 else row[1:] for i, row in enumerate(rows)]
    stream = np.concatenate(pieces)
    edges = np.flatnonzero(stream == eod_id)
    for start, stop in itertools.pairwise(edges):
        yield stream[start + 1 : stop]


def to_batch(rows: Sequence[np.ndarray], length: int, eod_id: int) -> Batch:
    """Makes `tokens`, `targets`, `segment_ids`, `positions` (int32 [R, T]) out of packed rows.

    What a row lacks in length is padding (segment 0, target -1); an empty row is all padding.
    """
    padded = np.zeros((len(rows), length + 1), np.int32)
    size_R = np.array([len(row) for row in rows], np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    place_T = np.arange(length, dtype=np.int32)[None, :]
    real_RT = place_T < size_R[:, None] - 1
    tokens_RT = np.where(real_RT, padded[:, :-1], 0)
    opens_RT = real_RT & ((tokens_RT == eod_id) | (place_T == 0))
    segment_ids_RT = np.where(real_RT, np.cumsum(opens_RT, axis=1, dtype=np.int32), 0)
    start_RT = np.maximum.accumulate(np.where(opens_RT, place_T, 0), axis=1)
    return {
        "tokens": tokens_RT,
        "targets": np.where(real_RT, padded[:, 1:], -1).astype(np.int32),
        "segment_ids": segment_ids_RT,
        "positions": np.where(real_RT, place_T - start_RT, 0).astype(np.int32),
    }

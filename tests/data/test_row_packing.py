"""Packing against a slow, plain statement of what a row is."""

import numpy as np
import pytest

from fastweights.data.packing import pack, to_batch, unpack

EOD = 99
DOCUMENTS = {
    "mixed": [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [], [15, 16]],
    "one": [list(range(20))],
    "exact": [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
    "single token": [[1]],
}


def arrays(documents):
    return [np.array(document, np.int64) for document in documents]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 100])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_rows_are_windows_of_the_stream_and_unpack(name, length):
    documents = DOCUMENTS[name]
    stream = [token for document in documents for token in (EOD, *document)] + [EOD]
    rows = list(pack(arrays(documents), length, EOD))
    targets = len(stream) - 1
    assert [row.tolist() for row in rows] == [
        stream[start : start + length + 1] for start in range(0, targets, length)
    ]
    assert all(len(row) == length + 1 for row in rows[:-1]) and len(rows[-1]) >= 2
    assert [document.tolist() for document in unpack(rows, EOD)] == documents


@pytest.mark.parametrize("length", [1, 3, 4, 8, 100])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_batches_isolate_documents_and_predict_every_token_once(name, length):
    documents = DOCUMENTS[name]
    rows = list(pack(arrays(documents), length, EOD))
    batch = to_batch(rows, length, EOD)
    assert {key: (x.shape, x.dtype) for key, x in batch.items()} == {
        key: ((len(rows), length), np.int32)
        for key in ("tokens", "targets", "segment_ids", "positions")
    }
    # Which document an input belongs to and the token after it, in stream order.
    owner = [d for d, document in enumerate(documents) for _ in range(len(document) + 1)]
    after = [token for document in documents for token in (*document, EOD)]
    real = batch["segment_ids"] > 0
    assert batch["targets"][real].tolist() == after
    assert (batch["targets"][~real] == -1).all() and (batch["tokens"][~real] == 0).all()
    owner_RT = np.full(real.shape, -1)
    owner_RT[real] = owner
    for owners, ids, positions in zip(
        owner_RT, batch["segment_ids"], batch["positions"], strict=True
    ):
        segment = place = 0
        previous = None
        for t in range(length):
            if owners[t] < 0:
                assert ids[t] == positions[t] == 0
                continue
            segment, place = (segment, place + 1) if owners[t] == previous else (segment + 1, 0)
            previous = owners[t]
            assert (ids[t], positions[t]) == (segment, place)


def test_an_empty_row_is_padding():
    batch = to_batch([np.array([EOD, 1, EOD]), np.zeros(0, np.int32)], 2, EOD)
    assert batch["segment_ids"].tolist() == [[1, 1], [0, 0]]
    assert batch["targets"].tolist() == [[1, EOD], [-1, -1]]


def test_packing_reads_no_further_than_it_must():
    """A corpus larger than memory passes through: rows come before the documents end."""

    def endless():
        while True:
            yield np.arange(10)

    rows = pack(endless(), 16, EOD)
    assert [len(next(rows)) for _ in range(5)] == [17] * 5

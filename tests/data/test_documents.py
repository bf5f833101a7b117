import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastweights.data.source import builtin_documents, read_documents, split_documents
from fastweights.errors import UserError

TEXTS = ["one\r\ntwo\n", "", "Ä → 漢", "last"]
KEPT = [text for text in TEXTS if text]


def write(folder, kind, texts, field="text"):
    """Writes the texts as one file of this kind; its path."""
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        lines = [json.dumps({"id": i, field: text}) for i, text in enumerate(texts)]
        path.write_text("\n\n".join(lines))
    elif kind == "parquet":
        pq.write_table(pa.table({"id": range(len(texts)), field: texts}), path)
    else:
        path.write_bytes("|".join(texts).encode())
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_files_give_their_documents_in_order(tmp_path, kind):
    path = write(tmp_path, kind, TEXTS, "body")
    found = list(read_documents([path, path], text_field="body", separator="|"))
    assert found == KEPT + KEPT


def test_a_text_file_is_one_document(tmp_path):
    assert list(read_documents([write(tmp_path, "md", TEXTS)])) == ["|".join(TEXTS)]


def test_missing_texts_in_parquet_are_left_out(tmp_path):
    assert list(read_documents([write(tmp_path, "parquet", ["a", None, "b"])])) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gone.txt", None, "no input file .*gone.txt"),
        ("folder", "/", "is a folder; name its files"),
        ("raw.txt", b"ab\xff", r"raw.txt' is not UTF-8 text \(byte 2\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', "Line 2 of .*a.jsonl' is not JSON"),
        ("a.jsonl", b"\xff", "Line 1 of .*a.jsonl' is not JSON"),
        ("a.jsonl", b'{"id": 1, "body": "b"}', "no field 'text' but 'id', 'body'"),
        ("a.jsonl", b'["text"]', "no field 'text' but no fields"),
        ("a.jsonl", b'{"text": 3}', "holds int in 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}', "half a surrogate pair"),
        ("a.parquet", b"PAR1", "no readable parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, says):
    path = tmp_path / name
    if content == "/":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        list(read_documents([str(path)]))


@pytest.mark.parametrize(
    ("column", "says"),
    [({"body": ["a"]}, "no column 'text' but 'body'"), ({"text": [1]}, "holds int in 'text'")],
)
def test_bad_parquet_columns_are_named(tmp_path, column, says):
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table(column), path)
    with pytest.raises(UserError, match=says):
        list(read_documents([path]))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path, "parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pyarrow; install it with: pip install"):
        list(read_documents([path]))


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("count", [2, 3, 10, 1000])
def test_a_split_is_disjoint_whole_and_of_the_share_asked_for(count, share):
    texts = [f"document {i}" for i in range(count)]
    train, held_out = (list(part()) for part in split_documents(lambda: iter(texts), share))
    assert sorted(train + held_out) == sorted(texts)
    assert len(held_out) == min(max(1, round(share * count)), count - 1)
    assert train == [text for text in texts if text in set(train)], "order is kept"


def test_a_split_depends_on_texts_not_on_their_order_or_copies():
    texts = [f"document {i}" for i in range(50)]
    _, held_out = split_documents(lambda: iter(texts), 0.2)
    train2, held_out2 = split_documents(lambda: iter(texts[::-1] * 3), 0.2)
    assert sorted(list(held_out()) * 3) == sorted(held_out2())
    assert set(train2()).isdisjoint(held_out2())


def test_a_lone_document_is_cut_at_a_line():
    text = "".join(f"line {i}\n" for i in range(100))
    train, held_out = (next(part()) for part in split_documents(lambda: iter([text]), 0.1))
    assert train + held_out == text
    assert train.endswith("\n") and 0.05 < len(held_out) / len(text) < 0.15


@pytest.mark.parametrize(
    ("texts", "share", "says"),
    [
        ([], 0.1, "holds no text"),
        (["one line only"], 0.1, "one document of 13 characters that cannot be cut"),
        (["a", "b"], 0.0, "held-out share is 0.0"),
        (["a", "b"], 1.0, "held-out share is 1.0"),
    ],
)
def test_what_cannot_be_split_is_named(texts, share, says):
    with pytest.raises(UserError, match=says):
        split_documents(lambda: iter(texts), share)


def test_the_builtin_text_is_there_and_steady():
    texts = list(builtin_documents())
    assert texts == list(builtin_documents())
    assert len(texts) > 50 and sum(map(len, texts)) > 300_000


def test_held_out_topics_of_the_builtin_text_do_not_stand_in_the_training_text():
    """CPython's topics repeat each other's sections; as they come, 59% of this would be found."""
    train, held_out = split_documents(builtin_documents, 0.1)

    def pieces(texts, size=64):
        return [text[i : i + size] for text in texts for i in range(len(text) - size)]

    known = set(pieces(train()))
    unseen = pieces(held_out())
    assert len(unseen) > 10_000
    # What is left are rules of tables and the like.
    assert sum(piece in known for piece in unseen) < 0.05 * len(unseen)

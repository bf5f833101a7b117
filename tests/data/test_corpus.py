"""A corpus on disk: what went in comes out, and what is broken is refused with its cause."""

import dataclasses
import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastweights.data.corpus import Counts, corpus_in_memory, open_corpus
from fastweights.data.packing import unpack
from fastweights.data.prepare import prepare_corpus
from fastweights.errors import UserError

ROOT = Path(__file__).parents[2]


def texts_of(corpus, split):
    rows = [corpus.rows[split][i] for i in range(len(corpus.rows[split]))]
    return [corpus.tokenizer.decode(ids) for ids in unpack(rows, corpus.tokenizer.eod_id)]


@pytest.fixture(params=["bytes", "json"])
def tokenizer(request):
    return "bytes" if request.param == "bytes" else request.getfixturevalue("tokenizer_json")


@pytest.mark.parametrize("length", [7, 64, 100_000])
def test_documents_survive_the_round_trip(documents, tokenizer, length, tmp_path):
    out = str(tmp_path / "new" / "corpus")
    options = {"tokenizer": tokenizer, "length": length, "held_out": 0.2}
    meta = prepare_corpus(lambda: iter(documents), out, **options)
    corpus = open_corpus(out)
    assert sorted(texts_of(corpus, "train") + texts_of(corpus, "held_out")) == sorted(documents)
    assert len(texts_of(corpus, "held_out")) == 12
    assert os.listdir(tmp_path / "new") == ["corpus"], "no scratch folder stays"
    for split, counts in corpus.counts.items():
        texts = texts_of(corpus, split)
        assert counts.documents == len(texts)
        assert counts.bytes == sum(len(text.encode()) for text in texts)
        ids = corpus.tokenizer.encode_many(texts)
        assert counts.targets == sum(map(len, ids)) + len(texts)
        assert counts.rows == len(corpus.rows[split]) == math.ceil(counts.targets / length)
        assert {**meta["splits"][split]}.items() >= dataclasses.asdict(counts).items()

    in_memory = corpus_in_memory(lambda: iter(documents), **options)
    assert in_memory.counts == corpus.counts
    for split, rows in in_memory.rows.items():
        for i in range(len(rows)):
            np.testing.assert_array_equal(rows[i], corpus.rows[split][i])


@pytest.mark.parametrize(("vocab", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_ids_are_stored_as_small_as_they_fit(vocab, dtype, tmp_path, monkeypatch):
    class Wide:
        vocab_size, eod_id = vocab, vocab - 1

        def encode_many(self, texts):
            return [np.array([vocab - 2, 0, int(text)]) for text in texts]

    for module in ("prepare", "corpus"):
        monkeypatch.setattr(f"fastweights.data.{module}.load_tokenizer", lambda _: Wide())
    out = str(tmp_path / "corpus")
    assert prepare_corpus(lambda: iter("1234"), out, length=8)["dtype"] == dtype
    corpus = open_corpus(out)
    rows = [corpus.rows["train"][i] for i in range(2)]
    assert [ids[:2].tolist() for ids in unpack(rows, vocab - 1)] == [[vocab - 2, 0]] * 3


def test_bits_per_byte_is_the_loss_of_the_whole_text_over_its_bytes():
    counts = Counts(rows=1, documents=2, targets=30, bytes=100)
    total_nats = 30 * 1.7
    assert counts.bits_per_byte(1.7) == pytest.approx(total_nats / math.log(2) / 100)
    # A uniform guess among 2**8 tokens at a byte each, ends of documents aside, is 8 bits a byte.
    assert Counts(targets=100, bytes=100).bits_per_byte(math.log(256)) == pytest.approx(8)


@pytest.fixture
def corpus_folder(documents, tokenizer_json, tmp_path):
    out = tmp_path / "corpus"
    prepare_corpus(lambda: iter(documents), str(out), length=32, tokenizer=tokenizer_json)
    return out


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def scramble(path):
    path.write_bytes(bytes(path.stat().st_size))


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop_a_row(path):
    meta = json.loads(path.read_text())
    meta["splits"]["train"]["rows"] += 1
    path.write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("meta.json", Path.unlink, "no meta.json in .*corpus"),
        ("meta.json", cut, "is not JSON"),
        ("meta.json", lambda path: edit(path, format="x"), "describes 'x'"),
        ("meta.json", lambda path: edit(path, version=0), "format version 0"),
        ("meta.json", lambda path: edit(path, vocab_size=9), "prepared with 9 token ids"),
        ("meta.json", lambda path: edit(path, dtype="int8"), "has dtype .int8., not one of uint16"),
        ("meta.json", drop_a_row, r"train.array_record' holds \d+ rows but meta.json says \d+"),
        ("tokenizer.json", Path.unlink, "no tokenizer file"),
        ("train.array_record", Path.unlink, "train.array_record' is missing"),
        ("train.array_record", cut, r"has \d+ bytes but meta.json says \d+; it is truncated"),
        ("held_out.array_record", cut, "held_out.array_record' has .* truncated"),
        ("held_out.array_record", scramble, "no readable ArrayRecord"),
    ],
)
def test_damage_is_named(corpus_folder, file, damage, says):
    damage(corpus_folder / file)
    with pytest.raises(UserError, match=says):
        open_corpus(str(corpus_folder))


@pytest.mark.parametrize(
    "path",
    [
        *("length", "dtype", "tokenizer", "vocab_size", "splits", "splits.train"),
        *(f"splits.held_out.{key}" for key in ("file", "file_bytes", "rows", "bytes")),
    ],
)
def test_a_missing_or_mistyped_key_of_meta_is_named(corpus_folder, path):
    file = corpus_folder / "meta.json"
    meta = json.loads(file.read_text())
    *parents, key = path.split(".")
    holder = meta
    for name in parents:
        holder = holder[name]
    holder[key] = None
    file.write_text(json.dumps(meta))
    with pytest.raises(UserError, match=f"has None for '{path}'"):
        open_corpus(str(corpus_folder))
    del holder[key]
    file.write_text(json.dumps(meta))
    with pytest.raises(UserError, match=f"meta.json' lacks '{path}'; prepare the data"):
        open_corpus(str(corpus_folder))


def test_a_row_whose_bytes_changed_is_named(corpus_folder):
    file = corpus_folder / "train.array_record"
    content = bytearray(file.read_bytes())
    content[110] ^= 255  # In the first record: headers end at byte 104.
    file.write_bytes(content)
    rows = open_corpus(str(corpus_folder)).rows["train"]
    assert len(rows[1]) > 0, "the other rows can still be read"
    with pytest.raises(UserError, match=r"Row 0 of the data file '.*train.array_record' can't"):
        rows[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 0}, "row length is 0"),
        ({"held_out": 2.0}, "held-out share is 2.0"),
        ({"tokenizer": "gone.json"}, "no tokenizer file 'gone.json'"),
        ({"out": "file/corpus"}, "cannot be written"),
        ({"out": "file"}, "exists already"),
    ],
)
def test_bad_arguments_write_nothing(documents, options, says, tmp_path):
    (tmp_path / "file").write_text("")
    options = {"length": 8, "out": "corpus", **options}
    options["out"] = str(tmp_path / options["out"])
    with pytest.raises(UserError, match=says):
        prepare_corpus(lambda: iter(documents), **options)
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_midway_leaves_nothing(documents, tmp_path):
    passes = iter([documents, documents, documents[:5]])

    def read():
        yield from next(passes)
        if len(list(documents)) and passes.__length_hint__() == 0:
            raise UserError("Line 6 is broken.")

    with pytest.raises(UserError, match="Line 6"):
        prepare_corpus(read, str(tmp_path / "corpus"), length=8)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the full disk."""
    texts = [np.random.default_rng(i).bytes(3000).hex() for i in range(100)]
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        with pytest.raises(UserError, match=r"Writing .*corpus' failed .*File too large"):
            prepare_corpus(lambda: iter(texts), str(tmp_path / "corpus"), length=64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []


def run_script(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_the_script_prepares_and_sums_up(tmp_path):
    lines = [json.dumps({"body": f"document {i}"}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("text one\n\ntext two")
    out = tmp_path / "corpus"
    done = run_script(
        *("--input", tmp_path / "a.jsonl", tmp_path / "b.txt", "--out", out, "--length", 16),
        *("--text_field", "body", "--separator", r"\n\n", "--held_out", 0.1),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "20 documents" in done.stdout and "2 documents" in done.stdout
    corpus = open_corpus(str(out))
    texts = texts_of(corpus, "train") + texts_of(corpus, "held_out")
    assert sorted(texts) == sorted([f"document {i}" for i in range(20)] + ["text one", "text two"])
    assert corpus.length == 16


def test_the_script_fails_with_one_sentence(tmp_path):
    done = run_script("--input", tmp_path / "gone.txt", "--out", tmp_path / "o", "--length", 8)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: There is no input file")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "o").exists()

"""Datasets: pure functions of (seed, index), the same for any number of processes, resumable."""

import itertools
import math
from pathlib import Path

import grain
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from fastweights.data import (
    DataConfig,
    TextConfig,
    eval_datasets,
    iterate,
    open_text,
    train_dataset,
    vocab_size,
)
from fastweights.data.packing import unpack
from fastweights.data.prepare import prepare_corpus
from fastweights.errors import UserError
from fastweights.tasks import MQARConfig

MQAR = MQARConfig(
    vocab_size=96,
    train=((32, 4, 2), (64, 8, 1)),
    test=((32, 8), (64, 16), (80, 8)),
    test_examples=9,
)


@pytest.fixture(scope="session")
def prepared(documents, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("data") / "corpus")
    prepare_corpus(lambda: iter(documents), out, length=64, held_out=0.2)
    return out


@pytest.fixture(params=["builtin", "prepared"])
def text_config(request, prepared):
    text = TextConfig(path=prepared if request.param == "prepared" else "")
    return DataConfig(kind="text", length=64, mqar=MQAR, text=text)


@pytest.fixture(params=["mqar", "builtin", "prepared"])
def config(request, prepared):
    text = TextConfig(path=prepared if request.param == "prepared" else "")
    kind = "mqar" if request.param == "mqar" else "text"
    return DataConfig(kind=kind, length=64, mqar=MQAR, text=text)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
        assert a[name].dtype == b[name].dtype == np.int32


def test_batches_have_the_shape_and_ids_promised(config):
    for dataset in (train_dataset(config, seed=0, rows=6), *eval_datasets(config, rows=6).values()):
        batch = dataset[0]
        shape = batch["tokens"].shape
        assert shape[0] == 6 and shape[1] in (64, 80)
        assert set(batch) == {"tokens", "targets", "segment_ids", "positions"}
        assert all(values.shape == shape for values in batch.values())
        real = batch["segment_ids"] > 0
        assert batch["tokens"].min() >= 0 and batch["tokens"].max() < vocab_size(config)
        assert batch["targets"].min() >= -1 and batch["targets"].max() < vocab_size(config)
        assert (batch["targets"][~real] == -1).all() and (batch["tokens"][~real] == 0).all()
        assert (batch["targets"] >= 0).any()


def test_any_batch_can_be_had_alone_and_seeds_differ(config):
    def first(seed):
        return [train_dataset(config, seed=seed, rows=4)[i] for i in (0, 1, 5, 1000)]

    for a, b in zip(first(3), first(3), strict=True):
        same(a, b)
    tokens = [batch["tokens"].tobytes() for seed in (3, 4) for batch in first(seed)]
    assert len(set(tokens)) == 8
    in_order = list(itertools.islice(iterate(train_dataset(config, seed=3, rows=4)), 6))
    same(in_order[5], first(3)[2])


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_same_global_batches(config, count):
    def datasets(**process):
        yield train_dataset(config, seed=1, rows=8, **process)
        yield from eval_datasets(config, rows=8, **process).values()

    whole = list(datasets())
    parts = [list(datasets(process_index=i, process_count=count)) for i in range(count)]
    for d, dataset in enumerate(whole):
        for i in (0, 1, 17) if d == 0 else range(len(dataset)):
            joined = {
                name: np.concatenate([part[d][i][name] for part in parts]) for name in dataset[i]
            }
            same(joined, dataset[i])


def test_every_row_comes_once_an_epoch_in_another_order(prepared):
    config = DataConfig(kind="text", length=64, text=TextConfig(prepared))
    rows = open_text(config).rows["train"]
    count = len(rows)
    batches = math.lcm(count, 8) // 8
    dataset = train_dataset(config, seed=0, rows=8)
    drawn = np.concatenate([dataset[i]["targets"] for i in range(batches)])
    epochs = [[row.tobytes() for row in epoch] for epoch in drawn.reshape(-1, count, 64)]
    assert len(epochs) >= 2 and count % 8, "epochs that end inside a batch"
    assert len(set(epochs[0])) == count
    for epoch in epochs[1:]:
        assert sorted(epoch) == sorted(epochs[0]) and epoch != epochs[0]
    # Another seed is another order, not this one's later epoch.
    other = np.concatenate([train_dataset(config, seed=1, rows=8)[i]["targets"] for i in range(4)])
    assert [row.tobytes() for row in other] not in [epoch[:32] for epoch in epochs]


def test_an_iterator_resumes_at_every_step(config):
    dataset = train_dataset(config, seed=2, rows=2)[:5]
    grain.experimental.assert_equal_output_after_checkpoint(
        dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    )


def test_orbax_saves_the_place_and_a_step_number_finds_it(config, tmp_path):
    dataset = train_dataset(config, seed=2, rows=2)
    iterator = iterate(dataset)
    for _ in range(7):
        next(iterator)
    assert iterator.get_state() == {"next_index": 7}
    with ocp.training.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save_checkpointables(7, {"data": iterator})
        ahead = [next(iterator) for _ in range(3)]
        restored = iterate(dataset)
        checkpointer.load_checkpointables(7, {"data": restored})
    moved = iterate(dataset)
    grain.experimental.set_next_index(moved, 7)
    for batch in ahead:
        same(batch, next(restored))
        same(batch, next(moved))


def test_recall_is_evaluated_on_every_example_once_whatever_the_batch():
    config = DataConfig(kind="mqar", length=64, mqar=MQAR)

    def rows(count):
        return {
            name: np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in dataset])
            for name, dataset in eval_datasets(config, rows=count).items()
        }

    assert list(rows(4)) == ["T32_K8", "T64_K16", "T80_K8"]
    for name, tokens in rows(4).items():
        length = int(name[1:].split("_")[0])
        assert len({example.tobytes() for example in tokens.reshape(9, length)}) == 9
        np.testing.assert_array_equal(tokens, rows(2)[name])
        np.testing.assert_array_equal(tokens, rows(50)[name])


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_held_out_batches_cover_the_whole_text_once(text_config, rows):
    corpus = open_text(text_config)
    (dataset,) = eval_datasets(text_config, rows=rows).values()
    targets = np.concatenate([batch["targets"] for batch in dataset])
    counts = corpus.counts["held_out"]
    assert len(dataset) == math.ceil(counts.rows / rows)
    assert (targets >= 0).sum() == counts.targets
    assert (targets == corpus.tokenizer.eod_id).sum() == counts.documents
    assert ((targets >= 0) & (targets < 256)).sum() == counts.bytes, "bytes are tokens here"


def test_held_out_text_is_never_trained_on(text_config):
    corpus = open_text(text_config)
    eod_id = corpus.tokenizer.eod_id

    def texts(split):
        rows = (corpus.rows[split][i] for i in range(len(corpus.rows[split])))
        return {ids.tobytes() for ids in unpack(rows, eod_id)}

    assert texts("train") and texts("held_out")
    assert texts("train").isdisjoint(texts("held_out"))
    rows = len(corpus.rows["train"])
    epoch = train_dataset(text_config, seed=0, rows=rows)[0]
    (dataset,) = eval_datasets(text_config, rows=rows).values()

    def rows_of_text(batch):
        # A row cut out of a table's rule is the same in any text.
        return {row.tobytes() for row in batch["targets"] if len(np.unique(row)) > 4}

    assert rows_of_text(dataset[0])
    assert rows_of_text(dataset[0]).isdisjoint(rows_of_text(epoch))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "mqra"}, "data.kind is 'mqra'; it must be one of text, mqar, .*, niah"),
        ({"length": 0}, "data.length is 0"),
        ({"length": 48}, "slice of length 64 but the row length is 48"),
    ],
)
def test_bad_configs_are_named(options, says):
    with pytest.raises(UserError, match=says):
        DataConfig(**{"mqar": MQAR, **options})


def test_a_held_out_share_that_is_none_is_named():
    with pytest.raises(UserError, match=r"text.held_out is 0.0"):
        TextConfig(held_out=0.0)


def test_prepared_data_are_of_the_tokenizer_that_is_named(tokenizer_json, tmp_path):
    """As a fine-tuned model's run names its own beside the data."""
    out, other = tmp_path / "data", tmp_path / "other.json"
    prepare_corpus(
        lambda: (f"some text {i}" for i in range(20)), str(out), length=16, tokenizer=tokenizer_json
    )
    other.write_text(Path(tokenizer_json).read_text() + " ")
    text = TextConfig(path=str(out), tokenizer=tokenizer_json)
    assert open_text(DataConfig(kind="text", length=16, text=text)).length == 16
    for name, says in (
        (other, "prepared with another tokenizer"),
        (tmp_path / "x", "no tokenizer"),
    ):
        text = TextConfig(path=str(out), tokenizer=str(name))
        with pytest.raises(UserError, match=says):
            open_text(DataConfig(kind="text", length=16, text=text))


def test_bad_calls_are_named(config, prepared):
    for make in (
        lambda **k: train_dataset(config, seed=0, **k),
        lambda **k: eval_datasets(config, **k),
    ):
        with pytest.raises(UserError, match="6 rows, which do not divide among 4 processes"):
            make(rows=6, process_count=4)
        with pytest.raises(UserError, match="batch has 0 rows"):
            make(rows=0)
    with pytest.raises(UserError, match="seed is 4294967296"):
        train_dataset(config, seed=2**32, rows=1)
    with pytest.raises(UserError, match=r"data.length is 65 but the rows at .* have 64 tokens"):
        train_dataset(DataConfig(kind="text", length=65, text=TextConfig(prepared)), seed=0, rows=1)
    with pytest.raises(UserError, match=r"no meta.json in 'gone'"):
        vocab_size(DataConfig(kind="text", text=TextConfig("gone")))

"""MQAR: layout, distribution, packing, streams, and what can be won without remembering."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from fastweights.errors import UserError
from fastweights.tasks import Slice, accuracy, eval_rows, eval_slices, slice_batch, train_batch
from fastweights.tasks.batches import EVAL_STREAM, TRAIN_STREAM, pack_rows, stream
from fastweights.tasks.draws import HostDraws
from fastweights.tasks.mqar import FILLERS, QUERY_ORDERS, MQARConfig
from fastweights.tasks.oracles import solve
from fastweights.tasks.solvers import Habits, PairPlaces

SMALL = MQARConfig(vocab_size=128, train=((64, 16, 1),), test=((64, 16),), test_examples=500)


def rng(*words: int) -> HostDraws:
    return HostDraws(np.random.default_rng(words))


@pytest.mark.parametrize("order", QUERY_ORDERS)
@pytest.mark.parametrize("filler", FILLERS)
@pytest.mark.parametrize(
    ("vocab", "length", "pairs"), [(8192, 64, 4), (8192, 256, 64), (128, 64, 16), (9, 8, 1)]
)
def test_an_example_is_pairs_then_every_key_once(vocab, length, pairs, order, filler):
    config = MQARConfig(
        vocab_size=vocab,
        train=((length, pairs, 1),),
        test=((length, pairs),),
        query_order=order,
        filler=filler,
    )
    tokens, targets = config.examples(rng(0), 50, Slice(length, pairs))
    assert tokens.shape == targets.shape == (50, length)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.min() >= 0 and tokens.max() < vocab
    for row, answer in zip(tokens, targets, strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert keys.min() >= 1 and keys.max() < config.first_reserved <= vocab // 2
        assert values.min() >= vocab // 2
        asked = np.flatnonzero(answer >= 0)
        assert (answer[answer < 0] == -1).all()
        assert asked.min() >= 2 * pairs and (asked % 2 == 0).all()
        pairing = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert {int(row[t]): int(answer[t]) for t in asked} == pairing
        rest = np.delete(row[2 * pairs :], asked - 2 * pairs)
        if filler == "zero":
            assert (rest == 0).all()
        elif filler == "reserved":
            assert ((rest >= config.first_reserved) & (rest < vocab // 2)).all()


def test_random_filler_covers_the_whole_vocabulary():
    config = dataclasses.replace(SMALL, filler="random")
    tokens, targets = config.examples(rng(1), 2000, Slice(64, 16))
    rest = tokens[:, 32:][targets[:, 32:] < 0]
    share = np.bincount(rest, minlength=128) / rest.size
    np.testing.assert_allclose(share, 1 / 128, rtol=0.25)


def test_keys_and_values_are_uniform_and_unrelated():
    tokens, _ = SMALL.examples(rng(2), 4000, Slice(64, 16))
    for place in (0, 1, 14, 15):
        pick = tokens[:, 2 * place : 2 * place + 2]
        np.testing.assert_allclose(
            np.bincount(pick[:, 0], minlength=64)[1:] / 4000, 1 / 63, atol=0.009
        )
        np.testing.assert_allclose(np.bincount(pick[:, 1] - 64) / 4000, 1 / 64, atol=0.009)
    # A pairing that repeats could be learnt by heart: the value of a key is spread over all values.
    key, value = tokens[:, 0:32:2].ravel(), tokens[:, 1:32:2].ravel()
    assert len(set(value[key == 5])) > 60


@pytest.mark.parametrize("order", QUERY_ORDERS)
@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_slots_are_drawn_one_by_one_by_weight(power_a, order):
    """Against the exact law of successive draws without replacement, by enumeration."""
    length, pairs = 12, 2
    slots = (length - 2 * pairs) // 2
    config = MQARConfig(
        vocab_size=32,
        train=((length, pairs, 1),),
        test=((length, pairs),),
        power_a=power_a,
        query_order=order,
    )
    tokens, targets = config.examples(rng(3), 40_000, Slice(length, pairs))
    zone = tokens[:, 2 * pairs :: 2] * (targets[:, 2 * pairs :: 2] >= 0)
    first = np.argmax(zone == tokens[:, 0:1], axis=1)
    second = np.argmax(zone == tokens[:, 2:3], axis=1)
    weight = power_a * np.arange(1.0, slots + 1) ** (power_a - 1)
    weight /= weight.sum()
    law = {
        (i, j): weight[i] * weight[j] / (1 - weight[i])
        for i, j in itertools.permutations(range(slots), 2)
    }
    if order == "independent":
        law = {(i, j): (law[i, j] + law[j, i]) / 2 for i, j in law}
    for (i, j), expected in law.items():
        seen = np.mean((first == i) & (second == j))
        assert seen == pytest.approx(expected, abs=5 * np.sqrt(expected / 40_000))


@pytest.mark.parametrize(
    ("length", "pairs", "spearman"), [(64, 4, 0.14), (64, 8, 0.23), (64, 16, 0.51), (256, 64, 0.53)]
)
def test_coupled_order_leaks_what_zoology_leaks_and_independent_does_not(length, pairs, spearman):
    for order, expected in (("coupled", spearman), ("independent", 0.0)):
        config = MQARConfig(train=((length, pairs, 1),), query_order=order)
        tokens, targets = config.examples(rng(4), 1500, Slice(length, pairs))
        asked = np.nonzero(targets >= 0)[1].reshape(-1, pairs)
        queries = np.take_along_axis(tokens, asked, axis=1)
        # Rank of the pair that the i-th query asks for.
        rank = np.argmax(queries[:, :, None] == tokens[:, None, 0 : 2 * pairs : 2], axis=2)
        place = np.arange(pairs) - (pairs - 1) / 2
        correlation = (rank - (pairs - 1) / 2) @ place / (place @ place)
        assert np.mean(correlation) == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("order", QUERY_ORDERS)
@pytest.mark.parametrize("filler", FILLERS)
def test_only_memory_wins(order, filler):
    config = dataclasses.replace(SMALL, query_order=order, filler=filler)
    part = Slice(64, 16)
    seen = slice_batch(config, part, rng(5), 1500, 64)
    batch = eval_rows(config, part, 64)
    targets = batch["targets"]
    assert accuracy(solve(config, batch), targets) == 1.0
    for guess in Habits.fit(seen).guesses(batch).values():
        assert accuracy(guess, targets) < 1.5 / 64
    by_position = accuracy(PairPlaces.fit(seen).by_position(batch), targets) / part.chance
    if order == "independent":
        assert by_position < 1.2
    else:
        assert by_position > 1.6


def test_slices_name_themselves_and_know_chance():
    part = eval_slices(MQARConfig())[2]
    assert (part.name, part.chance) == ("T64_K16", 1 / 16)


@pytest.mark.parametrize("length", [64, 100, 128, 300])
def test_rows_hold_whole_examples_of_one_slice(length):
    config = MQARConfig(train=((64, 8, 1), (32, 2, 1)), test=((64, 8),))
    batch = train_batch(config, seed=0, index=0, rows=64, length=length)
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: ((64, length), np.int32) for name in ("tokens", "targets", "segment_ids", "positions")
    }
    kinds = set()
    for tokens, targets, ids, positions in zip(*batch.values(), strict=True):
        size = int((ids == 1).sum())
        kinds.add(size)
        count = length // size
        assert ids.tolist() == [i + 1 for i in range(count) for _ in range(size)] + [0] * (
            length - count * size
        )
        assert positions.tolist() == [*range(size)] * count + [0] * (length - count * size)
        assert (tokens[ids == 0] == 0).all() and (targets[ids == 0] == -1).all()
        pairs = {64: 8, 32: 2}[size]
        assert [int((targets[ids == i + 1] >= 0).sum()) for i in range(count)] == [pairs] * count
    assert kinds == {32, 64}
    assert accuracy(solve(config, batch), batch["targets"]) == 1.0


def test_weights_are_shares_of_examples():
    config = MQARConfig(train=((64, 4, 100), (128, 8, 20), (256, 16, 20)), test=((64, 4),))
    batch = train_batch(config, seed=1, index=0, rows=6000, length=256)
    sizes = (batch["segment_ids"] == 1).sum(1)
    examples_of = {size: np.sum(sizes == size) * (256 // size) for size in (64, 128, 256)}
    total = sum(examples_of.values())
    for size, share in ((64, 100 / 140), (128, 20 / 140), (256, 20 / 140)):
        assert examples_of[size] / total == pytest.approx(share, abs=0.015)


def test_a_batch_is_a_function_of_seed_and_index():
    def tokens(seed, index):
        return train_batch(SMALL, seed=seed, index=index, rows=4, length=64)["tokens"]

    np.testing.assert_array_equal(tokens(3, 7), tokens(3, 7))
    batches = [tokens(seed, index) for seed in (0, 1, 2) for index in (0, 1, 2, 2**32, 2**39)]
    assert len({batch.tobytes() for batch in batches}) == 15


def test_eval_examples_do_not_depend_on_layout_or_other_slices():
    def flat(config, length):
        batch = eval_rows(config, Slice(64, 16), length)
        return batch["tokens"][batch["segment_ids"] > 0].reshape(-1, 64)

    other = dataclasses.replace(SMALL, test=((32, 4), (64, 16)), train=((32, 8, 1),))
    for config, length in ((SMALL, 192), (SMALL, 32), (other, 70)):
        np.testing.assert_array_equal(flat(config, length), flat(SMALL, 64))
    assert not np.array_equal(flat(dataclasses.replace(SMALL, test_seed=1), 64), flat(SMALL, 64))


def test_eval_rows_keep_every_example_once_and_pad_the_rest():
    config = dataclasses.replace(SMALL, test_examples=7)
    batch = eval_rows(config, Slice(64, 16), 200)
    assert batch["tokens"].shape == (3, 200)
    assert batch["segment_ids"].max(axis=1).tolist() == [3, 3, 1]
    assert (batch["targets"] >= 0).sum() == 7 * 16


def test_train_and_eval_streams_never_meet(monkeypatch):
    tags = {TRAIN_STREAM, EVAL_STREAM}
    assert len(tags) == 2
    words = list(itertools.product((0, 1, 2, 2**32 - 1), (0, 1, 2, 64 + (16 << 32))))
    states = {
        str(stream(seed, tag, index).bit_generator.state) for tag in tags for seed, index in words
    }
    assert len(states) == 2 * len(words)

    seeds = []
    monkeypatch.setattr(
        "fastweights.tasks.batches.stream", lambda *words: seeds.append(words) or stream(*words)
    )
    train_batch(SMALL, seed=SMALL.test_seed, index=64, rows=1, length=64)
    eval_rows(SMALL, Slice(64, 16), 64)
    assert [tag for _, tag, *_ in seeds] == [TRAIN_STREAM, EVAL_STREAM]

    # The index whose 32-bit words spell the evaluation slice: only the tag keeps them apart.
    wanted = {row.tobytes() for row in eval_rows(SMALL, Slice(64, 16), 64)["tokens"]}
    assert len(wanted) == 500
    for seed in (0, 1):
        for index in (*range(100), 64 + (16 << 32)):
            batch = train_batch(SMALL, seed=seed, index=index, rows=32, length=64)
            assert wanted.isdisjoint(row.tobytes() for row in batch["tokens"])


def test_accuracy_counts_answers_only():
    targets = np.array([[-1, 5, -1, 6], [7, -1, -1, -1]])
    assert accuracy(np.array([[0, 5, 0, 9], [7, 0, 0, 0]]), targets) == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="No position has a target"):
        accuracy(targets, np.full_like(targets, -1))
    with pytest.raises(UserError, match="shape"):
        accuracy(targets[:1], targets)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train": ()}, "mqar.train is empty"),
        ({"test": ()}, "mqar.test is empty"),
        ({"train": ((64, 4),)}, r"entry \(64, 4\)"),
        ({"train": (64, 4, 1)}, r"entry \(64,\)"),
        ({"test": ((64.5, 4),)}, r"entry \(64.5, 4\)"),
        ({"train": ((63, 4, 1),)}, "length 63 .* even"),
        ({"test": ((64, 17),)}, "17 pairs .* at least 68"),
        ({"test": ((64, 0),)}, "0 pairs; it must have at least 1"),
        ({"vocab_size": 64, "train": ((64, 4, 1),), "test": ((64, 4),)}, "vocab_size is 64"),
        ({"test": ((64, True),)}, r"entry \(64, True\)"),
        ({"train": ((64, 4, 0),)}, "weight 0"),
        ({"train": ((64, 4, "x"),)}, "weight 'x'; weights must be finite positive numbers"),
        ({"train": ((64, 4, math.inf),)}, "weight inf"),
        ({"train": ((64, 4, math.nan),)}, "weight nan"),
        ({"test": ((64, 4), (64, 4))}, "twice"),
        ({"test_examples": 0}, "test_examples is 0"),
        ({"test_seed": -1}, "test_seed is -1"),
        ({"power_a": 0.0}, "power_a is 0.0"),
        ({"query_order": "sorted"}, "'sorted'; it must be one of independent, coupled"),
        ({"filler": "noise"}, "'noise'; it must be one of zero, random, reserved"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(UserError, match=says):
        MQARConfig(**options)


def test_bad_calls_are_named():
    with pytest.raises(UserError, match=r"length 64 but the row length is 60; .* at least 64"):
        train_batch(SMALL, seed=0, index=0, rows=1, length=60)
    with pytest.raises(UserError, match="seed is -1"):
        train_batch(SMALL, seed=-1, index=0, rows=1, length=64)
    with pytest.raises(UserError, match="cannot hold an example of 8"):
        pack_rows(np.zeros((1, 8), np.int32), np.zeros((1, 8), np.int32), 7)

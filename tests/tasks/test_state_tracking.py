"""Word problems: the groups, the answers by hand, and what can be won without keeping track."""

import dataclasses
import itertools

import numpy as np
import pytest

from fastweights.errors import UserError
from fastweights.tasks import (
    ParityConfig,
    S3Config,
    Slice,
    accuracy,
    eval_slices,
    train_batch,
)
from fastweights.tasks.draws import HostDraws
from fastweights.tasks.oracles import solve
from fastweights.tasks.state_tracking import permutations

SWAPS = S3Config(alphabet="swaps")
PERMUTATIONS = permutations(3)
CONFIGS = {"parity": ParityConfig(), "s3": S3Config(), "s3 of swaps": SWAPS}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def draw(config, count=400, length=32):
    return config.examples(HostDraws(np.random.default_rng(0)), count, config.part(length))


def test_the_table_is_a_group_with_element_0_as_its_unit(config):
    table = config.TABLE
    elements = np.arange(len(table))
    np.testing.assert_array_equal(table[0], elements)
    np.testing.assert_array_equal(table[:, 0], elements)
    for a, b, c in itertools.product(elements, repeat=3):
        assert table[table[a, b], c] == table[a, table[b, c]]
    for row in (*table, *table.T):
        assert sorted(row) == elements.tolist()
    commutes = (table == table.T).all()
    assert commutes == (config.NAME == "parity")


@pytest.mark.parametrize(
    ("config", "word", "answers"),
    [
        (ParityConfig(), [1, 0, 1, 1, 0], [1, 1, 0, 1, 1]),
        # Swap places 1 and 2, then 0 and 1: thing 0 ends in place 1, 1 in place 2, 2 in place 0.
        (S3Config(), [(0, 2, 1), (1, 0, 2)], [(0, 2, 1), (1, 2, 0)]),
        # The other way round it is the inverse, so that the order of a product is seen.
        (S3Config(), [(1, 0, 2), (0, 2, 1)], [(1, 0, 2), (2, 0, 1)]),
    ],
)
def test_answers_by_hand(config, word, answers):
    if config.NAME == "s3":
        word, answers = ([PERMUTATIONS.index(p) for p in ps] for ps in (word, answers))
    word, product, found = np.array(word), 0, []
    for element in word:
        product = config.TABLE[product, element]
        found.append(int(product))
    assert found == answers
    batch = {"tokens": word[None], "segment_ids": np.ones((1, len(word)), int)}
    assert solve(config, batch)[0].tolist() == answers


def test_words_are_uniform_over_their_letters_and_every_position_asks(config):
    tokens, targets = draw(config, 4000, 8)
    assert targets.min() == 0 and targets.max() == config.vocab_size - 1
    assert set(np.unique(tokens)) == set(config.letters)
    for t in range(8):
        counts = np.bincount(tokens[:, t])[list(config.letters)]
        np.testing.assert_allclose(counts / 4000, 1 / len(config.letters), atol=0.03)


def test_swaps_are_those_that_undo_themselves():
    assert SWAPS.letters == (0, 1, 2, 5)
    assert all(SWAPS.TABLE[e, e] == 0 for e in SWAPS.letters)


def test_answers_start_anew_in_every_example_of_a_row(config):
    config = dataclasses.replace(config, train=((5, 1.0),))
    batch = train_batch(config, seed=3, index=0, rows=6, length=13)
    assert batch["segment_ids"][0].tolist() == [1] * 5 + [2] * 5 + [0] * 3
    assert (batch["targets"][:, 10:] == -1).all()
    starts = batch["positions"][:, :10] == 0
    np.testing.assert_array_equal(batch["targets"][:, :10][starts], batch["tokens"][:, :10][starts])
    assert accuracy(solve(config, batch), batch["targets"]) == 1.0


def test_slices_know_their_length_and_chance(config):
    parts = eval_slices(config)
    assert [part.name for part in parts] == ["T32", "T64", "T128", "T256"]
    # The first answer is its token; the rest is a guess among all, but for the first few swaps.
    for part in parts:
        guess = (1 + (part.length - 1) / config.vocab_size) / part.length
        slack = 0.3 / part.length if config is SWAPS else 1e-9
        assert guess - 1e-9 < part.chance < guess + slack
    assert Slice(64, 16).chance == 1 / 16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train": ((0, 1.0),)}, "s3.train has the length 0"),
        ({"test": (32, 64.5)}, r"s3.test has the entry \(64.5,\), but each must be \(length\)"),
        ({"test": (32, (32,))}, "s3.test names a slice twice"),
        ({"train": (32,)}, r"entry \(32,\), but each must be \(length, weight\)"),
        ({"alphabet": "cycles"}, "'cycles'; it must be one of all, swaps"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(UserError, match=says):
        S3Config(**options)

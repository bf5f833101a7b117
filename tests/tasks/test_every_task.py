"""What holds for every task: the oracle wins, cheaters do not, streams never meet."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from fastweights import tasks
from fastweights.errors import UserError
from fastweights.tasks import TASKS, accuracy, device_batch, eval_rows, eval_slices, train_batch
from fastweights.tasks.lookup import VARIANTS
from fastweights.tasks.oracles import ORACLES, solve
from fastweights.tasks.solvers import Habits

ROWS = 600
# Programs that run a few times cost most in the compiler.
QUICK = {"xla_backend_optimization_level": 0}


def _small(config):
    """One training slice and one test slice, the same."""
    entry = config.test[0]
    return dataclasses.replace(config, train=((*entry, 1.0),), test=(entry,), test_examples=400)


CONFIGS = {name: _small(config()) for name, config in TASKS.items()}
# Zoology's vocabulary of 8192 would make NumPy shuffle as many keys for each row.
small_mqar = dict(vocab_size=128, train=((64, 16, 1.0),), test=((64, 16),), test_examples=400)
CONFIGS["mqar"] = tasks.MQARConfig(**small_mqar)
for variant in VARIANTS:
    needles = 1 if variant.startswith("single") else 4
    CONFIGS[f"niah {variant}"] = tasks.NIAHConfig(
        variant=variant, train=((384, needles, 1.0),), test=((384, needles),), test_examples=400
    )
CONFIGS |= {
    "s5 of swaps": _small(tasks.S5Config(alphabet="swaps")),
    "mqar reserved filler": tasks.MQARConfig(**small_mqar, filler="reserved"),
    "stack of one": _small(tasks.StackConfig(stacks=1)),
    "odd lengths": tasks.ComposedConfig(train=((63, 9, 1.0),), test=((63, 9),), test_examples=400),
    "odd parity": tasks.ParityRetrievalConfig(
        train=((61, 6, 1.0),), test=((61, 6),), test_examples=400
    ),
    "k_hop of 8": tasks.KHopConfig(train=((40, 9, 8, 1.0),), test=((40, 9, 8),), test_examples=400),
}


@functools.cache
def batches(name):
    """(training batches made by the host and by a compiled program, evaluation rows)."""
    config = CONFIGS[name]
    (part,) = eval_slices(config)
    args = dict(rows=ROWS, length=part.length)

    def make(seed, index):
        return device_batch(config, seed=seed, index=index, **args)

    compiled = jax.jit(make, compiler_options=QUICK)

    def on_device(seed, index):
        return {k: np.asarray(v) for k, v in compiled(np.uint32(seed), np.int32(index)).items()}

    def on_host(seed, index):
        return train_batch(config, seed=seed, index=index, **args)

    return {"host": on_host, "device": on_device}, eval_rows(config, part, part.length)


every_task = pytest.mark.parametrize("name", CONFIGS)
both = pytest.mark.parametrize("where", ["host", "device"])


def first(batch, rows):
    return {key: values[:rows] for key, values in batch.items()}


@every_task
@both
def test_the_oracle_answers_all(name, where):
    make, evaluation = batches(name)
    batch = first(make[where](0, 0), 200)
    assert {key: (x.shape, x.dtype) for key, x in batch.items()} == {
        key: ((200, evaluation["tokens"].shape[1]), np.int32)
        for key in ("tokens", "targets", "segment_ids", "positions")
    }
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < CONFIGS[name].vocab_size
    for some in (batch, first(evaluation, 200)):
        assert (some["targets"] >= 0).any(axis=1).all()
        assert accuracy(solve(CONFIGS[name], some), some["targets"]) == 1.0


@every_task
def test_no_example_asks_more_often_than_its_task_says(name):
    make, evaluation = batches(name)
    (part,) = eval_slices(CONFIGS[name])
    most = CONFIGS[name].answers(part)
    asked = [(b["targets"] >= 0).sum(axis=1).max() for b in (make["device"](0, 0), evaluation)]
    assert most / 2 < max(asked) <= most


@every_task
def test_cheaters_stay_near_chance(name):
    make, evaluation = batches(name)
    (part,) = eval_slices(CONFIGS[name])
    # Both kinds of batches are of one law, so what is learnt from one holds for the other.
    guesses = Habits.fit(make["device"](0, 0)).guesses(evaluation)
    answers = int((evaluation["targets"] >= 0).sum())
    noise = 3 * (part.chance * (1 - part.chance) / answers) ** 0.5
    for cheater in CONFIGS[name].CHEATERS:
        score = accuracy(guesses[cheater], evaluation["targets"])
        assert score < max(1.2 * part.chance, part.chance + noise), cheater


def test_a_cheater_that_has_learnt_the_map_of_memorize_knows_all():
    make, evaluation = batches("memorize")
    guesses = Habits.fit(make["host"](0, 0)).guesses(evaluation)
    assert accuracy(guesses["unigram"], evaluation["targets"]) == 1.0


@pytest.mark.parametrize("name", ["in_context_recall", "noisy_recall"])
def test_a_value_that_has_been_seen_is_right_as_often_as_chance_says(name):
    """Several keys can have one value: chance is above one in as many values."""
    config = CONFIGS[name]
    (part,) = eval_slices(config)
    right = []
    _, evaluation = batches(name)
    for tokens, targets in zip(evaluation["tokens"], evaluation["targets"], strict=True):
        values = [t for t in tokens.tolist() if config.keys <= t < 2 * config.keys]
        asked = np.flatnonzero(targets >= 0)
        number = (tokens[None] >= config.keys) & (tokens[None] < 2 * config.keys)
        before = number.cumsum()[asked] - 1  # the value before this key
        right += (np.array(values)[before] == targets[asked]).tolist()
    assert np.mean(right) == pytest.approx(part.chance, abs=0.008)


@every_task
def test_training_and_evaluation_never_meet_and_batches_differ(name):
    make, evaluation = batches(name)
    wanted = {row.tobytes() for row in evaluation["tokens"]}
    assert len(wanted) == 400
    seen = set()
    # The evaluation's own seed is among them.
    places = [(seed, index) for seed in (CONFIGS[name].test_seed, 1) for index in (0, 2**30)]
    for seed, index in places:
        for make_one in make.values():
            seen |= {row.tobytes() for row in make_one(seed, index)["tokens"]}
    assert wanted.isdisjoint(seen)
    assert len(seen) == 2 * len(places) * ROWS
    np.testing.assert_array_equal(
        make["device"](1, 2**30)["tokens"], make["device"](1, 2**30)["tokens"]
    )


@every_task
def test_host_and_device_draw_from_one_law(name):
    """Tokens and answers by position are equally frequent, as far as the rows can tell."""
    make, _ = batches(name)
    for field in ("tokens", "targets"):
        host, device = (make[where](5, 0)[field] for where in ("host", "device"))
        if field == "targets":
            np.testing.assert_allclose(
                (host >= 0).mean(axis=0), (device >= 0).mean(axis=0), atol=0.11
            )
        counts = [
            np.bincount(x[x >= 0], minlength=CONFIGS[name].vocab_size) for x in (host, device)
        ]
        shares = [count / count.sum() for count in counts]
        # Total variation of two samples of one law is about sqrt(kinds / answers).
        kinds = np.count_nonzero(counts[0] + counts[1])
        limit = 0.015 + 1.2 * (kinds / min(count.sum() for count in counts)) ** 0.5
        assert abs(shares[0] - shares[1]).sum() / 2 < limit


def test_a_device_batch_mixes_slices_as_the_host_does():
    config = tasks.MQARConfig(vocab_size=64, train=((16, 2, 3.0), (32, 4, 1.0)), test=((16, 2),))
    make = functools.partial(device_batch, config, seed=0, rows=2000, length=40)
    batch = jax.jit(make, compiler_options=QUICK)(index=0)
    sizes = np.asarray(batch["segment_ids"] == 1).sum(axis=1)
    # Three of four examples are short, and a row holds two of these: 3 rows in 5.
    assert np.mean(sizes == 16) == pytest.approx(0.6, abs=0.03)
    assert set(sizes.tolist()) == {16, 32}
    found = {key: np.asarray(value)[:100] for key, value in batch.items()}
    assert accuracy(solve(config, found), found["targets"]) == 1.0


@pytest.mark.parametrize("make", (train_batch, device_batch))
def test_a_batch_has_its_share_of_each_slice(make):
    """Of five rows 1.43, 0.71 and 2.86: in one batch rounded, on average exactly."""
    mix = ((16, 2, 4.0), (32, 3, 1.0), (32, 8, 4.0))
    config = tasks.MQARConfig(vocab_size=64, train=mix, test=((16, 2),))
    args = dict(config=config, seed=0, rows=5, length=32)
    if make is device_batch:
        make = jax.jit(functools.partial(make, **args), compiler_options=QUICK)
        args = {}
    answers = [(np.asarray(make(index=i, **args)["targets"]) >= 0).sum(axis=1) for i in range(300)]
    counts = np.stack([[np.sum(found == n) for n in (4, 3, 8)] for found in answers])
    assert counts.sum(axis=1).tolist() == [5] * 300
    assert counts.min(axis=0).tolist() == [1, 0, 2] and counts.max(axis=0).tolist() == [2, 1, 3]
    np.testing.assert_allclose(counts.mean(axis=0), [10 / 7, 5 / 7, 20 / 7], atol=0.08)
    # Two, one and three rows, as many as there can be.
    assert tasks.most_answers(config, 5, 32) == 2 * 4 + 3 + 3 * 8


@pytest.mark.parametrize("make", (train_batch, device_batch))
def test_a_stream_of_few_batches_starts_over(make):
    config = tasks.MQARConfig(vocab_size=64, train=((16, 2, 1.0),), test=((16, 2),), repeat_after=3)
    run = functools.partial(make, config, seed=0, rows=2, length=16)
    run = jax.jit(run, compiler_options=QUICK) if make is device_batch else run
    found = [np.asarray(run(index=i)["tokens"]).tobytes() for i in range(8)]
    assert found == (found[:3] * 3)[:8] and len(set(found)) == 3


def test_every_task_has_an_oracle():
    assert ORACLES.keys() == TASKS.keys()


@pytest.mark.parametrize(
    ("config", "tokens", "answers"),
    [
        (
            tasks.OverwriteConfig(vocab_size=12, train=((16, 2, 1, 1.0),), test=((16, 2, 1),)),
            [1, 7, 2, 8, 1, 9, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0],
            {8: 8, 12: 9},
        ),
        (tasks.StackConfig(stacks=2, values=3), [4, 1, 5, 2, 4, 3, 6, 0, 6, 0, 7, 0],
         {6: 3, 8: 1, 10: 2}),
        (tasks.KHopConfig(), [21, 22, 23, 21, 22, 23, 2, 21, 1, 23], {7: 23, 9: 21}),
        (tasks.ModArithConfig(), [2, 7, 3, 6, 4, 7, 4, 5], {2: 1, 4: 2, 6: 0}),
        (tasks.ParityRetrievalConfig(), [3, 40, 41, 4, 42, 43, 2, 4, 1, 3, 2, 3],
         {7: 43, 9: 41, 11: 40}),
    ],
)  # fmt: skip
def test_oracles_by_hand(config, tokens, answers):
    batch = {"tokens": np.array([tokens]), "segment_ids": np.ones((1, len(tokens)), int)}
    found = solve(config, batch)[0]
    assert {t: int(found[t]) for t in answers} == answers


def test_overwritten_keys_are_told_from_untouched_ones_and_stand_anywhere():
    config = CONFIGS["mqar_overwrite"]
    _, evaluation = batches("mqar_overwrite")
    asked = evaluation["targets"] >= 0
    kinds = evaluation["kinds"][asked].reshape(-1, 8)
    assert ((kinds == 0).sum(axis=1) == 4).all()
    keys = evaluation["tokens"][:, 0:24:2]
    again = np.array([[key in row[:i] for i, key in enumerate(row)] for row in keys])
    assert (again.sum(axis=1) == 4).all()
    # Updates are likelier late, but no place is theirs alone.
    share = again.mean(axis=0)
    assert share[0] == 0 and 0.05 < share[3] < share[-1] < 0.75
    for row, is_asked, kind in zip(evaluation["tokens"], asked, kinds, strict=True):
        written = row[0:24:2].tolist()
        assert [written.count(key) == 1 for key in row[is_asked]] == kind.tolist()
    assert config.KINDS == ("updated", "untouched")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tasks.OverwriteConfig(repeat_after=-1), "mqar_overwrite.repeat_after is -1"),
        (lambda: tasks.OverwriteConfig(test=((40, 8, 9),)), "8 pairs and 9 updates"),
        (lambda: tasks.OverwriteConfig(test=((38, 8, 4),)), "even length of at least 40"),
        (lambda: tasks.OverwriteConfig(vocab_size=16), "vocab_size is 16; .* at least 24"),
        (lambda: tasks.ComposedConfig(test=((128, 5),)), "5 pairs in 128 .* square grid"),
        (lambda: tasks.ComposedConfig(test=((128, 36),)), "at least 180"),
        (lambda: tasks.ComposedConfig(vocab_size=16, train=((128, 16, 1.0),)), "least 32"),
        (lambda: tasks.InContextRecallConfig(noise_share=0.5), "noise_share is 0.5 with 0"),
        (lambda: tasks.NoisyRecallConfig(vocab_size=18), "no two keys .* 16 noise_tokens"),
        (lambda: tasks.FuzzyRecallConfig(vocab_size=20), "vocab_size is 20; .* multiple of 16"),
        (lambda: tasks.MemorizeConfig(vocab_size=2), "memorize has vocab_size 2"),
        (lambda: tasks.CompressionConfig(vocab_size=2), "vocab_size is 2; .* at least 3"),
        (lambda: tasks.CompressionConfig(test=(1,)), "length 1; it must be at least 2"),
        (lambda: tasks.SelectiveCopyConfig(test=((64, 40),)), "copies 40 tokens in 64"),
        (lambda: tasks.PalindromeConfig(test=(33,)), "length 33; it must be even"),
        (lambda: tasks.StackConfig(stacks=0), "stack has 0 stacks"),
        (lambda: tasks.KHopConfig(test=((64, 16, 9),)), "9 hops .* at most max_hops 8"),
        (lambda: tasks.KHopConfig(test=((64, 60, 1),)), "take at least 140"),
        (lambda: tasks.KHopConfig(test=((200, 60, 1),)), "leaves only 55 names"),
        (lambda: tasks.ModArithConfig(test=(33,)), "length 33; it must be even"),
        (lambda: tasks.ParityRetrievalConfig(test=((20, 8),)), "26 tokens"),
        (lambda: tasks.ParityRetrievalConfig(vocab_size=30), "at least 32"),
        (lambda: tasks.PhonebookConfig(test=((256, 24),)), "at least 3 lines and 270 tokens"),
        (lambda: tasks.PhonebookConfig(vocab_size=20), "makes only 9 names"),
        (lambda: tasks.NIAHConfig(test=((50, 1),)), "longer than that haystack, .* at least"),
        (lambda: tasks.NIAHConfig(test=((256, 2),)), "single_2 takes exactly 1"),
        (lambda: tasks.NIAHConfig(variant="multi"), "'multi'; it must be one of single_1"),
    ],
)  # fmt: skip
def test_impossible_options_are_named(make, says):
    with pytest.raises(UserError, match=says):
        make()

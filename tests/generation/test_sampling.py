"""Filters and draws against their definitions in NumPy."""

import functools

import jax
import numpy as np
import pytest

import tiny_models
from fastweights.errors import UserError
from fastweights.generation.sampling import NO_TOKEN, SamplingConfig, choose

V, ROWS = 12, 20_000
# Shares fall slowly and no two are alike; the order of ids is not that of the shares.
LOGITS = np.random.default_rng(0).permutation(np.linspace(0.0, 3.0, V)).astype(np.float32)


@functools.partial(tiny_models.quick_jit, static_argnames=("config", "vocab_size"))
def draw(logits_BV, config, vocab_size=V):
    keys_B = jax.random.split(jax.random.key(1), logits_BV.shape[0])
    return choose(logits_BV, keys_B, config, vocab_size)


def expected_shares(config: SamplingConfig, vocab_size=V) -> np.ndarray:
    """The probability of each token: filter after filter, renormalised in between."""
    share = np.exp(LOGITS.astype(np.float64) / config.temperature)
    share[vocab_size:] = 0
    share /= share.sum()
    order = np.argsort(-share)
    if config.top_k:
        share[order[config.top_k :]] = 0
        share /= share.sum()
    if config.top_p < 1:
        kept, total = [], 0.0
        for token in order:
            if total < config.top_p:
                kept.append(token)
            total += share[token]
        share[[token for token in range(V) if token not in kept]] = 0
        share /= share.sum()
    share[share < config.min_p * share.max()] = 0
    return share / share.sum()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (dict(temperature=1.0), 12),
        (dict(temperature=0.5, top_k=5), 5),
        (dict(temperature=1.0, top_p=0.7), 5),
        (dict(temperature=1.5, min_p=0.3), 7),
        (dict(temperature=1.0, top_k=8, top_p=0.7, min_p=0.4), 4),
        (dict(temperature=1.0, top_k=100), 12),
        (dict(temperature=1.0, top_p=1e-6), 1),
        (dict(temperature=1.0, min_p=1.0), 1),
    ],
    ids=str,
)
def test_draws_have_the_filtered_distribution(options, kept):
    config = SamplingConfig(**options)
    want = expected_shares(config)
    assert np.count_nonzero(want) == kept
    found = np.bincount(draw(np.tile(LOGITS, (ROWS, 1)), config), minlength=V) / ROWS
    assert np.all((found > 0) == (want > 0))
    # Five standard deviations of each share.
    assert np.all(np.abs(found - want) <= 5 * np.sqrt(want * (1 - want) / ROWS) + 1e-12)


def test_without_a_temperature_the_most_likely_token_is_taken():
    rows = np.random.default_rng(1).standard_normal((50, V)).astype(np.float32)
    for config in (SamplingConfig(), SamplingConfig(top_k=3, top_p=0.1, seed=4)):
        np.testing.assert_array_equal(draw(rows, config), rows.argmax(axis=1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_tokenizer_are_never_chosen(temperature):
    found = draw(np.tile(LOGITS, (500, 1)), SamplingConfig(temperature), vocab_size=4)
    assert found.max() < 4 < LOGITS.argmax()
    assert len(set(np.asarray(found))) == (4 if temperature else 1)


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(1.0, top_k=3)], ids=str)
def test_a_row_that_is_no_number_gives_no_token(config):
    rows = np.tile(LOGITS, (3, 1))
    rows[1, 5] = np.nan
    found = np.asarray(draw(rows, config))
    assert found[1] == NO_TOKEN and np.all(found[[0, 2]] >= 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(temperature=-1.0), "temperature is -1.0; use 0"),
        (dict(temperature=float("inf")), "temperature is inf"),
        (dict(top_k=-1), "top_k is -1; use 0"),
        (dict(top_p=0.0), "top_p is 0.0; use a share above 0"),
        (dict(top_p=1.5), "top_p is 1.5"),
        (dict(min_p=-0.1), "min_p is -0.1; use a share between 0 and 1"),
        (dict(seed=-1), "seed is -1; use 0 or more"),
    ],
)
def test_values_out_of_range_are_refused(options, told):
    with pytest.raises(UserError, match=told):
        SamplingConfig(**options)

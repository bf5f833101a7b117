"""Prefill in chunks and decode are the full forward pass, whatever stands left of a prompt."""

import collections
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

import tiny_models
from fastweights import flops, model
from fastweights.errors import UserError
from fastweights.generation import Engine, SamplingConfig, Scorer
from fastweights.generation.weights import for_decoding, unrolled

CONFIG = tiny_models.config("GA", 2)
PROMPTS = [np.asarray(tiny_models.tokens((n,), seed=n)) for n in (37, 3, 16, 21)]
NEW = 600


@functools.cache
def params():
    return tiny_models.noisy_params(CONFIG, seed=2)


def make_engine(**options) -> Engine:
    common = dict(rows=1, prompt_length=40, new_tokens=NEW, chunk=16, burst=50)
    return Engine(CONFIG, params(), **(common | options))


@pytest.fixture(scope="module")
def alone() -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def batched() -> Engine:
    return make_engine(rows=4, new_tokens=12, burst=5)


def generated(engine, prompts, first_index=0) -> np.ndarray:
    return np.concatenate(list(engine.generate(prompts, first_index)), axis=1)


@pytest.mark.parametrize("make", [Engine, Scorer])
def test_a_decoder_is_not_asked_for_a_next_token(make):
    sizes = dict(prompt_length=8, new_tokens=4) if make is Engine else dict(length=8)
    with pytest.raises(UserError, match=r"decoder is 'positions', .* foretells no next token"):
        make(tiny_models.config(decoder="positions"), params(), rows=1, **sizes)


def test_prefill_and_decode_of_600_tokens_equal_the_full_forward(alone):
    """Every token is the full pass' most likely one; last logits and all states are its own."""
    (prompt, *_) = PROMPTS
    cache, logits = alone.prefill([prompt])
    tokens = [prompt]
    for start in range(0, NEW, alone.burst):
        cache, logits, new = alone.decode(cache, logits, start)
        tokens.append(new[0])
    tokens = np.concatenate(tokens)
    assert len(tokens) == len(prompt) + NEW

    graphdef, _, _ = model.abstract_model(alone.config)

    @tiny_models.quick_jit
    def run(params, tokens):
        lm = model.bind(graphdef, params)
        return lm(tokens, cache=lm.init_cache(1, len(prompt) + NEW))

    full, expected = run(for_decoding(CONFIG, params()), tokens[None])
    full = np.asarray(full[0])
    np.testing.assert_allclose(logits[0], full[-1], rtol=0, atol=1e-4)
    asked = full[len(prompt) - 1 : -1]
    chosen = np.take_along_axis(asked, tokens[len(prompt) :, None], axis=1)[:, 0]
    assert np.all(chosen >= asked.max(axis=1) - 1e-4)
    assert len(set(tokens[len(prompt) :])) > 3, "a constant text would show little"

    skipped = alone.prompt_slots - len(prompt)
    for name, layer in expected["tail"].items():
        for path, want in jax.tree_util.tree_leaves_with_path(layer):
            got = functools.reduce(lambda tree, key: tree[key.key], path, cache["tail"][name])
            if path[0].key in ("slot_document", "index"):
                continue
            if path[0].key in ("k", "v"):
                # Slots of the padding in front, and of nothing behind.
                got = got[:, :, skipped : skipped + want.shape[2]]
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-4, err_msg=f"{name} {path}")


def test_a_batch_of_unequal_prompts_equals_each_alone(alone, batched):
    together = generated(batched, PROMPTS)
    assert together.shape == (4, 12)
    for row, prompt in zip(together, PROMPTS, strict=True):
        cache, logits = alone.prefill([prompt])
        _, _, single = alone.decode(cache, logits, 0)
        np.testing.assert_array_equal(row, single[0, :12])
    assert len({row.tobytes() for row in together}) == 4
    # Fewer prompts than rows, and what other rows hold, change nothing.
    np.testing.assert_array_equal(generated(batched, PROMPTS[2:3]), together[2:3])


def test_draws_depend_on_seed_and_number_and_not_on_the_batch():
    sampling = SamplingConfig(temperature=2.0, seed=3)
    engine = make_engine(rows=4, new_tokens=12, burst=5, sampling=sampling)
    both = generated(engine, [PROMPTS[1], PROMPTS[1]], first_index=5)
    assert not np.array_equal(both[0], both[1])
    np.testing.assert_array_equal(generated(engine, [PROMPTS[1]], first_index=6)[0], both[1])
    # A later burst draws anew.
    bursts = [engine.decode(*engine.prefill(PROMPTS[1:2]), start)[2] for start in (0, 5)]
    assert not np.array_equal(*bursts)


def test_steps_write_into_their_caches_and_copy_none():
    engine = make_engine(rows=4)
    memory: Any = engine._decode_program.memory_analysis()
    assert memory.alias_size_in_bytes >= engine.cache_bytes
    assert memory.temp_size_in_bytes < engine.cache_bytes / 2


def test_maps_of_one_input_are_one_product(batched):
    made = re.findall(
        r"= f32\[4,(\d+)\]\S* (?:dot|custom-call)\(", batched._decode_program.as_text()
    )
    layers = batched.params["tail"].values()
    wanted = collections.Counter(str(x.shape[1]) for layer in layers for x in layer["joined"])
    assert wanted == {"64": 1, "8": 1, "96": 1, "32": 2}
    assert {width: made.count(width) for width in wanted} == wanted


def test_layers_apart_are_the_same_model():
    """Two scanned groups and a tail, and what was apart before."""
    scanned = tiny_models.config("LA", 5, mlp="none")
    tokens, params = tiny_models.tokens((1, 9)), tiny_models.noisy_params(scanned)
    outs = []
    for config, values in (
        (scanned, params),
        (unrolled(scanned), for_decoding(scanned, params)),
    ):
        graphdef, shapes, _ = model.abstract_model(config)
        assert jax.tree.structure(shapes) == jax.tree.structure(values)
        outs.append(
            tiny_models.quick_jit(lambda p, g=graphdef: model.bind(g, p)(tokens)[0])(values)
        )
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)
    # Once more changes nothing and copies nothing.
    again = for_decoding(unrolled(scanned), values)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, values)), strict=True))


def test_only_matrices_are_cast():
    config = tiny_models.config("GN", 2, dtype="bfloat16", tie_embeddings=False)
    cast = for_decoding(config, tiny_models.noisy_params(config))
    kinds = {(path[-1].key in ("kernel", "embedding", "head"), str(leaf.dtype))
             for path, leaf in jax.tree_util.tree_leaves_with_path(cast)}  # fmt: skip
    assert kinds == {(True, "bfloat16"), (False, "float32")}


def test_caches_are_as_large_as_flops_says_and_donated(alone, capfd):
    assert alone.cache_bytes == flops.cache_bytes(CONFIG, 1, 48 + NEW)["total"]
    cache, logits = alone.prefill(PROMPTS[:1])
    alone.decode(cache, logits, 0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_timing_counts_prompts_and_new_tokens(batched):
    before = (batched.timing.prefill_tokens, batched.timing.decode_tokens)
    generated(batched, PROMPTS[:3])
    after = (batched.timing.prefill_tokens, batched.timing.decode_tokens)
    assert np.subtract(after, before).tolist() == [37 + 3 + 16, 3 * 12]
    assert batched.timing.prefill_seconds > 0 and batched.timing.decode_seconds > 0


def test_log_likelihoods_are_those_of_the_full_forward(alone):
    """Texts of several chunks in one batch with short ones, a part of each scored."""
    texts = [(ids, n) for ids, n in zip(PROMPTS, (30, 1, 15, 0), strict=True)]
    graphdef, _, _ = model.abstract_model(CONFIG)
    full = tiny_models.quick_jit(lambda p, t: model.bind(graphdef, p)(t)[0])
    scorer = Scorer(CONFIG, params(), rows=3, length=40, chunk=16)
    scores = scorer.score(texts)
    padded = np.zeros((4, 37), np.int32)
    for row, ids in zip(padded, PROMPTS, strict=True):
        row[: len(ids)] = ids
    log_p = np.asarray(jax.nn.log_softmax(full(params(), padded)))
    for row, (ids, scored), score in zip(log_p, texts, scores, strict=True):
        asked = np.arange(len(ids) - 1 - scored, len(ids) - 1)
        picked = row[asked, ids[asked + 1]]
        np.testing.assert_allclose(score.log_likelihood, picked.sum(), rtol=1e-5, atol=1e-5)
        assert score.greedy == bool(np.all(row[asked].argmax(axis=1) == ids[asked + 1]))
    # What greedy decoding gives is greedy.
    own = np.concatenate([PROMPTS[3], next(alone.generate(PROMPTS[3:]))[0, :16]])
    changed = np.concatenate([own[:-1], (own[-1:] + 1) % tiny_models.VOCAB])
    # The second text misses in an earlier chunk, the third in its last token.
    found = scorer.score([(own, 16), (own, 30), (changed, 16)])
    assert [score.greedy for score in found] == [True, False, False]
    with pytest.raises(UserError, match="3 of a text's 3 tokens are to be scored"):
        scorer.score([(PROMPTS[1], 3)])


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "prompt 1 is empty; give it at least one token"),
        ([1] * 49, "prompt 1 has 49 tokens but the cache holds prompts of 48; shorten it"),
        ([1, 16], "prompt 1 has the token id 16 but the model knows 0 to 15"),
        ([-2, 3], "prompt 1 has the token id -2 but the model knows 0 to 15"),
    ],
)
def test_a_bad_prompt_is_named(batched, prompt, told):
    with pytest.raises(UserError, match=told):
        batched.prefill([PROMPTS[0], np.array(prompt, np.int64)])


def test_a_model_that_diverged_is_told(batched, monkeypatch):
    broken = batched.params | {"final_norm": {"scale": np.full(16, np.nan, np.float32)}}
    monkeypatch.setattr(batched, "params", broken)
    with pytest.raises(UserError, match="prompt 7: the logits of new token 0 are no numbers"):
        generated(batched, PROMPTS[1:2], first_index=7)


@pytest.mark.parametrize("name", ["rows", "prompt_length", "new_tokens", "chunk", "burst"])
def test_numbers_that_are_not_positive_are_refused(name):
    with pytest.raises(UserError, match=f"{name} is 0; use 1 or more"):
        make_engine(**{name: 0})

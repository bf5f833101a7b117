"""What evals say of a model's inside and of its recall in text, against cases known by hand."""

import re

import jax
import numpy as np
import pytest

import tiny_models
from fastweights import config as config_lib
from fastweights import evals, sharding
from fastweights.data import load_tokenizer
from fastweights.errors import UserError
from fastweights.evals import ablation, state_rank, text_recall
from fastweights.evals.age import answer_age
from fastweights.evals.ar_hits import repeated_bigrams
from fastweights.model import abstract_model
from fastweights.tasks import lookup
from fastweights.training.optim import path_names
from runs import TINY


def make(spec, *overrides):
    config = config_lib.load(spec, ["mesh.data=1", *overrides])
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    context = evals.Context(config, abstract_model(config.model)[0], mesh)
    return context, tiny_models.noisy_params(config.model)


def test_a_silenced_letter_is_zeroed_in_groups_and_tail_and_no_other():
    config = tiny_models.config("LWD", 5, dtype="float32", param_dtype="float32")
    params = tiny_models.noisy_params(config)
    silent = ablation.silence(config, params, {"W", "L"})
    leaves = jax.tree_util.tree_flatten_with_path(silent)[0]
    zero = {path_names(path)[:2] for path, leaf in leaves if not np.asarray(leaf).any()}
    assert zero == {("groups", "layer_0"), ("groups", "layer_1"), ("tail", "layer_0"),
                    ("tail", "layer_1")}  # fmt: skip
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, silent)
    assert sum(jax.tree.leaves(changed)) == 4


def test_ablation_of_a_hybrid_tells_what_each_kind_carries(monkeypatch):
    # The second is longer than a row of training.
    context, params = make(TINY, "data.mqar.test=((8,2),(24,3))")
    found = evals.run("ablation", context, params)["ablation"]
    assert list(found.metrics) == ["without_none", "without_attention", "without_memory"]
    kinds = ["", "/without attention", "/without memory"]
    slices = [name + kind for kind in kinds for name in ("T8_K2", "T24_K3")]
    assert [row["slice"] for row in found.rows] == slices
    nll = [row["nll"] for row in found.rows[::2]]
    assert len({round(value, 3) for value in nll}) == 3
    assert nll[0] == evals.run("recall", context, params)["recall"].rows[0]["nll"]


def test_age_counts_from_the_last_place_in_the_same_example():
    batch = {
        "tokens": np.array([[1, 9, 1, 9, 1, 0, 9, 2, 0, 1]]),
        "targets": np.array([[-1, -1, -1, -1, 9, -1, -1, 9, -1, 9]]),
        "positions": np.array([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0]]),
    }
    assert answer_age(batch)[0].tolist() == [0, 0, 0, 0, 1, 0, 0, 1, 0, 0]


def test_age_of_an_untrained_model_has_all_answers_in_ranges():
    context, params = make(TINY, "data.mqar.test=((8,2),(16,3))")
    rows = evals.run("age", context, params)["age"].rows
    assert sum(row["answers"] for row in rows) == 20 * 2 + 20 * 3
    assert rows[0]["slice"] == "age 1-1" or rows[0]["slice"] == "age 2-3"


def test_effective_rank_counts_even_directions():
    one = np.outer(np.arange(1, 5), np.arange(1, 4)).astype(float)
    found = state_rank.effective_rank(np.stack([one, np.eye(4, 3), np.zeros((4, 3))]))
    np.testing.assert_allclose(found, [1, 3, 0], atol=1e-9)


def test_the_rank_of_a_state_is_that_of_what_was_written():
    """Linear attention's state is a sum of outer products: of one token, a single direction."""
    words = ("data.kind=parity", "data.parity.train=((1,1.0),)")
    words += ("model.mixers.L.feature_map=identity",)
    for test, length in (("(1,)", 1), ("(16,)", 16)):
        size = (f"data.parity.test={test}", f"data.length={length}")
        rows = evals.run("state_rank", *make(TINY, "model.pattern=L", *words, *size))
        rows = rows["state_rank"].rows
        assert [row["slice"] for row in rows] == ["groups.layer_0[0] L", "groups.layer_0[1] L"]
        for row in rows:
            assert row["rank"] == pytest.approx(1, abs=1e-3) if length == 1 else row["rank"] > 1.1
            assert row["rank"] <= row["most"]
    with pytest.raises(UserError, match="pattern 'A' has no layer with a matrix"):
        evals.run("state_rank", *make(TINY, "model.pattern=A"))


def test_a_bigram_is_a_hit_from_its_second_time_in_a_document():
    batch = {
        "tokens": np.array([[1, 2, 1, 2, 1, 2, 1], [1, 2, 1, 2, 1, 2, 9]]),
        "targets": np.array([[2, 1, 2, -1, 2, 1, 2], [2, 1, 2, -1, 2, 1, 9]]),
        "segment_ids": np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1]]),
    }
    assert repeated_bigrams(batch, 10).astype(int).tolist() == [
        [0, 0, 1, 0, 0, 0, 1],
        [0, 0, 1, 0, 1, 1, 0],
    ]


def test_hits_and_rest_make_up_the_perplexity():
    context, params = make(f"{TINY}:text", "data.length=64", "model.pattern=A")
    found = evals.run("ppl,ar_hits", context, params)
    rows = found["ar_hits"].rows
    assert [row["slice"] for row in rows] == ["hits", "rest"]
    weights = [row["targets"] for row in rows]
    mean = np.average([row["nll"] for row in rows], weights=weights)
    assert mean == pytest.approx(found["ppl"].metrics["nll"], rel=1e-6)
    assert 0.02 < weights[0] / sum(weights) < 0.5


NIAH = text_recall.NIAH["niah"]


@pytest.fixture(scope="module")
def hybrid():
    return make(f"{TINY}:text", "data.length=48", "model.pattern=GA")


def test_recall_in_text_is_the_same_through_the_cache(hybrid, monkeypatch):
    context, params = hybrid
    monkeypatch.setattr(text_recall, "PROMPTS", 12)  # in batches of 8
    eval_ = text_recall.MQAR_TEXT
    batch = text_recall.encode(eval_._prompts(2), load_tokenizer("bytes"))
    found = eval_._score(context, params, batch)
    assert found["answers"] == 12 * 2 * 2  # two digits, and not the space before them
    assert found["agree"] == 1.0 and found["nll_gap"] < 1e-4
    # Without the last token of the prefill it does not.
    decode = text_recall.decode

    def forgets(context, params, batch):
        return decode(context, params, batch | {"tokens": np.where(
            batch["positions"] < 3, 0, batch["tokens"])})  # fmt: skip

    monkeypatch.setattr(text_recall, "decode", forgets)
    assert eval_._score(context, params, batch)["nll_gap"] > 1e-3


@pytest.mark.parametrize(
    ("eval_", "size"),
    [(NIAH, 200), (text_recall.PHONEBOOK, 12), (text_recall.MQAR_TEXT, 9)],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_text_of_a_prompt_holds_its_answers_once_before_each_question(eval_, size):
    tokenizer = load_tokenizer("bytes")
    prompts = eval_._prompts(size)
    assert prompts == eval_._prompts(size) != eval_._prompts(size + 1)
    batch = text_recall.encode(prompts, tokenizer)
    for pieces, targets in zip(prompts, batch["targets"], strict=True):
        text, answered = "", ""
        for piece, is_answer in pieces:
            if is_answer:
                question = re.split(r"\n|(?= The code)", text)[-1]
                assert f"{question}{piece}" in text, "the text tells it"
                tells = re.findall(re.escape(question) + r"( \d+)", text)
                assert set(tells) == {piece}, "and nothing else"
                answered += piece
            text += piece
        assert bytes(targets[targets >= 0].tolist()).decode() == answered.replace(" ", "")


@pytest.mark.parametrize(
    ("name", "needles", "keys", "asked"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multi_key", 4, 4, 1),
        ("niah_multi_value", 4, 1, 4),
        ("niah_multi_query", 4, 4, 4),
    ],
)
def test_needles_of_every_variant_are_told_and_asked(name, needles, keys, asked):
    noise = lookup.NOISE.decode()
    orders, places = set(), set()
    for (told, _), *rest in text_recall.NIAH[name]._prompts(300):
        found = re.findall(r" The code of (\w{6}) is ([0-9a-f-]+)\.", told)
        hay = re.sub(r" The code of \w{6} is [0-9a-f-]+\.", "", told)
        assert len(found) == needles and len({key for key, _ in found}) == keys
        assert len(hay) == 300 and (hay in noise * 9) == (name == "niah_single_1")
        form = r"\w{8}(-\w{4}){3}-\w{12}" if name == "niah_single_3" else r"\d{7}"
        assert all(re.fullmatch(form, value) for _, value in found)
        text = "".join(piece for piece, _ in rest) + "."
        values = [value for _, value in found]
        if name == "niah_multi_value":
            assert text == f" The code of {found[0][0]} is {' '.join(values)}."
        else:
            again = re.findall(r" The code of (\w{6}) is ([0-9a-f-]+)\.", text)
            assert len(again) == asked and set(again) <= set(found)
            orders.add(tuple(found.index(needle) for needle in again))
            assert len(set(again)) == asked
        batch = text_recall.encode([[(told, False), *rest]], load_tokenizer("bytes"))
        asked_T = batch["targets"][batch["targets"] >= 0]
        # All of a value is asked but for its dashes and the space before it.
        right = values if name == "niah_multi_value" else [value for _, value in again]
        assert bytes(asked_T.tolist()).decode() == "".join(right).replace("-", "")
        places.add(told.index(" The code of "))
    assert len(places) > 20
    assert len(orders) > 1 if needles > 1 and keys > 1 else len(orders) <= 1


def test_sizes_grow_to_what_a_row_holds():
    tokenizer = load_tokenizer("bytes")
    for eval_, length in ((NIAH, 400), (text_recall.PHONEBOOK, 400)):
        size = eval_._largest(tokenizer, length)
        used = text_recall.encode(eval_._prompts(size), tokenizer)["tokens"].shape[1]
        assert 0.85 * length < used <= length
    assert text_recall.PHONEBOOK._largest(tokenizer, 10**6) > 180


class Lossy:
    """Has no capital letters."""

    vocab_size = 256

    def encode_many(self, texts):
        return [np.frombuffer(text.lower().encode(), np.uint8) for text in texts]

    def decode(self, ids):
        return bytes(ids).decode()


def test_what_can_not_be_asked_is_told(hybrid):
    with pytest.raises(UserError, match=r"eval niah have \d+ tokens, and data\.length is 48"):
        evals.run("niah", *hybrid)
    with pytest.raises(UserError, match=r"tokenizer can't spell the prompt .* The code of"):
        text_recall.encode(NIAH._prompts(40), Lossy())
    with pytest.raises(UserError, match=r"data\.kind is 'mqar', which has no tokenizer"):
        evals.run("phonebook", *make(TINY))
    with pytest.raises(UserError, match="no answers of an age"):
        config_lib.load(f"{TINY}:text", ["eval.final=age"])
    with pytest.raises(UserError, match="no age; choose a recall task"):
        fields = ("data.length=32", "model.vocab_size=256", "data.memorize.test_examples=4")
        evals.run("age", *make(TINY, "data.kind=memorize", *fields))

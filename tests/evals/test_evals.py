"""Evals against models whose scores are known in closed form."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastweights import config as config_lib
from fastweights import evals, sharding
from fastweights.data import eval_datasets, open_text
from fastweights.data.packing import pack, to_batch, unpack
from fastweights.errors import UserError
from fastweights.evals.length import longer_rows
from fastweights.evals.perplexity import perplexity
from fastweights.model import abstract_model, init_params
from fastweights.tasks.oracles import solve
from fastweights.training.loss import TokenLoss
from runs import TINY

PLAIN = ("model.pattern=A", "model.num_layers=1", "data.length=32", "eval.max_batches=0")


def make_context(spec: str, *overrides: str) -> evals.Context:
    config = config_lib.load(spec, [*PLAIN, *overrides])
    mesh = sharding.make_mesh(config.mesh, jax.devices())
    return evals.Context(config, abstract_model(config.model)[0], mesh)


def uniform(context: evals.Context):
    """Parameters with which every token is equally likely everywhere."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), abstract_model(context.config.model)[1])


@pytest.fixture
def recall_context() -> evals.Context:
    return make_context(TINY)


@pytest.fixture(scope="module")
def text_context() -> evals.Context:
    return make_context(f"{TINY}:text")


def with_predictions(context, monkeypatch, predict):
    """Makes the context answer with `predict(batch)` instead of a model."""

    def scores(_, batches):
        for batch in batches:
            correct = (batch["targets"] >= 0) & (predict(batch) == batch["targets"])
            yield batch, TokenLoss(np.zeros(correct.shape), np.zeros(correct.shape), correct)

    monkeypatch.setattr(context, "scores", scores)


def oracle(context):
    return functools.partial(solve, context.config.data.task)


def test_the_oracle_recalls_everything(recall_context, monkeypatch):
    with_predictions(recall_context, monkeypatch, oracle(recall_context))
    results = evals.run("recall", recall_context, None)["recall"]
    assert results.metrics == {"mean": 1.0}
    assert [row["slice"] for row in results.rows] == ["T8_K2", "T16_K3", "T24_K3"]
    assert [row["answers"] for row in results.rows] == [40, 60, 60]


def test_recall_counts_answers_only(recall_context, monkeypatch):
    """Right for every second answer: a half, whatever stands at the other positions."""

    def half(batch):
        answers = np.cumsum(batch["targets"] >= 0, axis=1) % 2 == 0
        return np.where(answers, batch["targets"], 0)

    with_predictions(recall_context, monkeypatch, half)
    rows = evals.run("recall", recall_context, None)["recall"].rows
    assert rows[0]["recall"] == 0.5
    assert rows[0]["whole"] == 0.0


def test_whole_examples_and_kinds_of_answers_are_scored_apart(monkeypatch):
    """Wrong at most first answers and wherever a key was written anew."""
    context = make_context(TINY, "data.kind=mqar_overwrite", "data.length=40")

    def predict(batch):
        first = np.cumsum(batch["targets"] >= 0, axis=1) == 1
        first[::2] = False
        return np.where(first | (batch["kinds"] == 0), -9, batch["targets"])

    with_predictions(context, monkeypatch, predict)
    rows = evals.run("recall", context, None)["recall"].rows
    assert [row["slice"].partition("/")[2] for row in rows] == ["", "updated", "untouched"]
    everything, updated, untouched = rows
    assert (updated["recall"], updated["whole"]) == (0.0, 0.0)
    assert updated["answers"] == untouched["answers"] == everything["answers"] // 2
    assert everything["whole"] == 0.0 and 0.4 < everything["recall"] < 0.5
    # The first answer of every second example is of this kind half the time.
    assert 0.6 < untouched["whole"] < 0.9
    assert untouched["recall"] == pytest.approx(2 * everything["recall"])


def test_slices_longer_than_a_row_are_left_to_the_length_eval(monkeypatch):
    context = make_context(TINY, "data.length=16")
    with_predictions(context, monkeypatch, oracle(context))
    found = evals.run("recall,length", context, None)
    assert [row["slice"] for row in found["recall"].rows] == ["T8_K2", "T16_K3"]
    assert [row["slice"] for row in found["length"].rows] == ["T24_K3"]


def test_a_uniform_model_has_the_loss_of_its_vocabulary(recall_context):
    rows = evals.run("recall", recall_context, uniform(recall_context))["recall"].rows
    for row in rows:
        np.testing.assert_allclose(row["nll"], math.log(32), rtol=1e-6)


def test_bits_per_byte_of_a_uniform_model(text_context):
    result = evals.run("ppl", text_context, uniform(text_context))["ppl"]
    counts = open_text(text_context.config.data).counts["held_out"]
    expected = math.log2(257) * counts.targets / counts.bytes
    np.testing.assert_allclose(result.metrics["bits_per_byte"], expected, rtol=1e-6)
    np.testing.assert_allclose(result.metrics["ppl"], 257, rtol=1e-5)
    assert sum(row["targets"] for row in result.rows) == counts.targets
    assert [row["slice"] for row in result.rows] == ["0-0", "1-3", "4-15", "16-31"]


def test_longer_rows_are_the_same_text_packed_longer(text_context):
    corpus = open_text(text_context.config.data)
    eod = corpus.tokenizer.eod_id
    documents = list(unpack(corpus.rows["held_out"], eod))
    expected = to_batch(list(pack(documents, 3 * corpus.length, eod)), 3 * corpus.length, eod)
    found = list(longer_rows(corpus, 3, 8))
    for name, array in expected.items():
        joined = np.concatenate([batch[name] for batch in found])
        np.testing.assert_array_equal(joined[: len(array)], array, err_msg=name)
        assert (joined[len(array) :] == (-1 if name == "targets" else 0)).all()


def test_length_at_the_training_length_is_the_perplexity(text_context):
    params = init_params(text_context.config.model, jax.random.key(0))
    found = evals.run("ppl,length", text_context, params)
    np.testing.assert_allclose(
        found["length"].metrics["nll_x1"], found["ppl"].metrics["nll"], rtol=1e-6
    )
    first, second, fourth = found["length"].rows
    assert first["beyond"] is None and first["targets beyond"] == 0
    assert 0 < second["targets beyond"] < fourth["targets beyond"]


def test_max_batches_reads_no_more(text_context):
    config = config_lib.override(text_context.config, ["eval.max_batches=1"])
    context = evals.Context(
        config, abstract_model(config.model)[0], sharding.make_mesh(config.mesh)
    )
    result = evals.run("ppl", context, uniform(context))["ppl"]
    first = eval_datasets(config.data, rows=8)["held_out"][0]
    assert sum(row["targets"] for row in result.rows) == (first["targets"] >= 0).sum()


@pytest.mark.parametrize(
    "spec, override, told",
    [
        (TINY, "eval.final=ppl", "no held-out text"),
        (TINY, "data.length=24", "no slice longer than data.length 24"),
        (f"{TINY}:text", "eval.final=recall", "no recall slices"),
    ],
)
def test_an_eval_that_does_not_fit_the_data_is_refused_with_the_config(spec, override, told):
    fields = ["eval.final=length"] if "length" in override else []
    with pytest.raises(UserError, match=told):
        config_lib.load(spec, [*fields, override])


def test_a_diverged_model_has_infinite_perplexity():
    assert perplexity(1e4) == math.inf


def test_results_are_written_as_they_are(tmp_path):
    result = evals.Result({"mean": 0.5}, [{"slice": "T8_K2", "recall": 0.5, "beyond": None}])
    evals.write(tmp_path, 7, {"recall": result})
    stored = json.loads((tmp_path / "evals" / "recall-7.json").read_text())
    assert stored == {"eval": "recall", "step": 7, **dataclasses.asdict(result)}
    assert evals.flat_metrics({"recall": result}) == {"recall/mean": 0.5}

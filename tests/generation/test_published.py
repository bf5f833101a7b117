"""A published model through the engine: the tokens and likelihoods computed elsewhere."""

import jax
import numpy as np

import published
from fastweights.generation import Engine, Scorer

# Mixtures of experts, grouped heads, partial rotary, gates: the most that a model has here.
MODEL = published.DATA / "published" / "tiny_qwen3_next"
ROWS = 3


def test_greedy_tokens_and_likelihoods_of_a_published_model():
    """A left-padded batch of two, and a prompt of another length beside them."""
    case = published.read(MODEL)
    stored, config, params = case.reference, case.config, case.params
    prompts = [*stored["greedy_batch_prompt"], *stored["greedy_prompt"]]
    mask = [*stored["greedy_batch_mask"], np.ones(len(stored["greedy_prompt"][0]))]
    want = np.concatenate([stored["greedy_batch_new_tokens"], stored["greedy_new_tokens"]])
    prompts = [ids[real == 1] for ids, real in zip(prompts, mask, strict=True)]
    assert len({len(ids) for ids in prompts}) > 1
    longest = max(map(len, prompts))
    engine = Engine(
        config, params, rows=ROWS, prompt_length=longest, new_tokens=16, chunk=8, burst=8
    )
    found = np.concatenate(list(engine.generate(prompts)), axis=1)
    np.testing.assert_array_equal(found, want)

    # The whole row, in chunks of another size than the stored forward pass had.
    tokens = stored["input_ids"]
    length = tokens.shape[1]
    scorer = Scorer(config, params, rows=ROWS, length=length, chunk=32)
    scores = scorer.score([(row, length - 1) for row in tokens])
    log_p = np.asarray(jax.nn.log_softmax(stored["logits"][:, :-1].astype(np.float64)))
    for row, ids, score in zip(log_p, tokens, scores, strict=True):
        expected = row[np.arange(length - 1), ids[1:]].sum()
        np.testing.assert_allclose(score.log_likelihood, expected, rtol=1e-5)

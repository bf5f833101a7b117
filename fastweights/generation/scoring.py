"""Log-likelihoods of texts of any length, over the caches that generation uses: read in chunks, or
token by token as generation reads its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import batched
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastweights.errors import check
from fastweights.generation.engine import Engine, flush_right, round_up
from fastweights.generation.weights import for_decoding, place_rows, split, unrolled
from fastweights.model import ModelConfig, abstract_model, bind
from fastweights.training.loss import IGNORE, hidden_loss

# Tokens a row whose logits exist at one time.
LOGITS_AT_ONCE = 64


class Score(NamedTuple):
    """Of the scored tokens of one text.

    Attributes:
      log_likelihood: summed, in nats.
      greedy: whether each of them is the model's most likely next token.
    """

    log_likelihood: float
    greedy: bool


class Scorer:
    """One model compiled to score batches of `rows` texts of at most `length` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Any],
        *,
        rows: int,
        length: int,
        chunk: int = 512,
    ):
        self.config, self.params = unrolled(config), for_decoding(config, params)
        self.rows, self.chunk = rows, min(chunk, 1 << (length - 1).bit_length())
        slots = round_up(length, self.chunk)
        graphdef, _, _ = abstract_model(self.config)

        def score(cache, params, tokens_BC, ids_BC, targets_BC):
            model = bind(graphdef, split(params))
            h_BCD, cache = model.hidden(tokens_BC, segment_ids_BT=ids_BC, cache=cache)
            losses = hidden_loss(model, h_BCD, targets_BC, loss_chunk=LOGITS_AT_ONCE)
            missed_B = jnp.any((targets_BC != IGNORE) & ~losses.correct_BT, axis=1)
            return cache, -losses.nll_BT.sum(axis=1), missed_B

        def fresh(params):
            return bind(graphdef, split(params)).init_cache(rows, slots)

        placement = place_rows(self.params, rows)
        placed = placement.of(jax.eval_shape(fresh, self.params))
        outs = (placed, placement.whole, placement.whole)
        self._fresh = jax.jit(fresh, out_shardings=placed)
        self._score = jax.jit(score, donate_argnums=0, out_shardings=outs)

    def score(self, texts: Sequence[tuple[np.ndarray, int]]) -> list[Score]:
        """Scores texts in order.

        Args:
          texts: (token ids, how many of the last of them to score); the tokens before are context,
            at least one.

        Raises:
          UserError: a text whose first token would be scored.
        """
        return [score for batch in batched(texts, self.rows) for score in self._batch(batch)]

    def _batch(self, texts: Sequence[tuple[np.ndarray, int]]) -> list[Score]:
        inputs, targets = [], []
        for ids, scored in texts:
            check(
                0 <= scored < len(ids),
                f"{scored} of a text's {len(ids)} tokens are to be scored; the first one has "
                "nothing before it, so score fewer.",
            )
            inputs.append(ids[:-1])
            targets.append(np.where(np.arange(1, len(ids)) >= len(ids) - scored, ids[1:], IGNORE))
        missing = self.rows - len(texts)
        tokens, segment_ids = flush_right([*inputs, *[inputs[0]] * missing], self.chunk)
        wanted, _ = flush_right([*targets, *[targets[0]] * missing], self.chunk, fill=IGNORE)
        cache = self._fresh(self.params)
        total, missed = np.zeros(self.rows), np.zeros(self.rows, bool)
        for at in range(0, tokens.shape[1], self.chunk):
            piece = slice(at, at + self.chunk)
            cache, likelihood_B, missed_B = self._score(
                cache, self.params, tokens[:, piece], segment_ids[:, piece], wanted[:, piece]
            )
            total += np.asarray(likelihood_B, np.float64)
            missed |= np.asarray(missed_B)
        return [Score(float(total[i]), not missed[i]) for i in range(len(texts))]


def score_steps(
    engine: Engine, prompts: Sequence[np.ndarray], tokens_PN: np.ndarray, targets_PN: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Reads prompts as generation does, then given tokens one at a time in place of its own choice.

    Args:
      engine: with room for the prompts and what follows them; reads `rows` of them at a time.
      prompts: token ids, one array a prompt, P of them.
      tokens_PN: int32, what follows the prompts.
      targets_PN: int32, what to score in its place; those below 0 are not wanted.

    Returns:
      (nll_PN float32 in nats, correct_PN bool: the target is the likeliest token); 0 and False
      where there is no target.
    """

    def score(params, cache, logits_BV, tokens_NB, targets_NB):
        def step(carry, given):
            (cache, logits_BV), (token_B, target_B) = carry, given
            logs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
            nll_B1 = -jnp.take_along_axis(logs_BV, jnp.maximum(target_B, 0)[:, None], axis=1)
            nll_B = jnp.where(target_B < 0, 0.0, nll_B1[:, 0])
            correct_B = jnp.argmax(logs_BV, axis=1) == target_B
            return engine.step(params, cache, token_B), (nll_B, correct_B)

        (cache, _), found = jax.lax.scan(step, (cache, logits_BV), (tokens_NB, targets_NB))
        return cache, found  # The cache too, so that it is written in place.

    run = jax.jit(score, donate_argnums=1)
    pieces = []
    for start in range(0, len(prompts), engine.rows):
        piece = slice(start, start + engine.rows)
        cache, logits_BV = engine.prefill(prompts[piece])
        missing = ((0, engine.rows - len(prompts[piece])), (0, 0))
        tokens_BN = np.pad(tokens_PN[piece], missing)
        targets_BN = np.pad(targets_PN[piece], missing, constant_values=IGNORE)
        found = run(engine.params, cache, logits_BV, tokens_BN.T, targets_BN.T)[1]
        pieces.append(jax.device_get(found))
    nll_NP, correct_NP = (np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True))
    return nll_NP.T[: len(prompts)], correct_NP.T[: len(prompts)]

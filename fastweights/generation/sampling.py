"""From logits to the next token: greedy, or drawn with temperature, top-k, top-p and min-p.

Shapes: B rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from fastweights.errors import check

NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen.

    Each filter looks at what the one before it left, in the order of the fields; the most likely
    token always stays.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token, whatever the filters say.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: of these keep the fewest, most likely first, that hold this share of the probability
        (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751); 1 keeps all.
      min_p: of these keep the tokens that are at least this times as likely as the most likely one
        (Nguyen et al. 2024, arXiv:2407.01082); 0 keeps all.
      seed: of all draws.

    Raises:
      UserError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check(
            0 <= self.temperature < math.inf,
            f"temperature is {self.temperature}; use 0 (the most likely token) or more.",
        )
        check(self.top_k >= 0, f"top_k is {self.top_k}; use 0 (all tokens) or more.")
        check(0 < self.top_p <= 1, f"top_p is {self.top_p}; use a share above 0, at most 1.")
        check(0 <= self.min_p <= 1, f"min_p is {self.min_p}; use a share between 0 and 1.")
        check(0 <= self.seed < 2**32, f"seed is {self.seed}; use 0 or more, below 2**32.")


def choose(
    logits_BV: jax.Array, keys_B: jax.Array, config: SamplingConfig, vocab_size: int
) -> jax.Array:
    """The next token of each row.

    Args:
      logits_BV: float logits.
      keys_B: a random key a row; a row's token is a function of its own key and logits.
      config: how to choose.
      vocab_size: ids from here on are never chosen (a model may have more rows than its tokenizer).

    Returns:
      int32 tokens [B]; `NO_TOKEN` for a row with a logit that is NaN.
    """
    usable_BV = logits_BV.astype(jnp.float32)[:, :vocab_size]
    if config.temperature == 0:
        # Counts a NaN as the largest, and so finds one without a second look at all logits.
        token_B = jnp.argmax(usable_BV, axis=-1)
        found_B = jnp.take_along_axis(usable_BV, token_B[:, None], axis=1)[:, 0]
        broken_B = jnp.isnan(found_B)
    else:
        ids_BC, kept_BC = _filter(usable_BV / config.temperature, config)
        place_B = jax.vmap(jax.random.categorical)(keys_B, kept_BC)
        token_B = place_B
        if ids_BC is not None:
            token_B = jnp.take_along_axis(ids_BC, place_B[:, None], axis=1)[:, 0]
        broken_B = jnp.isnan(usable_BV).any(axis=-1)
    return jnp.where(broken_B, NO_TOKEN, token_B).astype(jnp.int32)


def _filter(logits_BV: jax.Array, config: SamplingConfig) -> tuple[jax.Array | None, jax.Array]:
    """Candidates' ids (None: every token in its place) and logits, -inf where filtered out."""
    V = logits_BV.shape[1]
    ids_BC, kept_BC = None, logits_BV
    if config.top_k or config.top_p < 1:
        # Sorted, so that what each filter keeps is a beginning of the row.
        kept_BC, ids_BC = jax.lax.top_k(logits_BV, min(config.top_k or V, V))
    if config.top_p < 1:
        share_BC = jax.nn.softmax(kept_BC, axis=-1)
        before_BC = jnp.cumsum(share_BC, axis=-1) - share_BC
        kept_BC = jnp.where(before_BC < config.top_p, kept_BC, -jnp.inf)
    if config.min_p > 0:
        most_B1 = jnp.max(kept_BC, axis=-1, keepdims=True)
        kept_BC = jnp.where(kept_BC >= most_B1 + math.log(config.min_p), kept_BC, -jnp.inf)
    return ids_BC, kept_BC

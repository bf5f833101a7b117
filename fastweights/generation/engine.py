"""Prefill in chunks, then one token a step: two compiled programs over caches that they donate.

Shapes: B rows, C tokens of a chunk, N steps of a burst, V vocabulary.

Prompts of unequal lengths stand flush right: padding (segment 0) comes first, so that all rows end
in the same slot and every mixer passes over what is not there.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastweights.errors import UserError, check
from fastweights.generation.sampling import NO_TOKEN, SamplingConfig, choose
from fastweights.generation.weights import for_decoding, join, place_rows, split, unrolled
from fastweights.model import HybridLM, ModelConfig, abstract_model, bind


@dataclasses.dataclass
class Timing:
    """Tokens and seconds so far, compilation left out.

    Attributes:
      prefill_tokens: of prompts, padding left out.
      decode_tokens: of all rows asked for, those behind a stop included.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


def read_on(
    model: HybridLM, cache: Any, tokens_BT: jax.Array, ids_BT: jax.Array | None = None
) -> tuple[Any, jax.Array]:
    """(cache, logits_BV of the token after) once these tokens are read; to be traced.

    Args:
      ids_BT: their documents, 0 for padding; None for rows without any.
    """
    h_BTD, cache = model.hidden(tokens_BT, segment_ids_BT=ids_BT, cache=cache)
    return cache, model.unembed(h_BTD[:, -1:])[:, 0]


class Engine:
    """One model compiled for batches of `rows` prompts; serves any number of batches in turn.

    Args:
      config: the model as it was trained.
      params: its parameters.
      rows: prompts of a batch, B.
      prompt_length: tokens of the longest prompt that will come.
      new_tokens: most tokens to generate after a prompt.
      vocab_size: ids that may be generated; the model's own by default.
      sampling: how tokens are chosen.
      chunk: tokens of all rows that prefill reads at a time, C.
      burst: steps between two looks at what was generated, N.

    Raises:
      UserError: a number that is not positive.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Any],
        *,
        rows: int,
        prompt_length: int,
        new_tokens: int,
        vocab_size: int = 0,
        sampling: SamplingConfig | None = None,
        chunk: int = 512,
        burst: int = 16,
    ):
        for name, value in (
            ("rows", rows),
            ("prompt_length", prompt_length),
            ("new_tokens", new_tokens),
            ("chunk", chunk),
            ("burst", burst),
        ):
            check(value >= 1, f"{name} is {value}; use 1 or more.")
        self.config = unrolled(config)
        self.params = join(for_decoding(config, params))
        self.rows, self.new_tokens = rows, new_tokens
        self.vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
        self.sampling = sampling or SamplingConfig()
        # A short prompt need not be padded to a whole long chunk.
        self.chunk = min(chunk, 1 << (prompt_length - 1).bit_length())
        self.burst = min(burst, new_tokens)
        self.prompt_slots = round_up(prompt_length, self.chunk)
        self.timing = Timing()
        self._graphdef, _, _ = abstract_model(self.config)
        slots = self.prompt_slots + round_up(new_tokens, self.burst)
        self._placement = place_rows(self.params, rows)

        def fresh(params):
            return self._model(params).init_cache(rows, slots)

        self._cache = self._placement.shapes(jax.eval_shape(fresh, self.params))
        self._cache_placed = self._placement.of(self._cache)
        self._fresh = jax.jit(fresh, out_shardings=self._cache_placed)
        self.cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._cache))

    @functools.cached_property
    def _prefill_program(self) -> jax.stages.Compiled:
        """(cache, params, tokens_BC, ids_BC) -> (cache, logits_BV of the last token)."""

        def prefill(cache, params, tokens_BC, ids_BC):
            return read_on(self._model(params), cache, tokens_BC, ids_BC)

        rows = self._placement.rows
        ids_BC = jax.ShapeDtypeStruct((self.rows, self.chunk), jnp.int32, sharding=rows)
        outs = (self._cache_placed, rows)
        jitted = jax.jit(prefill, donate_argnums=0, out_shardings=outs)
        return jitted.lower(self._cache, self.params, ids_BC, ids_BC).compile()

    @functools.cached_property
    def _decode_program(self) -> jax.stages.Compiled:
        """(cache, params, logits_BV, start, first_index) -> (cache, logits_BV, tokens_BN)."""

        def decode(cache, params, logits_BV, start, first_index):
            fold = jax.vmap(jax.random.fold_in, (None, 0))
            keys_B = fold(jax.random.key(self.sampling.seed), first_index + jnp.arange(self.rows))

            def step(carry, number):
                cache, logits_BV = carry
                keys_now_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, number)
                token_B = choose(logits_BV, keys_now_B, self.sampling, self.vocab_size)
                return self.step(params, cache, token_B), token_B

            numbers = start + jnp.arange(self.burst)
            (cache, logits_BV), tokens_NB = jax.lax.scan(step, (cache, logits_BV), numbers)
            return cache, logits_BV, tokens_NB.T

        acc, (rows, whole) = jnp.promote_types(self.config.dtype, jnp.float32), self._placement
        shape = (self.rows, self.config.vocab_size)
        logits_BV = jax.ShapeDtypeStruct(shape, acc, sharding=rows)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        outs = (self._cache_placed, rows, whole)
        jitted = jax.jit(decode, donate_argnums=(0, 2), out_shardings=outs)
        return jitted.lower(self._cache, self.params, logits_BV, number, number).compile()

    def step(self, params: Any, cache: Any, token_B: jax.Array) -> tuple[Any, jax.Array]:
        """(cache, logits_BV of the token after) once one more token a row is read; to be traced."""
        return read_on(self._model(params), cache, token_B[:, None])

    def _model(self, params: Any) -> HybridLM:
        return bind(self._graphdef, split(params))

    def compile_decode(self) -> None:
        """Compiles what `decode` runs, which else happens when it is first called."""
        _ = self._decode_program

    def check_prompts(self, prompts: Sequence[np.ndarray]) -> None:
        """Raises UserError for the first that is empty, too long, or holds a strange id."""
        for number, ids in enumerate(prompts):
            _check_prompt(number, ids, self.prompt_slots, self.config.vocab_size)

    def fresh_cache(self) -> Any:
        """Caches that hold nothing yet; UserError where the device has no room for them."""
        try:
            return jax.block_until_ready(self._fresh(self.params))
        except jax.errors.JaxRuntimeError as error:
            check(
                "RESOURCE_EXHAUSTED" not in str(error),
                f"the caches of {self.rows} rows take {self.cache_bytes / 1e9:,.1f} GB, which the "
                "device has no room for; use fewer rows or new tokens, or shorter prompts.",
            )
            raise

    def prefill(self, prompts: Sequence[np.ndarray]) -> tuple[Any, jax.Array]:
        """Reads up to `rows` prompts.

        Args:
          prompts: token ids, one array a prompt; missing rows repeat the first one.

        Returns:
          (cache, logits_BV float32 of the token after each prompt).

        Raises:
          UserError: an empty prompt, one that is too long, or an id that the model does not have.
        """
        check(0 < len(prompts) <= self.rows, f"{len(prompts)} prompts do not fit {self.rows} rows.")
        self.check_prompts(prompts)
        padded = [*prompts, *[prompts[0]] * (self.rows - len(prompts))]
        tokens, ids = flush_right(padded, self.chunk)
        program, cache = self._prefill_program, self.fresh_cache()
        started = time.perf_counter()
        logits_BV: Any = None
        for at in range(0, tokens.shape[1], self.chunk):
            piece = slice(at, at + self.chunk)
            cache, logits_BV = program(cache, self.params, tokens[:, piece], ids[:, piece])
        jax.block_until_ready(logits_BV)
        self.timing.prefill_seconds += time.perf_counter() - started
        self.timing.prefill_tokens += sum(map(len, prompts))
        return cache, logits_BV

    def decode(
        self, cache: Any, logits_BV: jax.Array, start: int, first_index: int = 0
    ) -> tuple[Any, jax.Array, np.ndarray]:
        """One burst: new tokens `start` to `start + burst`; cache and logits are given up.

        Returns:
          (cache, logits_BV of the token after the burst, int32 tokens_BN).
        """
        program = self._decode_program
        started = time.perf_counter()
        cache, logits_BV, tokens_BN = program(
            cache, self.params, logits_BV, np.int32(start), np.int32(first_index)
        )
        tokens_BN = np.asarray(tokens_BN)
        self.timing.decode_seconds += time.perf_counter() - started
        return cache, logits_BV, tokens_BN

    def generate(self, prompts: Sequence[np.ndarray], first_index: int = 0) -> Iterator[np.ndarray]:
        """Tokens after each prompt, as int32 arrays [prompts, up to `burst`], until `new_tokens`.

        Close the iterator to end earlier.

        Args:
          prompts: as in `prefill`.
          first_index: number of the first prompt. Random draws are a function of the seed, the
            prompt's number and the token's, so a prompt's text does not depend on its batch.

        Raises:
          UserError: as `prefill`; or the model gives logits that are no numbers.
        """
        cache, logits_BV = self.prefill(prompts)
        for start in range(0, self.new_tokens, self.burst):
            cache, logits_BV, tokens_BN = self.decode(cache, logits_BV, start, first_index)
            tokens_BN = tokens_BN[: len(prompts), : self.new_tokens - start]
            self.timing.decode_tokens += tokens_BN.size
            broken = np.flatnonzero((tokens_BN == NO_TOKEN).any(axis=1))
            if broken.size:
                row = broken[0]
                place = start + int(np.argmax(tokens_BN[row] == NO_TOKEN))
                raise UserError(
                    f"prompt {first_index + row}: the logits of new token {place} are no numbers; "
                    "the checkpoint may have diverged, so try an earlier --step."
                )
            yield tokens_BN


def flush_right(
    rows: Sequence[np.ndarray], multiple: int, fill: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of unequal lengths in one array, `fill` in front of them.

    Returns:
      (int32 values [rows, the longest row rounded up to `multiple`], int32 segment ids: 1 where a
      row is, 0 in front of it).
    """
    total = round_up(max(map(len, rows)), multiple)
    values, ids = (
        np.full((len(rows), total), fill, np.int32),
        np.zeros((len(rows), total), np.int32),
    )
    for row, content in enumerate(rows):
        values[row, total - len(content) :] = content
        ids[row, total - len(content) :] = 1
    return values, ids


def _check_prompt(number: int, ids: np.ndarray, most: int, vocab_size: int) -> None:
    check(len(ids) > 0, f"prompt {number} is empty; give it at least one token.")
    check(
        len(ids) <= most,
        f"prompt {number} has {len(ids)} tokens but the cache holds prompts of {most}; shorten it.",
    )
    low, high = int(np.min(ids)), int(np.max(ids))
    check(
        low >= 0 and high < vocab_size,
        f"prompt {number} has the token id {low if low < 0 else high} but the model knows 0 to "
        f"{vocab_size - 1}; use the tokenizer that the model was trained with.",
    )


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

"""A running state that recall or arithmetic needs.

    mod_arith          3 * 4 + 2 - 1 ...          targets . . 2 . 4 . 3: the value modulo 5
    parity_retrieval   k1 v1 w1 k2 v2 w2 | 1 k2 0 k1 ...     targets w2, w1

In parity retrieval every key has two values, and whether the ones since the bar are even or odd in
number picks which is asked for: attention alone cannot keep the parity, a small memory alone not
the pairs (Steifer 2026, arXiv:2605.16640). Arithmetic without brackets is that of Grazzi et al.
2024, arXiv:2411.12537, who ask once, at the end.

Array legend: N examples, T tokens, K pairs, Q queries.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from fastweights.errors import check
from fastweights.tasks.base import Slice, TaskConfig, unasked
from fastweights.tasks.draws import Array, Draws, interleave

MODULUS = 5
PLUS, MINUS, TIMES = MODULUS, MODULUS + 1, MODULUS + 2


@dataclasses.dataclass(frozen=True)
class ModArithConfig(TaskConfig):
    """Entries are lengths: digits at even places, `+ - *` between them, products first.

    The value of the expression so far is asked for at every digit but the first, which would be its
    own answer.
    """

    NAME: ClassVar[str] = "mod_arith"

    train: tuple[tuple[int, float], ...] = ((32, 1.0),)
    test: tuple[int, ...] = (32, 64, 128, 256)

    @property
    def vocab_size(self) -> int:
        return TIMES + 1

    def check_entry(self, field: str, length: int) -> None:
        check(
            length >= 4 and length % 2 == 0,
            f"{self.NAME}.{field} has the length {length}; it must be even and at least 4.",
        )

    def part(self, length: int) -> Slice:
        return Slice(length, choices=MODULUS)

    def answers(self, part: Slice) -> int:
        return part.length // 2

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, terms = draws.xp, part.length // 2
        digits_NQ = draws.integers(0, MODULUS, (count, terms))
        signs_NQ = draws.integers(PLUS, TIMES + 1, (count, terms))

        def step(carry, digit_N, before_N):
            total_N, term_N = carry
            times_N = before_N == TIMES
            total_N = xp.where(times_N, total_N, total_N + term_N)
            fresh_N = xp.where(before_N == MINUS, -digit_N, digit_N)
            term_N = xp.where(times_N, term_N * digit_N, fresh_N) % MODULUS
            total_N = total_N % MODULUS
            return (total_N, term_N), (total_N + term_N) % MODULUS

        # A plus in front of the first digit.
        before_NQ = xp.pad(signs_NQ[:, :-1], ((0, 0), (1, 0)), constant_values=PLUS)
        nothing_N = xp.zeros(count, np.int32)
        _, values_NQ = draws.scan(step, (nothing_N, nothing_N), (digits_NQ, before_NQ))
        tokens_NT = interleave(draws, digits_NQ, signs_NQ)
        values_NQ = xp.where(xp.arange(terms)[None] > 0, values_NQ, -1)
        return tokens_NT, interleave(draws, values_NQ, xp.full_like(values_NQ, -1))


@dataclasses.dataclass(frozen=True)
class ParityRetrievalConfig(TaskConfig):
    """Entries are (length, pairs); bits and queries fill what the pairs leave.

    Tokens: 0 filler, 1 and 2 the bits 0 and 1, then keys up to V / 2, then values.
    """

    NAME: ClassVar[str] = "parity_retrieval"
    ENTRY: ClassVar[tuple[str, ...]] = ("length", "pairs")

    vocab_size: int = 64
    train: tuple[tuple[int, int, float], ...] = ((64, 8, 1.0),)
    test: tuple[tuple[int, int], ...] = ((64, 8), (128, 8))

    def check_entry(self, field: str, length: int, pairs: int) -> None:
        where = f"{self.NAME}.{field} has {pairs} pairs in {length} tokens"
        check(
            pairs >= 1 and length >= 3 * pairs + 2,
            f"{where}; give at least 1 pair and {3 * pairs + 2} tokens.",
        )
        least = max(2 * (pairs + 3), 4 * pairs)
        check(
            self.vocab_size >= least,
            f"{where} but {self.NAME}.vocab_size is {self.vocab_size}; it must be at least "
            f"{least}.",
        )

    def part(self, length: int, pairs: int) -> Slice:
        return Slice(length, pairs, choices=2)

    def answers(self, part: Slice) -> int:
        return part.length // 2

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, length, pairs = draws.xp, part.length, part.pairs
        half = self.vocab_size // 2
        keys_NK = 3 + draws.distinct(count, half - 3, pairs)
        values_N2K = half + draws.distinct(count, self.vocab_size - half, 2 * pairs)
        even_NK, odd_NK = values_N2K[:, :pairs], values_N2K[:, pairs:]
        queries = (length - 3 * pairs) // 2
        bits_NQ = draws.integers(0, 2, (count, queries))
        which_NQ = draws.integers(0, pairs, (count, queries))
        odd_NQ = bits_NQ.cumsum(axis=1) % 2 == 1
        answers_NQ = xp.where(
            odd_NQ,
            xp.take_along_axis(odd_NK, which_NQ, axis=1),
            xp.take_along_axis(even_NK, which_NQ, axis=1),
        )
        asked_NT = interleave(draws, 1 + bits_NQ, xp.take_along_axis(keys_NK, which_NQ, axis=1))
        shown_NT = interleave(draws, keys_NK, even_NK, odd_NK)
        rest = ((0, 0), (0, (length - 3 * pairs) % 2))
        tokens_NT = xp.pad(xp.concatenate([shown_NT, asked_NT], axis=1), rest)
        place_NQ = xp.broadcast_to(3 * pairs + 1 + 2 * xp.arange(queries)[None], (count, queries))
        return tokens_NT, draws.put(unasked(draws, count, length), place_NQ, answers_NQ)

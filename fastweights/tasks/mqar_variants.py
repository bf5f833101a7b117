"""Harder associative recall: keys that are written again, and keys made of two tokens.

    mqar_overwrite   k2 v1 k1 v2 k2 v3 k3 v4 | . k2 . k1 k3 .     the last value counts
                                                 v3   v2 v4
    mqar_composed    a1 b1 v1 a2 b1 v2 a1 b2 v3 a2 b2 v4 | . . a2 b1 . . a1 b1 ...
                                                                  v2       v1

Both follow `mqar.py`: keys and values have parts of the vocabulary of their own, 0 is the filler,
and the answer is asked for at the (last token of the) query. Query slots are uniform.

Array legend: N examples, T tokens, K pairs, W writes, G first (and second) tokens of a grid.
"""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from fastweights.errors import check
from fastweights.tasks.base import Slice, TaskConfig, unasked
from fastweights.tasks.draws import Array, Draws, interleave, slots


@dataclasses.dataclass(frozen=True)
class OverwriteConfig(TaskConfig):
    """Entries are (length, pairs, updates): that many of the keys get a second value.

    Updates stand anywhere between the first writes, in random order: in a block of their own, place
    alone would tell which writes are the last ones.
    """

    NAME: ClassVar[str] = "mqar_overwrite"
    ENTRY: ClassVar[tuple[str, ...]] = ("length", "pairs", "updates")
    KINDS: ClassVar[tuple[str, ...]] = ("updated", "untouched")

    vocab_size: int = 64
    train: tuple[tuple[int, int, int, float], ...] = ((40, 8, 4, 1.0),)
    test: tuple[tuple[int, int, int], ...] = ((40, 8, 4),)

    def check_entry(self, field: str, length: int, pairs: int, updates: int) -> None:
        where = f"{self.NAME}.{field} has {pairs} pairs and {updates} updates in {length} tokens"
        check(
            pairs >= 1 and 0 <= updates <= pairs,
            f"{where}; it must have at least 1 pair and at most one update of each.",
        )
        needed = 2 * (pairs + updates) + 2 * pairs
        check(
            length % 2 == 0 and length >= needed,
            f"{where}; writes and queries need an even length of at least {needed}.",
        )
        check(
            min(self.vocab_size // 2 - 1, self.vocab_size // 2 - updates) >= pairs,
            f"{where} but {self.NAME}.vocab_size is {self.vocab_size}; it must be at least "
            f"{2 * (pairs + max(updates, 1))}.",
        )

    def part(self, length: int, pairs: int, updates: int) -> Slice:
        return Slice(length, pairs, marks=(("U", updates),))

    def answers(self, part: Slice) -> int:
        return part.pairs

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, length, pairs = draws.xp, part.length, part.pairs
        updates = part.marks[0][1]
        writes, first_value = pairs + updates, self.vocab_size // 2
        keys_NK = 1 + draws.distinct(count, first_value - 1, pairs)
        values_NW = first_value + draws.distinct(count, self.vocab_size - first_value, writes)
        # Every key once and the first ones twice, in random order.
        which_W = np.concatenate([np.arange(pairs), np.arange(updates)])
        which_NW = draws.shuffled(xp.broadcast_to(xp.asarray(which_W)[None], (count, writes)))
        is_key_NKW = which_NW[:, None, :] == xp.arange(pairs)[None, :, None]
        last_NK = xp.where(is_key_NKW, xp.arange(writes)[None, None], -1).max(axis=2)
        answers_NK = xp.take_along_axis(values_NW, last_NK, axis=1)

        asked_NK = 2 * writes + 2 * slots(draws, count, (length - 2 * writes) // 2, pairs)
        written_NT = interleave(draws, xp.take_along_axis(keys_NK, which_NW, axis=1), values_NW)
        tokens_NT = xp.pad(written_NT, ((0, 0), (0, length - 2 * writes)))
        tokens_NT = draws.put(tokens_NT, asked_NK, keys_NK)
        return tokens_NT, draws.put(unasked(draws, count, length), asked_NK, answers_NK)

    def kinds(self, tokens_NT: np.ndarray, targets_NT: np.ndarray) -> np.ndarray:
        """0 for a key that stands three times in its example, twice of them written; else 1."""
        times_NT = np.zeros_like(tokens_NT)
        for token in np.unique(tokens_NT[targets_NT >= 0]):
            is_token_NT = tokens_NT == token
            times_NT += is_token_NT * is_token_NT.sum(axis=1, keepdims=True)
        return np.where(times_NT == 3, 0, 1)


@dataclasses.dataclass(frozen=True)
class ComposedConfig(TaskConfig):
    """Entries are (length, pairs), pairs a square number: the keys are a grid of two-token words.

    Either token of a key stands in sqrt(pairs) keys, so only both together name a value.
    """

    NAME: ClassVar[str] = "mqar_composed"
    ENTRY: ClassVar[tuple[str, ...]] = ("length", "pairs")

    vocab_size: int = 256
    train: tuple[tuple[int, int, float], ...] = ((128, 4, 1.0), (128, 9, 1.0), (128, 16, 1.0))
    test: tuple[tuple[int, int], ...] = ((128, 4), (128, 9), (128, 16), (256, 25), (256, 36))

    def check_entry(self, field: str, length: int, pairs: int) -> None:
        where = f"{self.NAME}.{field} has {pairs} pairs in {length} tokens"
        check(
            pairs >= 1 and math.isqrt(pairs) ** 2 == pairs,
            f"{where}; the pairs fill a square grid, so give 1, 4, 9, 16, ...",
        )
        check(
            length >= 5 * pairs,
            f"{where}; triples and queries need a length of at least {5 * pairs}.",
        )
        least = max(2 * pairs, 4 * (math.isqrt(pairs) + 1))
        check(
            self.vocab_size >= least,
            f"{where} but {self.NAME}.vocab_size is {self.vocab_size}; it must be at least "
            f"{least}.",
        )

    def part(self, length: int, pairs: int) -> Slice:
        return Slice(length, pairs)

    def answers(self, part: Slice) -> int:
        return part.pairs

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, length, pairs = draws.xp, part.length, part.pairs
        grid, quarter, half = math.isqrt(pairs), self.vocab_size // 4, self.vocab_size // 2
        first_NG = 1 + draws.distinct(count, quarter - 1, grid)
        second_NG = quarter + draws.distinct(count, half - quarter, grid)
        values_NK = half + draws.distinct(count, self.vocab_size - half, pairs)
        cell_NK = draws.distinct(count, pairs, pairs)
        a_NK = xp.take_along_axis(first_NG, cell_NK // grid, axis=1)
        b_NK = xp.take_along_axis(second_NG, cell_NK % grid, axis=1)

        place_NK = 3 * pairs + 2 * slots(draws, count, (length - 3 * pairs) // 2, pairs)
        shown_NT = interleave(draws, a_NK, b_NK, values_NK)
        tokens_NT = xp.pad(shown_NT, ((0, 0), (0, length - 3 * pairs)))
        tokens_NT = draws.put(draws.put(tokens_NT, place_NK, a_NK), place_NK + 1, b_NK)
        return tokens_NT, draws.put(unasked(draws, count, length), place_NK + 1, values_NK)

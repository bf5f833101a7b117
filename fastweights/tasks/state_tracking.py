"""State tracking: word problems of groups, where nothing has to be recalled but much kept up.

Every token is an element of a group, and at every token the product of all so far is asked for, the
newest applied last:

    parity   bits; is the number of ones so far odd? The group of two elements
    s3       permutations of three things; where are they now? Six elements that do not commute

A recurrence whose transitions have eigenvalues in (0, 1) alone can do neither at every length; one
reflection a token (a negative eigenvalue) does parity, and S3 takes two (Grazzi et al. 2024,
arXiv:2411.12537; for word problems Merrill, Petty and Sabharwal 2024, arXiv:2404.08819).

Array legend: N examples, T tokens, E elements.
"""

import dataclasses
import itertools
from typing import ClassVar

import numpy as np

from fastweights.errors import check
from fastweights.tasks.base import Slice, TaskConfig

LENGTHS = (32, 64, 128, 256)

# The elements of S3, in lexicographic order: element e sends thing i to place PERMUTATIONS[e][i].
PERMUTATIONS = tuple(itertools.permutations(range(3)))


def _table() -> np.ndarray:
    """table_EE[e, f]: the number of the permutation `f after e`."""
    number = {permutation: e for e, permutation in enumerate(PERMUTATIONS)}
    return np.array(
        [[number[tuple(f[e[i]] for i in range(3))] for f in PERMUTATIONS] for e in PERMUTATIONS]
    )


@dataclasses.dataclass(frozen=True)
class WordProblem(TaskConfig):
    """A word problem. Entries of `train` and `test` are lengths; a token is an element's number."""

    TABLE: ClassVar[np.ndarray]

    train: tuple[tuple[int, float], ...] = ((LENGTHS[0], 1.0),)
    test: tuple[int, ...] = LENGTHS

    @property
    def vocab_size(self) -> int:
        """Tokens and answers alike: the elements of the group."""
        return len(self.TABLE)

    @property
    def letters(self) -> tuple[int, ...]:
        """The elements that words are made of, all equally likely."""
        return tuple(range(len(self.TABLE)))

    def part(self, length: int) -> Slice:
        return Slice(length, choices=len(self.TABLE))

    def check_entry(self, field: str, length: int) -> None:
        check(length >= 1, f"{self.NAME}.{field} has the length {length}; it must be at least 1.")

    def examples(
        self, rng: np.random.Generator, count: int, part: Slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """As in `TaskConfig`; every position has a target."""
        letters = np.array(self.letters, np.int32)
        tokens_NT = letters[rng.integers(len(letters), size=(count, part.length))]
        targets_NT = np.empty_like(tokens_NT)
        product_N = np.zeros(count, np.int32)  # Element 0 is the group's unit.
        for t in range(part.length):
            product_N = targets_NT[:, t] = self.TABLE[product_N, tokens_NT[:, t]]
        return tokens_NT, targets_NT


@dataclasses.dataclass(frozen=True)
class ParityConfig(WordProblem):
    """Parity: tokens 0 and 1, the answer is the sum so far modulo 2."""

    NAME: ClassVar[str] = "parity"
    TABLE: ClassVar[np.ndarray] = np.array([[0, 1], [1, 0]])


@dataclasses.dataclass(frozen=True)
class S3Config(WordProblem):
    """S3: tokens and answers are the numbers of permutations in `PERMUTATIONS`.

    Attributes:
      alphabet: "all" six permutations, or "swaps", the three that swap two things and the one
        that moves nothing. Words of swaps take no more than one reflection a token.
    """

    NAME: ClassVar[str] = "s3"
    TABLE: ClassVar[np.ndarray] = _table()

    alphabet: str = "all"

    def __post_init__(self):
        super().__post_init__()
        check(
            self.alphabet in ("all", "swaps"),
            f"s3.alphabet is {self.alphabet!r}; it must be one of all, swaps.",
        )

    @property
    def letters(self) -> tuple[int, ...]:
        if self.alphabet == "all":
            return super().letters
        # A swap leaves one thing in place, the unit three.
        return tuple(e for e, p in enumerate(PERMUTATIONS) if any(p[i] == i for i in range(3)))

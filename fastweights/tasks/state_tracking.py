"""State tracking: word problems of groups, where nothing has to be recalled but much kept up.

Every token is an element of a group, and at every token the product of all so far is asked for, the
newest applied last:

    parity   bits; is the number of ones so far odd? The group of two elements
    s3       permutations of three things; where are they now? Six elements that do not commute
    s5       the same with five things and 120 elements, which no fixed number of parallel steps
             can multiply out, however long the word

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
from fastweights.tasks.draws import Array, Draws

LENGTHS = (32, 64, 128, 256)


def permutations(things: int) -> tuple[tuple[int, ...], ...]:
    """A symmetric group in lexicographic order: element e sends thing i to place [e][i]."""
    return tuple(itertools.permutations(range(things)))


def _table(elements: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """table_EE[e, f]: the number of the permutation `f after e`."""
    number = {permutation: e for e, permutation in enumerate(elements)}
    return np.array([[number[tuple(f[i] for i in e)] for f in elements] for e in elements])


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
        """The slice; its chance is that of the best guess from the token and its place alone.

        Such a guess takes what was before for the product that is then most likely, so it is right
        at the first token and soon as rarely as a guess among all elements.
        """
        size = len(self.TABLE)
        likely_E, found = np.eye(size)[0], 0.0
        for _ in range(length):
            found += likely_E.max()
            after_E = np.zeros(size)
            for letter in self.letters:
                after_E[self.TABLE[:, letter]] += likely_E / len(self.letters)
            likely_E = after_E
        return Slice(length, choices=size, floor=float(found / length))

    def check_entry(self, field: str, length: int) -> None:
        check(length >= 1, f"{self.NAME}.{field} has the length {length}; it must be at least 1.")

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        """As in `TaskConfig`; every position has a target."""
        xp = draws.xp
        letters, table = xp.asarray(self.letters), xp.asarray(self.TABLE)
        tokens_NT = letters[draws.integers(0, len(self.letters), (count, part.length))]

        def step(product_N, token_N):
            product_N = table[product_N, token_N]
            return product_N, product_N

        unit_N = xp.zeros(count, table.dtype)  # Element 0 is the group's unit.
        return tokens_NT, draws.scan(step, unit_N, (tokens_NT,))[1]


@dataclasses.dataclass(frozen=True)
class ParityConfig(WordProblem):
    """Parity: tokens 0 and 1, the answer is the sum so far modulo 2."""

    NAME: ClassVar[str] = "parity"
    TABLE: ClassVar[np.ndarray] = np.array([[0, 1], [1, 0]])


@dataclasses.dataclass(frozen=True)
class PermutationWords(WordProblem):
    """Tokens and answers are the numbers of the permutations of some things.

    Attributes:
      alphabet: "all" permutations, or "swaps", those that swap two things and the one that moves
        nothing. Words of swaps take no more than one reflection a token.
    """

    THINGS: ClassVar[int]

    alphabet: str = "all"

    def __post_init__(self):
        super().__post_init__()
        check(
            self.alphabet in ("all", "swaps"),
            f"{self.NAME}.alphabet is {self.alphabet!r}; it must be one of all, swaps.",
        )

    @property
    def letters(self) -> tuple[int, ...]:
        if self.alphabet == "all":
            return super().letters
        # A swap leaves all but two things in place.
        still = [sum(i == place for i, place in enumerate(p)) for p in permutations(self.THINGS)]
        return tuple(e for e, count in enumerate(still) if count >= self.THINGS - 2)


@dataclasses.dataclass(frozen=True)
class S3Config(PermutationWords):
    """Permutations of three things."""

    NAME: ClassVar[str] = "s3"
    THINGS: ClassVar[int] = 3
    TABLE: ClassVar[np.ndarray] = _table(permutations(3))


@dataclasses.dataclass(frozen=True)
class S5Config(PermutationWords):
    """Permutations of five things."""

    NAME: ClassVar[str] = "s5"
    THINGS: ClassVar[int] = 5
    TABLE: ClassVar[np.ndarray] = _table(permutations(5))

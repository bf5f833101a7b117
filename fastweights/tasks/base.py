"""What a task is: its options, its slices, and how it draws examples.

Array legend: N examples, T tokens of one example.
"""

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from fastweights.errors import check
from fastweights.tasks.draws import Array, Draws

IGNORE = -1


@dataclasses.dataclass(frozen=True)
class Slice:
    """One cell of an evaluation: examples of one kind.

    Attributes:
      length: tokens of an example.
      pairs: associations that it holds; 0 in a task that has none.
      choices: answers that a guess has to choose from; 0 means as many as pairs. Recall tasks take
        values from their own part of the vocabulary, so that even a model without any memory of
        which key had which value learns to answer with one it has seen.
      marks: letters and numbers of what else tells this slice from others, such as ("H", 4).
      floor: the accuracy of a guess where it is not one in so many choices; 0 where it is.
    """

    length: int
    pairs: int = 0
    choices: int = 0
    marks: tuple[tuple[str, int], ...] = ()
    floor: float = 0.0

    @property
    def name(self) -> str:
        pairs = (("K", self.pairs),) if self.pairs else ()
        return "_".join(
            f"{letter}{size}" for letter, size in (("T", self.length), *pairs, *self.marks)
        )

    @property
    def chance(self) -> float:
        """Accuracy of a guess: the floor for a score."""
        return self.floor or 1.0 / (self.choices or self.pairs)


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Options that every task has. A subclass adds its own and says what an example is.

    Attributes:
      train: an entry and a weight of each training slice. The weights are shares of *examples*: as
        a row holds only one slice and more of its short examples, a slice's share of the rows is
        proportional to weight / examples per row.
      test: an entry of each evaluation slice.
      test_examples: examples in each evaluation slice.
      test_seed: seed of the evaluation stream. It is not the run's seed, so all runs are scored on
        the same examples.
      repeat_after: batches after which the training examples come again in the same order; 0: each
        batch has new ones.

    DECODER is the `ModelConfig.decoder` that a model of this task must have.

    A class names its `KINDS` of answers, if they are to be scored apart too, and its `CHEATERS`:
    guesses of solvers.py that know nothing of the context and may not score above 1.2 x chance.

    An entry is the tuple of integers that `ENTRY` names, the length first; one that is an integer
    alone may be written without the tuple.

    Raises:
      UserError: for a slice or an option that the task cannot have.
    """

    NAME: ClassVar[str]
    ENTRY: ClassVar[tuple[str, ...]] = ("length",)
    KINDS: ClassVar[tuple[str, ...]] = ()
    CHEATERS: ClassVar[tuple[str, ...]] = ("majority", "position", "unigram")
    DECODER: ClassVar[str] = "none"

    train: tuple[tuple[Any, ...], ...]
    test: tuple[Any, ...]
    test_examples: int = 1000
    test_seed: int = 0
    repeat_after: int = 0

    @property
    def vocab_size(self) -> int:
        """Token ids in use: a model needs at least this vocabulary."""
        raise NotImplementedError

    def part(self, *entry: int) -> Slice:
        """The slice that an entry names."""
        raise NotImplementedError

    def check_entry(self, field: str, *entry: int) -> None:
        """Raises `UserError` where an entry of `train` or `test` (`field`) can't be."""
        raise NotImplementedError

    def answers(self, part: Slice) -> int:
        """How often an example asks at most: the model's logits are needed no more often."""
        return part.length

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        """Draws `count` examples of one slice: (tokens_NT, targets_NT), integers.

        A target is the answer at a position, -1 where nothing is asked. It runs on the host and
        inside `jit`, so it changes no array in place and shapes depend on the slice alone.
        """
        raise NotImplementedError

    def kinds(self, tokens_NT: np.ndarray, targets_NT: np.ndarray) -> np.ndarray:
        """Which of `KINDS` each answer is of, to score them apart; anything where nothing is asked.

        Only tasks that name kinds have this.
        """
        raise NotImplementedError

    def __post_init__(self):
        for field, names in (("train", (*self.ENTRY, "weight")), ("test", self.ENTRY)):
            self._check_entries(field, names)
        for *entry, weight in self.train:
            check(
                isinstance(weight, int | float) and 0 < weight < math.inf,
                f"{self.NAME}.train gives {tuple(entry)} the weight {weight!r}; weights must be "
                "finite positive numbers, so change it or leave the slice out.",
            )
        check(
            len(set(self.test)) == len(self.test),
            f"{self.NAME}.test names a slice twice in {self.test}; name each once.",
        )
        check(
            self.repeat_after >= 0,
            f"{self.NAME}.repeat_after is {self.repeat_after}; give a number of batches, or 0 for "
            "new examples in each.",
        )
        check(
            self.test_examples > 0,
            f"{self.NAME}.test_examples is {self.test_examples}; it must be at least 1.",
        )
        check(
            0 <= self.test_seed < 2**32,
            f"{self.NAME}.test_seed is {self.test_seed}; it must be at least 0 and less than "
            "2**32.",
        )

    def _check_entries(self, field: str, names: tuple[str, ...]) -> None:
        entries: tuple[tuple, ...] = tuple(
            tuple(entry) if isinstance(entry, list | tuple) else (entry,)
            for entry in getattr(self, field)
        )
        object.__setattr__(self, field, entries)
        what = f"({', '.join(names)})"
        check(bool(entries), f"{self.NAME}.{field} is empty; give at least one {what}.")
        size = len(self.ENTRY)
        for entry in entries:
            check(
                len(entry) == len(names) and all(type(number) is int for number in entry[:size]),
                f"{self.NAME}.{field} has the entry {entry}, but each must be {what}, with "
                f"{' and '.join(self.ENTRY)} as integers.",
            )
            self.check_entry(field, *entry[:size])


def unasked(draws: Draws, count: int, length: int) -> Array:
    """targets_NT before anything is asked."""
    return draws.xp.full((count, length), IGNORE, np.int32)

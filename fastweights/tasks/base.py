"""What every task shares: options, slices, random streams, rows of packed examples, accuracy.

Array legend: N examples, T tokens of one example, R rows, L tokens of a row.
"""

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from fastweights.errors import UserError, check

Batch = dict[str, np.ndarray]
"""`tokens`, `targets`, `segment_ids`, `positions`, each int32 [R, L].

`targets[r, t]` is what must be predicted at position t, -1 where nothing is asked; `segment_ids`
are 1, 2, ... for the examples of a row and 0 for padding; `positions` restart at 0 in each example.
"""

IGNORE = -1

# The second word of every random stream's seed. A task's training and evaluation examples come from
# generators whose seeds differ in this word, whatever the run's seed and the batch's index.
TRAIN_STREAM = 1
EVAL_STREAM = 2


@dataclasses.dataclass(frozen=True)
class Slice:
    """One cell of an evaluation: examples of one kind.

    Attributes:
      length: tokens of an example.
      pairs: associations that it holds; 0 in a task that has none.
      choices: answers that a guess has to choose from; 0 means as many as pairs. Recall tasks take
        values from their own part of the vocabulary, so that even a model without any memory of
        which key had which value learns to answer with one it has seen.
    """

    length: int
    pairs: int = 0
    choices: int = 0

    @property
    def name(self) -> str:
        return f"T{self.length}_K{self.pairs}" if self.pairs else f"T{self.length}"

    @property
    def chance(self) -> float:
        """Accuracy of a guess: the floor for a score."""
        return 1.0 / (self.choices or self.pairs)


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Options that every task has. A subclass adds its own and says what an example is.

    Attributes:
      train: an entry and a weight of each training slice. The weights are shares of *examples*: as
        a row holds only one slice and more of its short examples, rows are drawn with probability
        proportional to weight / examples per row.
      test: an entry of each evaluation slice.
      test_examples: examples in each evaluation slice.
      test_seed: seed of the evaluation stream. It is not the run's seed, so all runs are scored on
        the same examples.

    An entry is the tuple of integers that `ENTRY` names, the length first; one that is an integer
    alone may be written without the tuple.

    Raises:
      UserError: for a slice or an option that the task cannot have.
    """

    NAME: ClassVar[str]
    ENTRY: ClassVar[tuple[str, ...]] = ("length",)

    train: tuple[tuple[Any, ...], ...]
    test: tuple[Any, ...]
    test_examples: int = 1000
    test_seed: int = 0

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

    def examples(
        self, rng: np.random.Generator, count: int, part: Slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws `count` examples of one slice: (tokens_NT, targets_NT), int32.

        A target is the answer at a position, -1 where nothing is asked. Every example of a slice
        asks as often as the others.
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


def train_batch(config: TaskConfig, *, seed: int, index: int, rows: int, length: int) -> Batch:
    """The training batch number `index` of the run with this seed: a pure function of both.

    Every row holds examples of one slice, drawn as `TaskConfig.train` says.
    """
    check_fits(config, length)
    rng = stream(seed, TRAIN_STREAM, index)
    parts = [config.part(*entry[:-1]) for entry in config.train]
    weight_S = np.array([entry[-1] for entry in config.train])
    odds_S = weight_S / np.array([length // part.length for part in parts])
    choice_R = rng.choice(len(parts), size=rows, p=odds_S / odds_S.sum())
    batch: Batch = {}
    for i, part in enumerate(parts):
        chosen = np.flatnonzero(choice_R == i)
        found = slice_batch(config, part, rng, len(chosen), length)
        for name, values_RL in found.items():
            batch.setdefault(name, np.zeros((rows, length), np.int32))[chosen] = values_RL
    return batch


def slice_batch(
    config: TaskConfig, part: Slice, rng: np.random.Generator, rows: int, length: int
) -> Batch:
    """A batch of `rows` rows, each with `length // part.length` examples of one slice."""
    return pack_rows(*config.examples(rng, rows * (length // part.length), part), length)


def check_fits(config: TaskConfig, length: int) -> None:
    """Raises `UserError` when a training slice is longer than the row length."""
    longest = max(config.part(*entry[:-1]).length for entry in config.train)
    check(
        longest <= length,
        f"{config.NAME}.train has a slice of length {longest} but the row length is {length}; "
        f"set the row length to at least {longest}.",
    )


def eval_slices(config: TaskConfig) -> tuple[Slice, ...]:
    """The evaluation slices in the order of the config."""
    return tuple(config.part(*entry) for entry in config.test)


def eval_rows(config: TaskConfig, part: Slice, length: int) -> Batch:
    """All `test_examples` examples of one evaluation slice as rows.

    The examples depend on `test_seed` and the slice alone: not on the run's seed, the row length,
    the batch or the other slices. Rows have `length` tokens, or `part.length` where that is more
    (evaluation beyond the training length).
    """
    rng = stream(config.test_seed, EVAL_STREAM, part.length, part.pairs)
    found = config.examples(rng, config.test_examples, part)
    return pack_rows(*found, max(length, part.length))


def stream(seed: int, tag: int, *words: int) -> np.random.Generator:
    """A generator that depends on (seed, tag, words) alone.

    NumPy cuts long integers into 32-bit words before it mixes them, so a larger seed would spill
    into the tag's place and could make a training stream equal an evaluation stream.

    Raises:
      UserError: if `seed` is not in [0, 2**32).
    """
    check(
        0 <= seed < 2**32,
        f"The data seed is {seed}, but it must be at least 0 and less than 2**32; choose another.",
    )
    return np.random.default_rng((seed, tag, *words))


def pack_rows(tokens_NT: np.ndarray, targets_NT: np.ndarray, length: int) -> Batch:
    """Lays examples side by side in rows of `length` tokens, `length // T` in each.

    The end of a row that holds no whole example is padding, and so is what the last row lacks in
    examples.

    Returns:
      A batch of ceil(N / (length // T)) rows.
    """
    count, size = tokens_NT.shape
    per_row = length // size
    check(
        per_row > 0,
        f"Rows of {length} tokens cannot hold an example of {size} tokens; "
        f"set the row length to at least {size}.",
    )
    rows = -(-count // per_row)
    used = per_row * size

    def lay(values_NT: np.ndarray, empty: int) -> np.ndarray:
        full = np.full((rows * per_row, size), empty, np.int32)
        full[:count] = values_NT
        out_RL = np.full((rows, length), empty, np.int32)
        out_RL[:, :used] = full.reshape(rows, used)
        return out_RL

    ids_N1 = (np.arange(count, dtype=np.int32) % per_row + 1)[:, None]
    return {
        "tokens": lay(tokens_NT, 0),
        "targets": lay(targets_NT, IGNORE),
        "segment_ids": lay(np.broadcast_to(ids_N1, (count, size)), 0),
        "positions": lay(np.broadcast_to(np.arange(size, dtype=np.int32), (count, size)), 0),
    }


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Share of the answer positions (targets >= 0) at which `predictions` equals `targets`.

    All queries weigh the same. Every example of a slice has the same number of queries, so within a
    slice this is also the mean over examples of each example's accuracy.

    Raises:
      UserError: if the shapes differ or nothing is asked.
    """
    check(
        predictions.shape == targets.shape,
        f"Predictions have shape {predictions.shape} but targets have shape {targets.shape}; "
        "give one prediction a position.",
    )
    asked = targets >= 0
    if not asked.any():
        raise UserError("No position has a target, so there is no accuracy; check the targets.")
    return float(np.mean(predictions[asked] == targets[asked]))

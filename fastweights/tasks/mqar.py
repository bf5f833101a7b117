"""Multi-query associative recall (MQAR; Arora et al. 2023, "Zoology", arXiv:2312.04927).

An example shows K distinct keys, each followed by its value, and later asks for every key once:

    k1 v1 k2 v2 ... kK vK | . . k2 . . . k1 . . . . .
                                v2       v1              <- targets

The answer is asked for at the query itself and is not in the stream, so nothing leaks it. Keys come
from 1..V/2-1 and values from V/2..V-1, both without replacement within an example; 0 is the filler.
The query zone of T - 2K tokens has (T - 2K) / 2 slots at its even offsets. Slot i (from 1) is drawn
with weight a * i^(a-1): a = 1 is uniform, a near 0 puts most queries soon after the pairs. K slots
are drawn one after the other without replacement.

Array legend: N examples, T tokens, K pairs, S slots, P population, R rows, L row length.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from fastweights.errors import check
from fastweights.tasks.base import (
    EVAL_STREAM,
    IGNORE,
    TRAIN_STREAM,
    Batch,
    Slice,
    pack_rows,
    stream,
)

QUERY_ORDERS = ("independent", "coupled")
FILLERS = ("zero", "random", "reserved")


@dataclasses.dataclass(frozen=True)
class MQARConfig:
    """Sizes, mix and variants of the task; the numbers are Zoology's, the variants fairer ones.

    `dataclasses.replace(config, query_order="coupled", filler="random")` is the task as Zoology
    wrote it.

    Attributes:
      vocab_size: V.
      train: (T, K, weight) of each training slice. The weights are shares of *examples*: as a row
        holds only one slice and more of its short examples, rows are drawn with probability
        proportional to weight / examples per row.
      test: (T, K) of each evaluation slice.
      test_examples: examples in each evaluation slice.
      test_seed: seed of the evaluation stream. It is not the run's seed, so all runs are scored on
        the same examples.
      power_a: the exponent a of the slot weights.
      query_order: "coupled": the j-th key goes to the j-th slot drawn. Early draws favour early
        slots, so the place of a query then tells something of which pair it asks for: guessing by
        place alone scores up to several times chance. "independent": keys go to the drawn slots in
        an order of their own, which leaves nothing to guess.
      filler: what the rest of the query zone holds. "zero": token 0. "random": uniform tokens of
        the whole vocabulary, which may repeat keys of the example as if they were queries without a
        label (eight times an example at T 1024, K 256, V 8192). "reserved": uniform tokens of the
        last V // 8 keys, which are then never used as keys.

    Raises:
      UserError: for a slice or an option that the task cannot have.
    """

    vocab_size: int = 8192
    train: tuple[tuple[int, int, float], ...] = (
        (64, 4, 100_000),
        (128, 8, 20_000),
        (256, 16, 20_000),
        (256, 32, 20_000),
        (256, 64, 20_000),
    )
    test: tuple[tuple[int, int], ...] = (
        (64, 4),
        (64, 8),
        (64, 16),
        (128, 32),
        (256, 64),
        (512, 128),
        (1024, 256),
    )
    test_examples: int = 1000
    test_seed: int = 0
    power_a: float = 0.01
    query_order: str = "independent"
    filler: str = "zero"

    def __post_init__(self):
        check(bool(self.train), "mqar.train is empty; give at least one (length, pairs, weight).")
        check(bool(self.test), "mqar.test is empty; give at least one (length, pairs).")
        for name, width in (("train", 3), ("test", 2)):
            entries: tuple[tuple, ...] = tuple(
                tuple(entry) if isinstance(entry, list | tuple) else (entry,)
                for entry in getattr(self, name)
            )
            object.__setattr__(self, name, entries)
            for entry in entries:
                check(
                    len(entry) == width and all(type(size) is int for size in entry[:2]),
                    f"mqar.{name} has the entry {entry}, but each needs {width} numbers: "
                    f"(length, pairs{', weight' if width == 3 else ''}), the first two integers.",
                )
                self._check_slice(name, entry[0], entry[1])
        for length, pairs, weight in self.train:
            check(
                isinstance(weight, int | float) and 0 < weight < math.inf,
                f"mqar.train gives ({length}, {pairs}) the weight {weight!r}; weights must be "
                "finite positive numbers, so change it or leave the slice out.",
            )
        check(
            len(set(self.test)) == len(self.test),
            f"mqar.test names a slice twice in {self.test}; name each once.",
        )
        check(
            self.test_examples > 0,
            f"mqar.test_examples is {self.test_examples}; it must be at least 1.",
        )
        check(
            0 <= self.test_seed < 2**32,
            f"mqar.test_seed is {self.test_seed}; it must be at least 0 and less than 2**32.",
        )
        check(self.power_a > 0, f"mqar.power_a is {self.power_a}; it must be positive.")
        for name, known in (("query_order", QUERY_ORDERS), ("filler", FILLERS)):
            value = getattr(self, name)
            check(
                value in known, f"mqar.{name} is {value!r}; it must be one of {', '.join(known)}."
            )

    def _check_slice(self, name: str, length: int, pairs: int) -> None:
        where = f"mqar.{name} has a slice of length {length} with {pairs} pairs"
        check(length % 2 == 0, f"{where}, but pairs and slots need an even length; change it.")
        check(pairs >= 1, f"{where}; it must have at least 1 pair.")
        check(
            4 * pairs <= length,
            f"{where}, but {pairs} pairs and as many queries need a length of at least "
            f"{4 * pairs}; lengthen it or lower the pairs.",
        )
        check(
            self.vocab_size > length,
            f"{where} but mqar.vocab_size is {self.vocab_size}; it must exceed the length.",
        )
        check(
            pairs < self.first_reserved,
            f"{where} but mqar.vocab_size {self.vocab_size} leaves only "
            f"{self.first_reserved - 1} keys; raise it.",
        )

    @property
    def first_value(self) -> int:
        """The lowest value token, V // 2."""
        return self.vocab_size // 2

    @property
    def first_reserved(self) -> int:
        """One past the highest key token."""
        reserved = self.vocab_size // 8 if self.filler == "reserved" else 0
        return self.first_value - reserved


def examples(
    config: MQARConfig, rng: np.random.Generator, count: int, part: Slice
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `count` examples of one slice.

    Returns:
      (tokens_NT, targets_NT), int32; targets are the value at each query's key and -1 elsewhere.
    """
    length, pairs = part.length, part.pairs
    keys_NK = 1 + _distinct(rng, count, config.first_reserved - 1, pairs)
    values_NK = config.first_value + _distinct(
        rng, count, config.vocab_size - config.first_value, pairs
    )
    slots_NK = _slots(rng, count, (length - 2 * pairs) // 2, pairs, config.power_a)
    if config.query_order == "independent":
        slots_NK = rng.permuted(slots_NK, axis=1)

    tokens_NT = _FILL[config.filler](config, rng, (count, length))
    tokens_NT[:, 0 : 2 * pairs : 2] = keys_NK
    tokens_NT[:, 1 : 2 * pairs : 2] = values_NK
    asked_NK = 2 * pairs + 2 * slots_NK
    np.put_along_axis(tokens_NT, asked_NK, keys_NK, axis=1)
    targets_NT = np.full((count, length), IGNORE, np.int32)
    np.put_along_axis(targets_NT, asked_NK, values_NK, axis=1)
    return tokens_NT, targets_NT


def slice_batch(
    config: MQARConfig, part: Slice, rng: np.random.Generator, rows: int, length: int
) -> Batch:
    """A batch of `rows` rows, each with `length // part.length` examples of one slice."""
    return pack_rows(*examples(config, rng, rows * (length // part.length), part), length)


def train_batch(config: MQARConfig, *, seed: int, index: int, rows: int, length: int) -> Batch:
    """The training batch number `index` of the run with this seed: a pure function of both.

    Every row holds examples of one slice, drawn as `MQARConfig.train` says.
    """
    check_fits(config, length)
    rng = stream(seed, TRAIN_STREAM, index)
    per_row_S = np.array([length // size for size, _, _ in config.train])
    odds_S = np.array([weight for _, _, weight in config.train]) / per_row_S
    choice_R = rng.choice(len(config.train), size=rows, p=odds_S / odds_S.sum())
    batch: Batch = {}
    for i, (size, pairs, _) in enumerate(config.train):
        chosen = np.flatnonzero(choice_R == i)
        part = slice_batch(config, Slice(size, pairs), rng, len(chosen), length)
        for name, values_RL in part.items():
            batch.setdefault(name, np.zeros((rows, length), np.int32))[chosen] = values_RL
    return batch


def check_fits(config: MQARConfig, length: int) -> None:
    """Raises `UserError` when a training slice is longer than the row length."""
    longest = max(size for size, _, _ in config.train)
    check(
        longest <= length,
        f"mqar.train has a slice of length {longest} but the row length is {length}; "
        f"set the row length to at least {longest}.",
    )


def eval_slices(config: MQARConfig) -> tuple[Slice, ...]:
    """The evaluation slices in the order of the config."""
    return tuple(Slice(*entry) for entry in config.test)


def eval_rows(config: MQARConfig, part: Slice, length: int) -> Batch:
    """All `test_examples` examples of one evaluation slice as rows.

    The examples depend on `test_seed` and the slice alone: not on the run's seed, the row length,
    the batch or the other slices. Rows have `length` tokens, or `part.length` where that is more
    (evaluation beyond the training length).
    """
    rng = stream(config.test_seed, EVAL_STREAM, part.length, part.pairs)
    return pack_rows(*examples(config, rng, config.test_examples, part), max(length, part.length))


def _distinct(rng: np.random.Generator, count: int, population: int, take: int) -> np.ndarray:
    """`count` ordered uniform samples without replacement of `take` out of range(population).

    The first steps of a Fisher-Yates shuffle, in step for all samples.
    """
    deck_NP = np.tile(np.arange(population, dtype=np.int32), (count, 1))
    picks_NK = rng.integers(np.arange(take), population, size=(count, take))
    row_N = np.arange(count)
    for j in range(take):
        pick_N = picks_NK[:, j]
        deck_NP[row_N, j], deck_NP[row_N, pick_N] = deck_NP[row_N, pick_N], deck_NP[row_N, j]
    return deck_NP[:, :take]


def _slots(
    rng: np.random.Generator, count: int, slots: int, take: int, power_a: float
) -> np.ndarray:
    """`count` samples of `take` slots drawn one by one, without replacement, by weight.

    The order of the largest `log weight + Gumbel noise` is the order of such successive draws
    (Plackett-Luce; Yellott 1977), which lets a whole batch be drawn by one sort.
    """
    log_weight_S = (power_a - 1.0) * np.log(np.arange(1, slots + 1))
    noisy_NS = rng.gumbel(size=(count, slots)) + log_weight_S[None, :]
    return np.argsort(-noisy_NS, axis=1)[:, :take]


_Fill = Callable[[MQARConfig, np.random.Generator, tuple[int, int]], np.ndarray]
_FILL: dict[str, _Fill] = {
    "zero": lambda config, rng, shape: np.zeros(shape, np.int32),
    "random": lambda config, rng, shape: rng.integers(
        config.vocab_size, size=shape, dtype=np.int32
    ),
    "reserved": lambda config, rng, shape: rng.integers(
        config.first_reserved, config.first_value, size=shape, dtype=np.int32
    ),
}

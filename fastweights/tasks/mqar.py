"""Multi-query associative recall (MQAR; Arora et al. 2023, "Zoology", arXiv:2312.04927).

An example shows K distinct keys, each followed by its value, and later asks for every key once:

    k1 v1 k2 v2 ... kK vK | . . k2 . . . k1 . . . . .
                                v2       v1              <- targets

The answer is asked for at the query itself and is not in the stream, so nothing leaks it. Keys come
from 1..V/2-1 and values from V/2..V-1, both without replacement within an example; 0 is the filler.
The query zone of T - 2K tokens has (T - 2K) / 2 slots at its even offsets. Slot i (from 1) is drawn
with weight a * i^(a-1): a = 1 is uniform, a near 0 puts most queries soon after the pairs. K slots
are drawn one after the other without replacement.

Array legend: N examples, T tokens, K pairs.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from fastweights.errors import check
from fastweights.tasks.base import Slice, TaskConfig, unasked
from fastweights.tasks.draws import Array, Draws, interleave, slots

QUERY_ORDERS = ("independent", "coupled")
FILLERS = ("zero", "random", "reserved")


@dataclasses.dataclass(frozen=True)
class MQARConfig(TaskConfig):
    """Sizes, mix and variants of the task; the numbers are Zoology's, the variants fairer ones.

    `dataclasses.replace(config, query_order="coupled", filler="random")` is the task as Zoology
    wrote it. Entries of `train` and `test` are (T, K).

    Attributes:
      vocab_size: V.
      power_a: the exponent a of the slot weights.
      query_order: "coupled": the j-th key goes to the j-th slot drawn. Early draws favour early
        slots, so the place of a query then tells something of which pair it asks for: guessing by
        place alone scores up to several times chance. "independent": keys go to the drawn slots in
        an order of their own, which leaves nothing to guess.
      filler: what the rest of the query zone holds. "zero": token 0. "random": uniform tokens of
        the whole vocabulary, which may repeat keys of the example as if they were queries without a
        label (eight times an example at T 1024, K 256, V 8192). "reserved": uniform tokens of the
        last V // 8 keys, which are then never used as keys.
    """

    NAME: ClassVar[str] = "mqar"
    ENTRY: ClassVar[tuple[str, ...]] = ("length", "pairs")

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
    power_a: float = 0.01
    query_order: str = "independent"
    filler: str = "zero"

    def __post_init__(self):
        super().__post_init__()
        check(self.power_a > 0, f"mqar.power_a is {self.power_a}; it must be positive.")
        for name, known in (("query_order", QUERY_ORDERS), ("filler", FILLERS)):
            value = getattr(self, name)
            check(
                value in known, f"mqar.{name} is {value!r}; it must be one of {', '.join(known)}."
            )

    def check_entry(self, field: str, length: int, pairs: int) -> None:
        where = f"mqar.{field} has a slice of length {length} with {pairs} pairs"
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

    def part(self, length: int, pairs: int) -> Slice:
        return Slice(length, pairs)

    def answers(self, part: Slice) -> int:
        return part.pairs

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        """As in `TaskConfig`; targets are the value at each query's key."""
        length, pairs = part.length, part.pairs
        keys_NK = 1 + draws.distinct(count, self.first_reserved - 1, pairs)
        values_NK = self.first_value + draws.distinct(
            count, self.vocab_size - self.first_value, pairs
        )
        slots_NK = slots(draws, count, (length - 2 * pairs) // 2, pairs, self.power_a)
        if self.query_order == "independent":
            slots_NK = draws.shuffled(slots_NK)

        fill_NT = _FILL[self.filler](self, draws, (count, length))
        pairs_NT = interleave(draws, keys_NK, values_NK)
        asked_NK = 2 * pairs + 2 * slots_NK
        tokens_NT = draws.xp.concatenate([pairs_NT, fill_NT[:, 2 * pairs :]], axis=1)
        tokens_NT = draws.put(tokens_NT, asked_NK, keys_NK)
        return tokens_NT, draws.put(unasked(draws, count, length), asked_NK, values_NK)


_Fill = Callable[[MQARConfig, Draws, tuple[int, int]], Array]
_FILL: dict[str, _Fill] = {
    "zero": lambda config, draws, shape: draws.xp.zeros(shape, np.int32),
    "random": lambda config, draws, shape: draws.integers(0, config.vocab_size, shape),
    "reserved": lambda config, draws, shape: draws.integers(
        config.first_reserved, config.first_value, shape
    ),
}

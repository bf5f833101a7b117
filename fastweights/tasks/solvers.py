"""Players that know only the habits of a task, to see what can be won without solving it.

A task is sound when its oracle (oracles.py) scores 1.0 and none of these beats chance by much. They
see tokens and segment ids, as a model does; `fit` may also see a training batch's targets.

Array legend: R rows, L row length, T tokens of an example.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import numpy as np

from fastweights.tasks.batches import Batch


@dataclasses.dataclass(frozen=True)
class Habits:
    """Guesses that know no other token than the present one, learnt from a batch of one slice.

    Attributes:
      favourite: the answer that is right most often over all examples.
      answer_at: the answer that is right most often at a position.
      answer_to: the answer that is right most often to a token.
    """

    favourite: int
    answer_at: dict[int, int]
    answer_to: dict[int, int]

    @classmethod
    def fit(cls, batch: Batch) -> Self:
        asked = batch["targets"] >= 0
        targets = batch["targets"][asked]
        return cls(
            int(np.bincount(targets).argmax()),
            _favourites(batch["positions"][asked], targets),
            _favourites(batch["tokens"][asked], targets),
        )

    def guesses(self, batch: Batch) -> dict[str, np.ndarray]:
        """predictions_RL of each cheater, -1 where it met nothing in `fit`.

        "majority" gives the most frequent answer everywhere, "position" the most frequent at each
        position, "unigram" the most frequent to the token.
        """
        return {
            "majority": np.full(batch["tokens"].shape, self.favourite, np.int32),
            "position": _look_up(self.answer_at, batch["positions"]),
            "unigram": _look_up(self.answer_to, batch["tokens"]),
        }


@dataclasses.dataclass(frozen=True)
class PairPlaces:
    """Which pair a recall task mostly asks for at a position, learnt as `Habits` are.

    Attributes:
      pair_at: for a query's position, the number of that pair.
    """

    pair_at: dict[int, int]

    @classmethod
    def fit(cls, batch: Batch) -> Self:
        places, pairs = [], []
        for row, start, stop in spans(batch):
            tokens = batch["tokens"][row, start:stop].tolist()
            for t, target in enumerate(batch["targets"][row, start:stop].tolist()):
                if target >= 0:
                    # Values are a set of their own, so the first match is the one in its pair.
                    places.append(t)
                    pairs.append(tokens.index(target) // 2)
        return cls(_favourites(np.array(places), np.array(pairs)))

    def by_position(self, batch: Batch) -> np.ndarray:
        """The value of the pair that this position mostly asks for; predictions_RL.

        Positions not met in `fit` are answered with the first pair's value.
        """

        def values(tokens_T: np.ndarray) -> list[int]:
            return [tokens_T[2 * self.pair_at.get(t, 0) + 1] for t in range(len(tokens_T))]

        return fill(batch, values)


def _favourites(given: np.ndarray, answers: np.ndarray) -> dict[int, int]:
    """For each value of `given`, the answer most often seen with it."""
    counts = collections.Counter(zip(given.tolist(), answers.tolist(), strict=True))
    # The last of equal keys stays, which is the most frequent here.
    return {key: answer for (key, answer), _ in reversed(counts.most_common())}


def _look_up(known: dict[int, int], values_RL: np.ndarray) -> np.ndarray:
    table = np.full(int(values_RL.max()) + 1, -1, np.int32)
    for key, answer in known.items():
        if key < len(table):
            table[key] = answer
    return table[values_RL]


def fill(batch: Batch, answer: Callable[[np.ndarray], Sequence[int] | np.ndarray]) -> np.ndarray:
    """predictions_RL with `answer(tokens_T)` for every example, -1 at padding."""
    predictions_RL = np.full(batch["tokens"].shape, -1, np.int32)
    for row, start, stop in spans(batch):
        predictions_RL[row, start:stop] = answer(batch["tokens"][row, start:stop])
    return predictions_RL


def spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """(row, start, stop) of every example of the batch."""
    for row, ids_L in enumerate(batch["segment_ids"]):
        edges = np.flatnonzero(np.diff(ids_L)) + 1
        for start, stop in zip((0, *edges), (*edges, len(ids_L)), strict=True):
            if ids_L[start] > 0:
                yield row, int(start), int(stop)

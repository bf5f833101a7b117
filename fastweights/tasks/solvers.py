"""Players that need no training: one that knows the task and some that only know its habits.

A task is sound when its oracle scores 1.0 and none of the others beats chance by much. They see
tokens and segment ids, as a model does; `fit` may also see a training batch's targets.

Array legend: R rows, L row length, T tokens of an example.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import numpy as np

from fastweights.tasks.base import Batch
from fastweights.tasks.state_tracking import PERMUTATIONS


def recall_oracle(batch: Batch) -> np.ndarray:
    """Answers every key with the token that followed its first appearance in the same example.

    Returns:
      predictions_RL, int32; -1 where the token has not been seen before.
    """
    predictions_RL = np.full(batch["tokens"].shape, -1, np.int32)
    for row, start, stop in _spans(batch):
        tokens = batch["tokens"][row, start:stop].tolist()
        memory: dict[int, int] = {}
        for t in range(0, len(tokens), 2):
            if tokens[t] in memory:
                predictions_RL[row, start + t] = memory[tokens[t]]
            else:
                memory[tokens[t]] = tokens[t + 1]
    return predictions_RL


def parity_oracle(batch: Batch) -> np.ndarray:
    """Counts ones; predictions_RL."""
    return _fill(batch, lambda tokens_T: np.cumsum(tokens_T) % 2)


def s3_oracle(batch: Batch) -> np.ndarray:
    """Moves three things about, one token after the other; predictions_RL."""

    def places(tokens_T: np.ndarray) -> list[int]:
        where, found = [0, 1, 2], []
        for token in tokens_T:
            where = [PERMUTATIONS[token][place] for place in where]
            found.append(PERMUTATIONS.index(tuple(where)))
        return found

    return _fill(batch, places)


ORACLES: dict[str, Callable[[Batch], np.ndarray]] = {
    "mqar": recall_oracle,
    "parity": parity_oracle,
    "s3": s3_oracle,
}


@dataclasses.dataclass(frozen=True)
class Habits:
    """Guesses that do not look at the tokens, learnt from one training batch of a single slice.

    Attributes:
      unigram: the answer that is right most often over all examples.
      answer_at: the answer that is right most often at a position.
    """

    unigram: int
    answer_at: dict[int, int]

    @classmethod
    def fit(cls, batch: Batch) -> Self:
        answers: dict[int, Counter[int]] = {}
        for row, start, stop in _spans(batch):
            for t, target in enumerate(batch["targets"][row, start:stop].tolist()):
                if target >= 0:
                    answers.setdefault(t, Counter())[target] += 1
        total = sum(answers.values(), Counter[int]())
        return cls(total.most_common(1)[0][0], _favourites(answers))

    def majority(self, batch: Batch) -> np.ndarray:
        """The most frequent answer, everywhere; predictions_RL."""
        return np.full(batch["tokens"].shape, self.unigram, np.int32)

    def by_position(self, batch: Batch) -> np.ndarray:
        """The most frequent answer at each position, -1 where none was met; predictions_RL."""
        return _fill(batch, lambda tokens: [self.answer_at.get(t, -1) for t in range(len(tokens))])


@dataclasses.dataclass(frozen=True)
class PairPlaces:
    """Which pair a recall task mostly asks for at a position, learnt as `Habits` are.

    Attributes:
      pair_at: for a query's position, the number of that pair.
    """

    pair_at: dict[int, int]

    @classmethod
    def fit(cls, batch: Batch) -> Self:
        pairs: dict[int, Counter[int]] = {}
        for row, start, stop in _spans(batch):
            tokens = batch["tokens"][row, start:stop].tolist()
            for t, target in enumerate(batch["targets"][row, start:stop].tolist()):
                if target >= 0:
                    # Values are a set of their own, so the first match is the one in its pair.
                    pairs.setdefault(t, Counter())[tokens.index(target) // 2] += 1
        return cls(_favourites(pairs))

    def by_position(self, batch: Batch) -> np.ndarray:
        """The value of the pair that this position mostly asks for; predictions_RL.

        Positions not met in `fit` are answered with the first pair's value.
        """

        def values(tokens_T: np.ndarray) -> list[int]:
            return [tokens_T[2 * self.pair_at.get(t, 0) + 1] for t in range(len(tokens_T))]

        return _fill(batch, values)


def _favourites(counts: dict[int, Counter[int]]) -> dict[int, int]:
    return {t: count.most_common(1)[0][0] for t, count in counts.items()}


def _fill(batch: Batch, answer: Callable[[np.ndarray], Sequence[int] | np.ndarray]) -> np.ndarray:
    """predictions_RL with `answer(tokens_T)` for every example, -1 at padding."""
    predictions_RL = np.full(batch["tokens"].shape, -1, np.int32)
    for row, start, stop in _spans(batch):
        predictions_RL[row, start:stop] = answer(batch["tokens"][row, start:stop])
    return predictions_RL


def _spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """(row, start, stop) of every example of the batch."""
    for row, ids_L in enumerate(batch["segment_ids"]):
        edges = np.flatnonzero(np.diff(ids_L)) + 1
        for start, stop in zip((0, *edges), (*edges, len(ids_L)), strict=True):
            if ids_L[start] > 0:
                yield row, int(start), int(stop)

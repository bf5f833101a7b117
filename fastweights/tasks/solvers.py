"""Players that need no training: one that knows the task and some that only know its habits.

A task is sound when `oracle` scores 1.0 and none of the others beats chance by much. They see
tokens and segment ids, as a model does; `Baseline.fit` may also see a training batch's targets.

Array legend: R rows, L row length.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Self

import numpy as np

from fastweights.tasks.base import Batch


def oracle(batch: Batch) -> np.ndarray:
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


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Guesses that use no association, learnt from one training batch of a single slice.

    Attributes:
      unigram: the answer that is right most often over all examples.
      pair_at: for a query's position, the number of the pair that is asked for there most often.
    """

    unigram: int
    pair_at: dict[int, int]

    @classmethod
    def fit(cls, batch: Batch) -> Self:
        answers: Counter[int] = Counter()
        pairs: dict[int, Counter[int]] = {}
        for row, start, stop in _spans(batch):
            tokens = batch["tokens"][row, start:stop].tolist()
            for t, target in enumerate(batch["targets"][row, start:stop].tolist()):
                if target >= 0:
                    answers[target] += 1
                    # Values are a set of their own, so the first match is the one in its pair.
                    pairs.setdefault(t, Counter())[tokens.index(target) // 2] += 1
        pair_at = {t: count.most_common(1)[0][0] for t, count in pairs.items()}
        return cls(answers.most_common(1)[0][0], pair_at)

    def majority(self, batch: Batch) -> np.ndarray:
        """The most frequent answer, everywhere; predictions_RL."""
        return np.full(batch["tokens"].shape, self.unigram, np.int32)

    def by_position(self, batch: Batch) -> np.ndarray:
        """The value of the pair that this position mostly asks for; predictions_RL.

        Positions not met in `fit` are answered with the first pair's value.
        """
        predictions_RL = np.full(batch["tokens"].shape, -1, np.int32)
        for row, start, stop in _spans(batch):
            tokens = batch["tokens"][row, start:stop]
            for t in range(stop - start):
                predictions_RL[row, start + t] = tokens[2 * self.pair_at.get(t, 0) + 1]
        return predictions_RL


def _spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """(row, start, stop) of every example of the batch."""
    for row, ids_L in enumerate(batch["segment_ids"]):
        edges = np.flatnonzero(np.diff(ids_L)) + 1
        for start, stop in zip((0, *edges), (*edges, len(ids_L)), strict=True):
            if ids_L[start] > 0:
                yield row, int(start), int(stop)

"""What every recall task shares: slices, random streams, rows of packed examples, accuracy.

Array legend: N examples, T tokens of one example, R rows, L tokens of a row.
"""

import dataclasses

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
    """One cell of an evaluation: examples of `length` tokens that hold `pairs` associations."""

    length: int
    pairs: int

    @property
    def name(self) -> str:
        return f"T{self.length}_K{self.pairs}"

    @property
    def chance(self) -> float:
        """Accuracy of answering each query with some value seen in the example."""
        return chance(self.pairs)


def chance(pairs: int) -> float:
    """Accuracy of a guess among the `pairs` values of an example: the floor for a recall score.

    Values come from their own part of the vocabulary, so that even a model without any memory of
    which key had which value learns to answer with one it has seen.
    """
    return 1.0 / pairs


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

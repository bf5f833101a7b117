"""Batches of any task: random streams, rows of packed examples, accuracy.

Array legend: N examples, T tokens of one example, R rows, L tokens of a row, S slices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastweights.errors import UserError, check
from fastweights.tasks.base import IGNORE, Slice, TaskConfig
from fastweights.tasks.draws import Array, DeviceDraws, Draws, HostDraws

Batch = dict[str, np.ndarray]
"""`tokens`, `targets`, `segment_ids`, `positions`, each int32 [R, L].

`targets[r, t]` is what must be predicted at position t, -1 where nothing is asked; `segment_ids`
are 1, 2, ... for the examples of a row and 0 for padding; `positions` restart at 0 in each example.
"""

# The second word of every random stream's seed. A task's training and evaluation examples come from
# generators whose seeds differ in this word, whatever the run's seed and the batch's index.
TRAIN_STREAM = 1
EVAL_STREAM = 2

ROW = 2**14  # shares of rows are whole numbers of 1 / ROW of a row


def train_batch(config: TaskConfig, *, seed: int, index: int, rows: int, length: int) -> Batch:
    """The training batch number `index` of the run with this seed: a pure function of both.

    Every row holds examples of one slice, each slice as many rows as `TaskConfig.train` says: where
    that is no whole number, one row more or less, which the batch draws.
    """
    check_fits(config, length)
    rng = stream(seed, TRAIN_STREAM, _drawn(config, index))
    mix = _mix(config, rows, length)
    counts_S = np.diff((mix.ends_S + rng.integers(ROW)) // ROW, prepend=0)
    found = [
        slice_batch(config, part, HostDraws(rng), count, length)
        for part, count in zip(mix.parts, counts_S.tolist(), strict=True)
        if count
    ]
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def device_batch(
    config: TaskConfig, *, seed: int | jax.Array, index: jax.Array, rows: int, length: int
) -> dict[str, jax.Array]:
    """As `train_batch`, inside `jit` and from JAX's numbers: of the same law, not the same batch.

    `seed` and `index` may be traced, so one program makes the batches of all seeds and steps.
    """
    check_fits(config, length)
    key = jax.random.key(seed)
    for word in (TRAIN_STREAM, _drawn(config, index)):
        key = jax.random.fold_in(key, word)
    mix = _mix(config, rows, length)
    drawn, *keys = jax.random.split(key, 1 + len(mix.parts))
    # Shapes may not depend on the draw, so each slice makes as many rows as it can have.
    found = [
        slice_batch(config, part, DeviceDraws(key), most, length)
        for part, most, key in zip(mix.parts, mix.most_S.tolist(), keys, strict=True)
        if most
    ]
    ends_S = (jnp.asarray(mix.ends_S) + jax.random.randint(drawn, (), 0, ROW)) // ROW
    made_S = jnp.asarray(np.cumsum(mix.most_S) - mix.most_S)
    unused_S = made_S - jnp.concatenate([jnp.zeros_like(ends_S[:1]), ends_S[:-1]])
    place_R = jnp.arange(rows)
    slice_R = jnp.searchsorted(ends_S, place_R, side="right", method="compare_all")
    place_R = place_R + unused_S[slice_R]
    return {name: jnp.concatenate([part[name] for part in found])[place_R] for name in found[0]}


def _drawn(config: TaskConfig, index: Any) -> Any:
    """The number that a batch's random numbers come from."""
    return index % config.repeat_after if config.repeat_after else index


class _Mix(NamedTuple):
    """The training slices, where in a batch the rows of each end on average, in parts of a row, and
    how many rows each has at most."""

    parts: list[Slice]
    ends_S: np.ndarray
    most_S: np.ndarray


def _mix(config: TaskConfig, rows: int, length: int) -> _Mix:
    check(
        0 < rows < 2**31 // ROW,
        f"A batch of {config.NAME} can't have {rows} rows; give it 1 to {2**31 // ROW - 1}.",
    )
    parts = [config.part(*entry[:-1]) for entry in config.train]
    weight_S = np.array([entry[-1] for entry in config.train])
    share_S = weight_S / np.array([length // part.length for part in parts])
    ends_S = np.rint(rows * ROW * np.cumsum(share_S) / share_S.sum()).astype(np.int32)
    return _Mix(parts, ends_S, -(-np.diff(ends_S, prepend=0) // ROW))


def most_answers(config: TaskConfig, rows: int | None, length: int) -> int:
    """How often a training batch of `rows` rows asks at most; None: any one row of it."""
    mix = _mix(config, rows or 1, length)
    of_row = [(length // part.length) * config.answers(part) for part in mix.parts]
    return int(mix.most_S @ of_row) if rows else max(of_row)


def slice_batch(config: TaskConfig, part: Slice, draws: Draws, rows: int, length: int) -> Any:
    """A batch of `rows` rows, each with `length // part.length` examples of one slice."""
    found = config.examples(draws, rows * (length // part.length), part)
    return pack_rows(*found, length, xp=draws.xp)


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
    words = (part.length, part.pairs, *(size for _, size in part.marks))
    rng = stream(config.test_seed, EVAL_STREAM, *words)
    found = config.examples(HostDraws(rng), config.test_examples, part)
    batch = pack_rows(*found, max(length, part.length))
    if config.KINDS:
        kinds_NT = config.kinds(*found)
        batch["kinds"] = pack_rows(found[0], kinds_NT, max(length, part.length))["targets"]
    return batch


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


def pack_rows(tokens_NT: Array, targets_NT: Array, length: int, *, xp: Any = np) -> dict[str, Any]:
    """Lays examples side by side in rows of `length` tokens, `length // T` in each.

    The end of a row that holds no whole example is padding, and so is what the last row lacks in
    examples.

    Returns:
      A batch of ceil(N / (length // T)) rows, arrays of the module `xp`.
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

    def lay(values_NT: Array, empty: int) -> Array:
        values_NT = values_NT.astype(np.int32)
        missing = ((0, rows * per_row - count), (0, 0))
        full = xp.pad(values_NT, missing, constant_values=empty).reshape(rows, used)
        return xp.pad(full, ((0, 0), (0, length - used)), constant_values=empty)

    ids_N1 = (xp.arange(count) % per_row + 1)[:, None]
    return {
        "tokens": lay(tokens_NT, 0),
        "targets": lay(targets_NT, IGNORE),
        "segment_ids": lay(xp.broadcast_to(ids_N1, (count, size)), 0),
        "positions": lay(xp.broadcast_to(xp.arange(size)[None], (count, size)), 0),
    }


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Share of the answer positions (targets >= 0) at which `predictions` equals `targets`.

    All queries weigh the same. Where every example of a slice has the same number of queries, this
    is also the mean over examples of each example's accuracy.

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

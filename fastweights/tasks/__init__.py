"""Recall tasks: synthetic data as pure functions of (seed, index), scored by slice.

A task is a module in `TASKS` with four functions; its config has a `vocab_size`.

    train_batch(config, *, seed, index, rows, length) -> Batch
    eval_slices(config) -> tuple[Slice, ...]
    eval_rows(config, part, length) -> Batch      the whole, fixed test set of one slice
    check_fits(config, length)                    UserError if a row cannot hold a training example
"""

from fastweights.tasks import mqar
from fastweights.tasks.base import Batch, Slice, accuracy, chance

TASKS = {"mqar": mqar}

__all__ = ["TASKS", "Batch", "Slice", "accuracy", "chance"]

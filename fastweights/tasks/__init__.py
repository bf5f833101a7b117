"""Recall and state tracking: synthetic data as pure functions of (seed, index), scored by slice.

A task is a config class, a `TaskConfig` that says what an example is; `train_batch`, `eval_slices`,
`eval_rows` and `check_fits` serve them all.
"""

from fastweights.tasks.base import (
    Batch,
    Slice,
    TaskConfig,
    accuracy,
    check_fits,
    eval_rows,
    eval_slices,
    slice_batch,
    train_batch,
)
from fastweights.tasks.mqar import MQARConfig
from fastweights.tasks.state_tracking import ParityConfig, S3Config

TASKS = {config.NAME: config for config in (MQARConfig, ParityConfig, S3Config)}

__all__ = [
    "TASKS",
    "Batch",
    "MQARConfig",
    "ParityConfig",
    "S3Config",
    "Slice",
    "TaskConfig",
    "accuracy",
    "check_fits",
    "eval_rows",
    "eval_slices",
    "slice_batch",
    "train_batch",
]

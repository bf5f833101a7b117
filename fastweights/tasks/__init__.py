"""Recall and state tracking: synthetic data as pure functions of (seed, index), scored by slice.

A task is a config class, a `TaskConfig` that says what an example is; `train_batch` (and inside
`jit` `device_batch`), `eval_slices`, `eval_rows` and `check_fits` serve them all. oracles.py has a
solver for each, solvers.py cheaters that must not get far.
"""

from fastweights.tasks.base import Slice, TaskConfig
from fastweights.tasks.batches import (
    Batch,
    accuracy,
    check_fits,
    device_batch,
    eval_rows,
    eval_slices,
    most_answers,
    slice_batch,
    train_batch,
)
from fastweights.tasks.copying import PalindromeConfig, SelectiveCopyConfig, StackConfig
from fastweights.tasks.hops import KHopConfig
from fastweights.tasks.lookup import NIAHConfig, PhonebookConfig
from fastweights.tasks.mad import (
    CompressionConfig,
    FuzzyRecallConfig,
    InContextRecallConfig,
    MemorizeConfig,
    NoisyRecallConfig,
)
from fastweights.tasks.mqar import MQARConfig
from fastweights.tasks.mqar_variants import ComposedConfig, OverwriteConfig
from fastweights.tasks.state_and_recall import ModArithConfig, ParityRetrievalConfig
from fastweights.tasks.state_tracking import ParityConfig, S3Config, S5Config

TASKS: dict[str, type[TaskConfig]] = {
    config.NAME: config
    for config in (
        MQARConfig,
        OverwriteConfig,
        ComposedConfig,
        InContextRecallConfig,
        NoisyRecallConfig,
        FuzzyRecallConfig,
        MemorizeConfig,
        CompressionConfig,
        SelectiveCopyConfig,
        PalindromeConfig,
        StackConfig,
        KHopConfig,
        ParityConfig,
        ModArithConfig,
        S3Config,
        S5Config,
        ParityRetrievalConfig,
        PhonebookConfig,
        NIAHConfig,
    )
}

__all__ = [
    "TASKS",
    "Batch",
    "ComposedConfig",
    "CompressionConfig",
    "FuzzyRecallConfig",
    "InContextRecallConfig",
    "KHopConfig",
    "MQARConfig",
    "MemorizeConfig",
    "ModArithConfig",
    "NIAHConfig",
    "NoisyRecallConfig",
    "OverwriteConfig",
    "PalindromeConfig",
    "ParityConfig",
    "ParityRetrievalConfig",
    "PhonebookConfig",
    "S3Config",
    "S5Config",
    "SelectiveCopyConfig",
    "Slice",
    "StackConfig",
    "TaskConfig",
    "accuracy",
    "check_fits",
    "device_batch",
    "eval_rows",
    "eval_slices",
    "most_answers",
    "slice_batch",
    "train_batch",
]

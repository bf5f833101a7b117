"""Retention: recall against the age of what is asked for, the tokens since it last stood there."""

from typing import Any

import numpy as np

from fastweights.data import DataConfig, eval_datasets
from fastweights.errors import check
from fastweights.evals.forward import Context
from fastweights.evals.result import Result
from fastweights.tasks import TASKS, eval_slices


def evaluate(context: Context, params: Any) -> Result:
    """Recall over all test slices of a task by age, in ranges of powers of two."""
    data = context.config.data
    right, asked = np.zeros(32, np.int64), np.zeros(32, np.int64)
    datasets = eval_datasets(data, rows=context.rows)
    for part in eval_slices(data.task):
        for batch, losses in context.scores(params, datasets[part.name]):
            age_RL = answer_age(batch)
            known = age_RL > 0
            bins = np.log2(age_RL[known]).astype(int)
            asked += np.bincount(bins, minlength=32)
            right += np.bincount(bins, losses.correct_BT[known], 32).astype(np.int64)
    check(
        bool(asked.any()),
        f"no answer of the task '{data.kind}' stands in its example before it is asked for, so "
        "there is no age; choose a recall task for the eval age.",
    )
    rows = [
        {
            "slice": f"age {2**i}-{2 ** (i + 1) - 1}",
            "recall": float(right[i] / asked[i]),
            "answers": int(asked[i]),
        }
        for i in np.flatnonzero(asked)
    ]
    metrics = {"youngest": rows[0]["recall"], "oldest": rows[-1]["recall"]}
    return Result(metrics, rows)


def answer_age(batch: dict[str, np.ndarray]) -> np.ndarray:
    """Tokens from the last place of each answer in its example to where it is asked for.

    Returns:
      int [R, L]; 0 where nothing is asked or the answer has not been there.
    """
    age_RL = np.zeros(batch["tokens"].shape, np.int64)
    for row, t in np.argwhere(batch["targets"] >= 0):
        start = t - batch["positions"][row, t]
        places = np.flatnonzero(batch["tokens"][row, start:t] == batch["targets"][row, t])
        age_RL[row, t] = t - start - places[-1] if len(places) else 0
    return age_RL


def check_fits(data: DataConfig) -> None:
    """Raises `UserError` unless the data are a task that asks after its tokens."""
    check(
        data.kind in TASKS,
        f"data.kind is '{data.kind}', which has no answers of an age; the eval age needs a task.",
    )
    check(
        data.decoder == "none",
        f"data.kind is '{data.kind}', which asks for all tokens at once and none at an age; leave "
        "the eval age out.",
    )

"""Recall by slice: accuracy over answer positions, beside what a guess would score."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fastweights.data import eval_datasets
from fastweights.errors import check
from fastweights.evals.forward import Context
from fastweights.evals.result import Result
from fastweights.tasks import TASKS, Slice


def evaluate(context: Context, params: Any) -> Result:
    """Scores every test slice no longer than a training row, on examples never trained on.

    Longer slices are extrapolation, which the eval `length` reports: one mean would hide either.
    """
    length = context.config.data.length
    rows = score_slices(context, params, lambda part: part.length <= length)
    return Result({"mean": float(np.mean([row["recall"] for row in rows]))}, rows)


def score_slices(
    context: Context, params: Any, wanted: Callable[[Slice], bool]
) -> list[dict[str, Any]]:
    """One row a test slice that is wanted, in the order of the config.

    Raises:
      UserError: the run's data is no recall task, or no slice is wanted.
    """
    data = context.config.data
    check(
        data.kind in TASKS,
        f"this run was trained on '{data.kind}', which has no recall slices; "
        f"recall needs data.kind to be one of: {', '.join(TASKS)}.",
    )
    slices = [part for part in TASKS[data.kind].eval_slices(data.task) if wanted(part)]
    check(
        bool(slices),
        f"data.{data.kind}.test has no slice for this eval at data.length {data.length}; "
        "add one: recall takes slices up to that length, length takes longer ones.",
    )
    datasets = eval_datasets(data, rows=context.rows)
    return [_score(context, params, part, datasets[part.name]) for part in slices]


def _score(context: Context, params: Any, part: Slice, batches: Any) -> dict[str, Any]:
    correct, asked, nll = 0, 0, 0.0
    for batch, losses in context.scores(params, batches):
        correct += int(losses.correct_BT.sum())
        nll += float(losses.nll_BT.sum(dtype=np.float64))
        asked += int((batch["targets"] >= 0).sum())
    return {
        "slice": part.name,
        "length": part.length,
        "pairs": part.pairs,
        "recall": correct / asked,
        "chance": part.chance,
        "nll": nll / asked,
        "answers": asked,
    }

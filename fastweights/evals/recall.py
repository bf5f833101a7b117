"""Recall by slice: accuracy over answer positions, beside what a guess would score."""

from typing import Any

import numpy as np

from fastweights.data import DataConfig, eval_datasets
from fastweights.errors import check
from fastweights.evals.forward import Context
from fastweights.evals.result import Result
from fastweights.tasks import TASKS, Slice, eval_slices


def evaluate(context: Context, params: Any) -> Result:
    """Scores every test slice no longer than a training row, on examples never trained on.

    Longer slices are extrapolation, which the eval `length` reports: one mean would hide either.
    """
    rows = score_slices(context, params, _slices(context.config.data))
    return Result({"mean": float(np.mean([row["recall"] for row in rows]))}, rows)


def check_fits(data: DataConfig) -> None:
    """Raises `UserError` if the data have no slice to score."""
    check(
        data.kind in TASKS,
        f"data.kind is '{data.kind}', which has no recall slices; the eval recall needs one of: "
        f"{', '.join(TASKS)}.",
    )
    check(
        bool(_slices(data)),
        f"data.{data.kind}.test has no slice of at most data.length {data.length} for the eval "
        "recall; add one.",
    )


def _slices(data: DataConfig) -> list[Slice]:
    slices = eval_slices(data.task)
    return [part for part in slices if part.length <= data.length]


def score_slices(context: Context, params: Any, slices: list[Slice]) -> list[dict[str, Any]]:
    """One row a slice, in their order."""
    datasets = eval_datasets(context.config.data, rows=context.rows)
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

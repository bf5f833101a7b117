"""Recall by slice, beside what a guess would score.

`recall` is the accuracy over answer positions, `error` its standard error over examples, `whole`
the share of examples without a mistake.
"""

from typing import Any

import numpy as np

from fastweights.analysis import bootstrap_error
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
    return Result({"mean": mean_recall(rows)}, rows)


def mean_recall(rows: list[dict[str, Any]]) -> float:
    """The mean over slices; rows of single kinds are parts of them."""
    return float(np.mean([row["recall"] for row in rows if "/" not in row["slice"]]))


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
    """A row a slice, in their order, and behind it one for each kind of answer its task tells."""
    datasets = eval_datasets(context.config.data, rows=context.rows)
    kinds = context.config.data.task.KINDS
    return [
        row
        for part in slices
        for row in _score(part, list(context.scores(params, datasets[part.name])), kinds)
    ]


def _score(part: Slice, scored: list[Any], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    asked = [batch["targets"] >= 0 for batch, _ in scored]
    rows = [_row(part, part.name, scored, asked)]
    for i, kind in enumerate(kinds):
        of_kind = [
            some & (batch["kinds"] == i) for (batch, _), some in zip(scored, asked, strict=True)
        ]
        if any(some.any() for some in of_kind):
            rows.append(_row(part, f"{part.name}/{kind}", scored, of_kind))
    return rows


def _row(part: Slice, name: str, scored: list[Any], asked: list[np.ndarray]) -> dict[str, Any]:
    """Scores of the answers at `asked`: of each, and of examples that have all of them right."""
    nll, right, counts = 0.0, [], []
    for (batch, losses), some_RL in zip(scored, asked, strict=True):
        nll += float(losses.nll_BT[some_RL].sum(dtype=np.float64))
        rows, _ = np.nonzero(some_RL)
        example_of = np.stack([rows, batch["segment_ids"][some_RL]])
        _, which, asked_of = np.unique(example_of, axis=1, return_inverse=True, return_counts=True)
        right.append(np.bincount(which, losses.correct_BT[some_RL], len(asked_of)))
        counts.append(asked_of)
    right_N, asked_N = np.concatenate(right), np.concatenate(counts)
    answers = int(asked_N.sum())
    return {
        "slice": name,
        "length": part.length,
        "pairs": part.pairs,
        "recall": float(right_N.sum() / answers),
        "error": bootstrap_error(right_N, asked_N),
        "whole": float(np.mean(right_N == asked_N)),
        "chance": part.chance,
        "nll": nll / answers,
        "answers": answers,
    }

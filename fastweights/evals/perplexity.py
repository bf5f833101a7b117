"""Perplexity of held-out text, by position in the document, and bits per byte."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from fastweights.data import DataConfig, eval_datasets, open_text
from fastweights.data.pipeline import HELD_OUT, TEXT
from fastweights.errors import check
from fastweights.evals.forward import Context
from fastweights.evals.result import Result


def evaluate(context: Context, params: Any) -> Result:
    """Mean loss over held-out targets.

    Metrics: `nll` (nats a target), `ppl`, and `bits_per_byte` from the text's true byte count. With
    `eval.max_batches` the loss is that of the part read, and is taken for the whole.
    """
    config = context.config
    batches = eval_datasets(config.data, rows=context.rows)[HELD_OUT]
    limit = config.eval.max_batches or len(batches)
    read = itertools.islice(batches, limit)
    nll_P, count_P = position_sums(context, params, read, config.data.length)
    nll = float(nll_P.sum() / count_P.sum())
    bits = open_text(config.data).counts[HELD_OUT].bits_per_byte(nll)
    metrics = {"nll": nll, "ppl": perplexity(nll), "bits_per_byte": bits}
    return Result(metrics, by_position(nll_P, count_P))


def check_fits(data: DataConfig) -> None:
    """Raises `UserError` unless the data are text."""
    check(
        data.kind == TEXT,
        f"data.kind is '{data.kind}', which has no held-out text for the eval ppl; use recall.",
    )


def perplexity(nll: float) -> float:
    """e^nll; infinite where a diverged model's exceeds a float."""
    return math.exp(nll) if nll < 700 else math.inf


def by_position(nll_P: np.ndarray, count_P: np.ndarray) -> list[dict[str, Any]]:
    """One row a range of positions in the document: 0, 1-3, 4-15, 16-63, ..."""
    length = len(nll_P)
    edges = [0, *(4**i for i in range(math.ceil(math.log(max(length, 2), 4)))), length]
    rows = []
    for start, stop in itertools.pairwise(edges):
        count = int(count_P[start:stop].sum())
        if count:
            nll = float(nll_P[start:stop].sum() / count)
            name = f"{start}-{stop - 1}"
            rows.append({"slice": name, "nll": nll, "ppl": perplexity(nll), "targets": count})
    return rows


def position_sums(
    context: Context, params: Any, batches: Iterable[Any], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Summed loss (nats) and number of targets by position in the document, each [length]."""
    nll_P, count_P = np.zeros(length), np.zeros(length, np.int64)
    for batch, losses in context.scores(params, batches):
        asked = batch["targets"] >= 0
        positions = batch["positions"][asked]
        nll_P += np.bincount(positions, losses.nll_BT[asked].astype(np.float64), length)
        count_P += np.bincount(positions, minlength=length)
    return nll_P, count_P

"""Beyond the training length: recall on longer examples, or loss on longer stretches of text."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastweights.data import Corpus, DataConfig, open_text
from fastweights.data.packing import Batch, to_batch
from fastweights.data.pipeline import HELD_OUT, TEXT
from fastweights.errors import check
from fastweights.evals.forward import Context
from fastweights.evals.perplexity import position_sums
from fastweights.evals.recall import mean_recall, score_slices
from fastweights.evals.result import Result
from fastweights.tasks import Slice, eval_slices

FACTORS = (1, 2, 4)


def evaluate(context: Context, params: Any) -> Result:
    """Recall: test slices longer than a training row. Text: held-out rows 1, 2 and 4 times longer.

    The same text is cut into longer rows, so that each token is read with more of its document in
    view. `beyond` is the loss at positions in the document that training never reached.
    """
    data = context.config.data
    if data.kind != TEXT:
        rows = score_slices(context, params, _slices(data))
        return Result({"mean": mean_recall(rows)}, rows)

    corpus = open_text(data)
    limit = context.config.eval.max_batches or None
    rows, metrics = [], {}
    for factor in FACTORS:
        length = factor * data.length
        batches = itertools.islice(longer_rows(corpus, factor, context.rows), limit)
        nll_P, count_P = position_sums(context, params, batches, length)
        nll = float(nll_P.sum() / count_P.sum())
        far = int(count_P[data.length :].sum())
        rows.append(
            {
                "slice": f"x{factor}",
                "length": length,
                "nll": nll,
                "bits_per_byte": corpus.counts[HELD_OUT].bits_per_byte(nll),
                "beyond": float(nll_P[data.length :].sum() / far) if far else None,
                "targets beyond": far,
            }
        )
        metrics[f"nll_x{factor}"] = nll
    return Result(metrics, rows)


def check_fits(data: DataConfig) -> None:
    """Raises `UserError` if a recall task has no slice longer than a row; text always fits."""
    check(
        data.kind == TEXT or bool(_slices(data)),
        f"data.{data.kind}.test has no slice longer than data.length {data.length} for the eval "
        "length; add one.",
    )


def _slices(data: DataConfig) -> list[Slice]:
    slices = eval_slices(data.task)
    return [part for part in slices if part.length > data.length]


def longer_rows(corpus: Corpus, factor: int, rows: int) -> Iterator[Batch]:
    """Batches of `rows` held-out rows, each made of `factor` consecutive packed rows.

    Packed rows cut one stream, so joining them gives a document back what a cut hid from it.
    """
    source = corpus.rows[HELD_OUT]
    nothing = np.zeros(0, np.int64)
    joined = []
    for start in range(0, len(source), factor):
        first, *others = (source[i] for i in range(start, min(start + factor, len(source))))
        # The last token of a row is the first of the next: a target there, an input here.
        joined.append(np.concatenate([first, *(row[1:] for row in others)]))
    for piece in itertools.batched(joined, rows):
        filled = [*piece, *[nothing] * (rows - len(piece))]
        yield to_batch(filled, factor * corpus.length, corpus.tokenizer.eod_id)

"""Loss on tokens that complete a bigram seen before in the document, against the rest.

A model that recalls predicts "AR hits" well (Arora et al. 2023, arXiv:2312.04927, section 3): most
of the gap between attention and fixed-size memories on real text lies there.
"""

import itertools
from typing import Any

import numpy as np

from fastweights.data import eval_datasets, open_text
from fastweights.data.pipeline import HELD_OUT
from fastweights.evals import perplexity
from fastweights.evals.forward import Context
from fastweights.evals.result import Result

check_fits = perplexity.check_fits


def evaluate(context: Context, params: Any) -> Result:
    """Mean loss over held-out targets that are hits, and over those that are none."""
    config = context.config
    batches = eval_datasets(config.data, rows=context.rows)[HELD_OUT]
    read = itertools.islice(batches, config.eval.max_batches or len(batches))
    vocab = open_text(config.data).tokenizer.vocab_size
    nll, right, count = np.zeros(2), np.zeros(2), np.zeros(2, np.int64)
    for batch, losses in context.scores(params, read):
        asked = batch["targets"] >= 0
        kind = repeated_bigrams(batch, vocab)[asked].astype(int)
        nll += np.bincount(kind, losses.nll_BT[asked].astype(np.float64), 2)
        right += np.bincount(kind, losses.correct_BT[asked], 2)
        count += np.bincount(kind, minlength=2)
    rows = [
        {
            "slice": name,
            "nll": float(nll[kind] / count[kind]),
            "accuracy": float(right[kind] / count[kind]),
            "targets": int(count[kind]),
        }
        for kind, name in ((1, "hits"), (0, "rest"))
        if count[kind]
    ]
    return Result({f"nll_{row['slice']}": row["nll"] for row in rows}, rows)


def repeated_bigrams(batch: dict[str, np.ndarray], vocab: int) -> np.ndarray:
    """Where (token, target) stood before in the same document of the row, as bool [R, L]."""
    tokens, targets = (batch[name].astype(np.int64) for name in ("tokens", "targets"))
    asked = targets >= 0
    rows = np.arange(len(tokens))[:, None]
    document = rows * (int(batch["segment_ids"].max()) + 1) + batch["segment_ids"]
    bigram = ((document * vocab) + tokens) * vocab + targets
    _, first = np.unique(bigram[asked], return_index=True)
    hits = np.ones(int(asked.sum()), bool)
    hits[first] = False
    found = np.zeros(tokens.shape, bool)
    found[asked] = hits
    return found

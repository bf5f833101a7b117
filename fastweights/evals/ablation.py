"""Recall with one kind of layer silenced: what attention carries, and what the memories carry."""

from typing import Any

import jax

from fastweights.evals import recall
from fastweights.evals.forward import Context
from fastweights.evals.result import Result
from fastweights.model import ModelConfig
from fastweights.pattern import ATTENTION_LETTERS
from fastweights.tasks import eval_slices
from fastweights.training.optim import path_names

check_fits = recall.check_fits


def evaluate(context: Context, params: Any) -> Result:
    """Recall of the whole model, without its attention and without its memories.

    On all test slices, those longer than a training row among them. A silenced
    layer adds nothing to the residual stream; rows of a model that lacks some are named
    "slice/without attention". Kinds that the model has none of, or nothing but, are left out.
    """
    letters = set(context.config.model.layout.letters)
    silenced = {
        "none": set(),
        "attention": letters & ATTENTION_LETTERS,
        "memory": letters - ATTENTION_LETTERS,
    }
    slices = list(eval_slices(context.config.data.task))
    rows, metrics = [], {}
    for name, those in silenced.items():
        if those == letters or (name != "none" and not those):
            continue
        changed = silence(context.config.model, params, those)
        found = recall.score_slices(context, changed, slices)
        metrics[f"without_{name}"] = recall.mean_recall(found)
        of = f"/without {name}" if those else ""
        rows += [row | {"slice": row["slice"] + of} for row in found]
    return Result(metrics, rows)


def silence(config: ModelConfig, params: Any, letters: set[str]) -> Any:
    """Parameters with the output projection of the mixers of these letters zeroed."""
    layers = {"groups": config.layout.group, "tail": config.layout.tail}

    def zero(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = path_names(path)
        if names[0] not in layers or "mixer" not in names or names[-2:] != ("out", "kernel"):
            return leaf
        letter = layers[names[0]][int(names[1].removeprefix("layer_"))]
        return leaf * 0 if letter in letters else leaf

    return jax.tree_util.tree_map_with_path(zero, params)

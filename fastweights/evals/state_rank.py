"""Effective rank of the recurrent states: how many directions of its memory a model uses.

The exponential of the entropy of the normalised singular values (Roy and Vetterli 2007): 1 for a
state of one association, the smaller of key and value width for one that is evenly full.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastweights.data import DataConfig, eval_datasets
from fastweights.errors import check
from fastweights.evals.forward import Context
from fastweights.evals.result import Result
from fastweights.model import bind
from fastweights.training.optim import path_names


def evaluate(context: Context, params: Any) -> Result:
    """Mean rank over rows and heads of each layer with a matrix state, after the first rows."""
    data = context.config.data
    batch = next(iter(next(iter(eval_datasets(data, rows=context.rows).values()))))
    letters = context.config.model.layout

    @jax.jit
    def states(params: Any, tokens_BT: jax.Array, segment_ids_BT: jax.Array) -> Any:
        lm = bind(context.graphdef, params)
        cache = lm.init_cache(*tokens_BT.shape)
        return lm.hidden(tokens_BT, segment_ids_BT=segment_ids_BT, cache=cache)[1]

    # One example a row: the first.
    first = np.where(batch["segment_ids"] == 1, 1, 0)
    cache = states(params, jnp.asarray(batch["tokens"]), jnp.asarray(first))
    rows = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(cache)[0]:
        names = path_names(path)
        if "state" not in names or leaf.ndim < 4:
            continue
        place = int(names[1].removeprefix("layer_"))
        letter = (letters.group if names[0] == "groups" else letters.tail)[place]
        # Scanned groups are stacked in front.
        stacked = np.asarray(leaf, np.float64).reshape(-1, *leaf.shape[-4:])
        for copy, S_BGKV in enumerate(stacked):
            real_B = first.any(axis=1)
            rank = float(np.mean(effective_rank(S_BGKV[real_B])))
            name = ".".join(names[: names.index("state")])
            rows.append(
                {
                    "slice": f"{name}[{copy}] {letter}",
                    "rank": rank,
                    "most": min(S_BGKV.shape[-2:]),
                }
            )
    check(
        bool(rows),
        f"pattern '{context.config.model.pattern}' has no layer with a matrix for a state; the "
        "eval state_rank has nothing to look at.",
    )
    return Result({"mean": float(np.mean([row["rank"] for row in rows]))}, rows)


def effective_rank(matrices: np.ndarray) -> np.ndarray:
    """exp of the entropy of the singular values' shares, of [..., K, V]; 0 for an empty state."""
    values = np.linalg.svd(matrices, compute_uv=False)
    total = values.sum(axis=-1, keepdims=True)
    share = np.divide(values, total, out=np.zeros_like(values), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.where(total[..., 0] > 0, np.exp(-(share * logs).sum(axis=-1)), 0.0)


def check_fits(data: DataConfig) -> None:
    """Any data will do."""

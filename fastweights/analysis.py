"""From a sweep's rows to comparisons that are fair: best rate, robustness, intervals, floors.

Rows are those of scripts/collect.py. Runs that differ in learning rate and seed alone are one
model. It has one rate on all slices and evals, that of the best mean over the slices of its first
eval and over seeds; its score is the mean over seeds there, its robustness the area under the mean
over the logarithm of the rate, as a share of the range tried: 1 is perfect at every rate. A run
that failed, as one that diverged, counts as a score of 0: left out, its rate would look safe.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastweights.errors import check
from fastweights.tasks import MQARConfig, Slice, TaskConfig, accuracy, eval_rows, slice_batch
from fastweights.tasks.batches import stream
from fastweights.tasks.draws import HostDraws
from fastweights.tasks.solvers import Habits, PairPlaces

RESAMPLES = 1000
ALL_SLICES = "mean of all"
LOSS_EVAL = "ppl"
CHEATER_STREAM = 4
CHEATER_ROWS = 500


@dataclasses.dataclass(frozen=True)
class Summary:
    """One model on one slice.

    Attributes:
      model: the runs' name without learning rate and seed.
      score: mean over seeds at `lr`, the best rate.
      low, high: 95 % bootstrap interval of it, over seeds and over the examples of each.
      robustness: mean score over the logarithm of the rate; the score itself for a single rate.
      scores: rate -> one score a seed.
      nll: loss at the answers, mean over the finished seeds at `lr`; None where rows have none.
      row: a row of the best rate, for what does not depend on seeds.
    """

    model: str
    eval: str
    slice: str
    lr: float
    score: float
    low: float
    high: float
    robustness: float
    scores: dict[float, list[float]]
    nll: float | None
    row: dict[str, Any]

    @property
    def seeds(self) -> int:
        return len(self.scores[self.lr])


@dataclasses.dataclass(frozen=True)
class Loss:
    """One model's loss on held-out text, in the last of the ranges of positions.

    Attributes:
      model, lr: as in `Summary`; the rate is that of the least mean loss.
      slice: the range.
      nll: nats a token, mean over seeds.
      low, high: the least and the greatest of the seeds.
      row: a row of the best rate.
    """

    model: str
    slice: str
    lr: float
    nll: float
    low: float
    high: float
    row: dict[str, Any]


def model_name(run: str) -> str:
    """A run's name without its learning rate, its seed and what models were made equal in."""
    return re.sub(r",?\b(lr|seed|matched)=[^,/]*", "", run).strip(",") or "model"


def summarise(
    rows: Sequence[dict[str, Any]], rates: Mapping[str, float] | None = None
) -> list[Summary]:
    """One summary for each model, eval and slice with finished runs, in the order of the rows.

    A failed run is one of each slice that its model was scored on. `rates` of models, where given,
    take the place of the best ones.

    Raises:
      UserError: two runs of one model with the same rate and seed.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        if row["status"] == "done" and row.get("recall") is not None:
            groups[model_name(row["run"]), row["eval"], row["slice"]].append(row)
    for row in failed_runs(rows):
        for (model, eval_name, _), found in groups.items():
            if (model, eval_name) == (model_name(row["run"]), row["eval"]):
                found.append({**row, "recall": 0.0})
    chosen = _best_rates(groups) if rates is None else rates
    # A model that was scored on kinds of answers alone has the best rate of each.
    return [_summary(*key, found, chosen.get(key[0])) for key, found in groups.items()]


def losses(rows: Sequence[dict[str, Any]]) -> list[Loss]:
    """One loss for each model in the eval `ppl`, in the order of the rows.

    A rate at which a run failed is none to choose, and neither is a model without another.
    """
    models: dict[str, dict[float, list[dict[str, Any]]]] = {}
    text = [row for row in rows if (row["status"], row["eval"]) == ("done", LOSS_EVAL)]
    last = max((row["slice"] for row in text), key=lambda name: int(name.split("-")[0]), default="")
    failed = {(model_name(row["run"]), row["lr"]) for row in failed_runs(rows)}
    for row in text:
        if row["slice"] == last and (model_name(row["run"]), row["lr"]) not in failed:
            rates = models.setdefault(model_name(row["run"]), {})
            rates.setdefault(row["lr"], []).append(row)
    found = []
    for model, rates in models.items():
        seeds = {lr: [row["nll"] for row in of_rate] for lr, of_rate in rates.items()}
        lr = min(seeds, key=lambda lr: float(np.mean(seeds[lr])))
        nll, low, high = float(np.mean(seeds[lr])), min(seeds[lr]), max(seeds[lr])
        found.append(Loss(model, last, lr, nll, low, high, rates[lr][0]))
    return found


def mean_over_slices(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a finished run, the mean over its slices of all evals given, and the rows of others.

    Kinds of answers ("slice/kind") are left out. What is no mean is that of the longest slice: the
    bytes of the state, say. Slices have examples of their own, so errors add in squares.

    Raises:
      UserError: a run lacks a slice that another of its task has.
    """
    runs = collections.defaultdict(list)
    for row in rows:
        if row["status"] == "done" and "/" not in row["slice"]:
            runs[row["run"]].append(row)
    most = {found[0].get("task"): found for found in sorted(runs.values(), key=len)}
    means = []
    for run, found in runs.items():
        lacking = {row["slice"] for row in most[found[0].get("task")]}
        lacking -= {row["slice"] for row in found}
        check(
            not lacking,
            f"run '{run}' has no result on {', '.join(sorted(lacking))}, which others have, so its "
            "mean would be of something else; evaluate it there too (eval.py), or leave it out.",
        )
        mean = dict(max(found, key=lambda row: row.get("length", 0)))
        for name in ("recall", "chance", "cheater", "nll"):
            values = [row[name] for row in found if row.get(name) is not None]
            mean |= {name: float(np.mean(values))} if values else {}
        errors = [row.get("error") or 0.0 for row in found]
        mean["error"] = float(np.linalg.norm(errors)) / len(errors)
        means.append(mean | {"eval": found[0]["eval"], "slice": ALL_SLICES})
    return means + [row for row in rows if row["status"] != "done"]


def _best_rates(groups: dict[tuple[str, str, str], list[dict[str, Any]]]) -> dict[str, float]:
    """Model -> its rate, one at which a run has finished."""
    scores: dict[str, dict[float, list[float]]] = collections.defaultdict(dict)
    first: dict[str, str] = {}
    for (model, eval_name, slice_name), rows in groups.items():
        if first.setdefault(model, eval_name) != eval_name or "/" in slice_name:
            continue
        for row in sorted(rows, key=lambda row: (row["status"] != "done", row["lr"])):
            if row["status"] == "done" or row["lr"] in scores[model]:
                scores[model].setdefault(row["lr"], []).append(row["recall"])
    return {
        model: max(of_rates, key=lambda lr: float(np.mean(of_rates[lr])))
        for model, of_rates in scores.items()
    }


def failed_runs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of runs that failed in training, not of those whose config could not even be read."""
    return [row for row in rows if row["status"].startswith("failed") and row.get("lr") is not None]


def _summary(
    model: str, eval_name: str, slice_name: str, rows: list[dict[str, Any]], rate: float | None
) -> Summary:
    scores: dict[float, list[float]] = collections.defaultdict(list)
    errors: dict[float, list[float]] = collections.defaultdict(list)
    seen = set()
    for row in sorted(rows, key=lambda row: (row["lr"], row["seed"])):
        place = (row["lr"], row["seed"])
        check(
            place not in seen,
            f"two runs of '{model}' have the learning rate {row['lr']} and the seed {row['seed']}; "
            "name what else they differ in, or leave one of them out.",
        )
        seen.add(place)
        scores[row["lr"]].append(row["recall"])
        errors[row["lr"]].append(row.get("error") or 0.0)
    finished = [row for row in rows if row["status"] == "done"]
    rates: list[float] = sorted({row["lr"] for row in finished})
    # An eval that was run later, by hand, may lack the runs of the model's rate.
    if rate is None or rate not in rates:
        rate = max(rates, key=lambda lr: float(np.mean(scores[lr])))
    at_best = [row for row in finished if row["lr"] == rate]
    losses = [row["nll"] for row in at_best if row.get("nll") is not None]
    low, high = interval(scores[rate], errors[rate])
    return Summary(
        model,
        eval_name,
        slice_name,
        rate,
        float(np.mean(scores[rate])),
        low,
        high,
        robustness({lr: float(np.mean(found)) for lr, found in scores.items()}),
        dict(scores),
        float(np.mean(losses)) if losses else None,
        at_best[0],
    )


def interval(scores: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean over seeds: seeds drawn with replacement, each with its own error.

    Args:
      scores: one a seed.
      errors: their standard errors over examples.
    """
    rng = np.random.default_rng(0)
    pick_RS = rng.integers(len(scores), size=(RESAMPLES, len(scores)))
    noise_RS = rng.standard_normal(pick_RS.shape)
    drawn_RS = np.asarray(scores)[pick_RS] + np.asarray(errors)[pick_RS] * noise_RS
    low, high = np.percentile(drawn_RS.mean(axis=1), [2.5, 97.5])
    return float(np.clip(low, 0, 1)), float(np.clip(high, 0, 1))


def robustness(means: dict[float, float]) -> float:
    """Area under the means over log(rate), divided by the range of it."""
    rates = sorted(means)
    logs = np.log([float(rate) for rate in rates])
    values = np.array([means[rate] for rate in rates])
    if len(rates) == 1:
        return float(values[0])
    widths = np.diff(logs)
    return float((widths * (values[1:] + values[:-1]) / 2).sum() / widths.sum())


def bootstrap_error(right_N: np.ndarray, asked_N: np.ndarray, resamples: int = 200) -> float:
    """Standard error of the share of right answers, by drawing examples with replacement.

    Args:
      right_N: right answers of each example.
      asked_N: answers of each example.
    """
    rng = np.random.default_rng(0)
    count = len(asked_N)
    weight_RN = rng.multinomial(count, np.full(count, 1 / count), size=resamples)
    return float(np.std((weight_RN @ right_N) / (weight_RN @ asked_N)))


@functools.cache
def best_cheater(task: TaskConfig, part: Slice) -> float:
    """What the best of a task's cheaters scores on a slice, learnt from training examples of it.

    Of MQAR one more: the value of the pair that a place mostly asks for.
    """
    rng = stream(task.test_seed, CHEATER_STREAM, part.length, part.pairs)
    seen = slice_batch(task, part, HostDraws(rng), CHEATER_ROWS, part.length)
    batch = eval_rows(task, part, part.length)
    guesses = Habits.fit(seen).guesses(batch)
    found = [guesses[name] for name in task.CHEATERS]
    if isinstance(task, MQARConfig):
        found.append(PairPlaces.fit(seen).by_position(batch))
    return max(accuracy(guess, batch["targets"]) for guess in found)

"""Claims about a sweep's results, and whether they hold."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fastweights import analysis, evals
from fastweights.errors import check

ALL = analysis.ALL_SLICES


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a config of configs/recall/ expects of its runs.

    Attributes:
      runs: how the runs' names begin, up to learning rate and seed.
      slice: which slice of the eval; `ALL` for the mean over all slices of it.
      low, high: the range that the score must lie in.
      source: who found so.
      eval: which eval's rows, or of several, "recall,length".
      over: "each": every seed on its own lies in the range, at the rate of the best mean; "mean":
        their mean there does, which is right for a published number; "best": the mean of every
        seed's own best rate does, which is right for one published as the best of some rates, a
        run each.
    """

    measure: ClassVar[str] = "recall"

    runs: str
    slice: str
    low: float = 0.0
    high: float = 1.0
    source: str = ""
    eval: str = "recall"
    over: str = "each"

    def __post_init__(self):
        check(
            0 <= self.low <= self.high <= 1 and self.over in ("each", "mean", "best"),
            f"the claim on '{self.runs}' is {self.low} to {self.high} over {self.over}; give a "
            "range inside 0 to 1, over 'each' seed, their 'mean' or the 'best' of each.",
        )

    @property
    def expected(self) -> str:
        if self.low == 0:
            return f"<= {self.high:g}"
        return f">= {self.low:g}" if self.high == 1 else f"{self.low:.2f} to {self.high:.2f}"


@dataclasses.dataclass(frozen=True)
class Order:
    """The claim that one model does better than another, each at its best rate, mean over seeds.

    Attributes:
      runs, other: how the runs' names begin, of the better and of the worse.
      slice, source, eval: as in `Claim`.
      by: how much better at least; below 0 for one that is as good up to that much.
      apart: how much better at most, for a claim that the two are alike.
      least: what the better recalls at least; two that learnt nothing are as good as each other.
      measure: "recall", or "nll", of which less is better.
    """

    runs: str
    other: str
    slice: str
    by: float = 0.0
    source: str = ""
    eval: str = "recall"
    measure: str = "recall"
    apart: float = math.inf
    least: float = 0.0

    def __post_init__(self):
        check(
            self.by <= self.apart,
            f"the order of '{self.runs}' and '{self.other}' wants {self.by} to {self.apart}; give "
            "a range.",
        )
        check(
            self.measure in ("recall", "nll"),
            f"the order of '{self.runs}' and '{self.other}' is by '{self.measure}'; give recall or "
            "nll.",
        )

    @property
    def expected(self) -> str:
        most = f" to {self.apart:g}" if self.apart < math.inf else ""
        floor = f", and >= {self.least:g}" if self.least else ""
        return f"{self.measure} better than {self.other} by {self.by:g}{most}{floor}"


def published(runs: str, slice: str, value: float, *, within: float, source: str) -> Claim:
    """The claim that the mean over seeds meets a published number."""
    low, high = max(value - within, 0.0), min(value + within, 1.0)
    return Claim(runs, slice, low, high, source, over="mean")


def mean_of_slices(
    runs: str, value: float, *, within: float, source: str, over: str = "mean"
) -> Claim:
    """The same of the mean over all slices, those longer than a training row among them."""
    claim = published(runs, ALL, value, within=within, source=source)
    return dataclasses.replace(claim, eval="recall,length", over=over)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A claim and what became of it.

    Attributes:
      scores: one a seed, at the best rate or its own.
      others: in an order, those of the other.
    """

    claim: Claim | Order
    scores: tuple[float, ...]
    chance: float
    holds: bool
    note: str = ""
    others: tuple[float, ...] = ()


def measured(run: str, slice: str, score: float, *, chance: float, seed: int) -> dict[str, Any]:
    """A row as collect gives it, of something that needed no training."""
    return {
        "run": run, "status": "done", "eval": "recall", "slice": slice, "lr": 0.0, "seed": seed,
        "recall": score, "chance": chance,
    }  # fmt: skip


def judge(claim: Claim | Order, rows: Sequence[dict[str, Any]]) -> Verdict:
    """Looks the claim up in collect's rows.

    The learning rate is the one of the best mean over seeds. A run that is missing, unfinished or
    failed speaks against the claim, at whichever rate.
    """
    scores, chance, note = _scores(claim, claim.runs, rows)
    if not scores:
        return Verdict(claim, (), float("nan"), False, note)
    if isinstance(claim, Claim):
        judged = scores if claim.over == "each" else [float(np.mean(scores))]
        holds = all(claim.low <= score <= claim.high for score in judged)
        return Verdict(claim, tuple(scores), chance, holds)
    others, _, note = _scores(claim, claim.other, rows)
    if not others:
        return Verdict(claim, (), float("nan"), False, note)
    mean, other = float(np.mean(scores)), float(np.mean(others))
    gain = mean - other if claim.measure == "recall" else other - mean
    note = f"{mean:.3f} against {other:.3f}"
    holds = claim.by <= gain <= claim.apart and (claim.measure != "recall" or mean >= claim.least)
    return Verdict(claim, tuple(scores), chance, holds, note, tuple(others))


def _scores(
    claim: Claim | Order, runs: str, rows: Sequence[dict[str, Any]]
) -> tuple[list[float], float, str]:
    """One score a seed at the best rate, or at its own, and chance; or none and why not."""
    mine = [row for row in rows if _begins(row["run"], runs)]
    names = evals.split_names(claim.eval)
    lacking = [row for row in mine if row["eval"] in names and row["status"] != "done"]
    if not mine or lacking:
        note = f"{lacking[0]['run']} {lacking[0]['status']}" if lacking else "no such run"
        return [], float("nan"), note
    found = _rows_of(claim, mine)
    if not found:
        return [], float("nan"), f"no slice {claim.slice} in {claim.eval}"
    best = max if claim.measure == "recall" else min
    own = isinstance(claim, Claim) and claim.over == "best"
    groups = collections.defaultdict(list)
    for row in sorted(found, key=lambda row: row["seed"]):
        groups[row["seed" if own else "lr"]].append(row[claim.measure])
    if own:
        scores = [best(values) for values in groups.values()]
    else:
        scores = best(groups.values(), key=lambda values: float(np.mean(values)))
    return scores, found[0].get("chance", float("nan")), ""


def _rows_of(claim: Claim | Order, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the claim's slice; for `ALL` one a run, with its means over slices."""
    names = evals.split_names(claim.eval)
    mine = [row for row in rows if row["eval"] in names and row.get(claim.measure) is not None]
    if claim.slice != ALL:
        return [row for row in mine if row["slice"] == claim.slice]
    return analysis.mean_over_slices(mine)


def _begins(run: str, start: str) -> bool:
    name = run.rsplit("/", 1)[-1]
    return name == start or name.startswith(start + ",")

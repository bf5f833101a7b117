"""What scripts/report.py and scripts/plot.py draw, from the summaries of a sweep."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastweights.analysis import Loss, Summary

Rows = Sequence[dict[str, Any]]
PLACES = {
    "state_bytes": "state of one sequence (bytes)",
    "attention_share": "share of attention layers",
    "length": "length asked (tokens)",
}
CHANCE = {"color": "grey", "label": "chance"}
# More models than there are colours: each colour comes again with another mark.
plt.rcParams["axes.prop_cycle"] = cycler(marker=["o", "s", "^"]) * plt.rcParams["axes.prop_cycle"]


def _by(summaries: Sequence[Summary], key: Callable[[Summary], Any]) -> dict[Any, list[Summary]]:
    found = collections.defaultdict(list)
    for summary in summaries:
        found[key(summary)].append(summary)
    return dict(found)


def model_of(summary: Summary) -> str:
    return summary.model


def pattern_of(summary: Summary) -> str:
    return summary.row["pattern"]


def scores_against(
    axes: Axes, summaries: Sequence[Summary], column: str, name: Callable[[Summary], str] = model_of
) -> None:
    """Scores with their intervals; those of one name are points of one line.

    Args:
      column: what they stand against: state_bytes, attention_share or length.
    """
    for label, found in _by(summaries, name).items():
        found = sorted(found, key=lambda s: s.row[column])
        places, scores = [s.row[column] for s in found], [s.score for s in found]
        axes.errorbar(places, scores, yerr=_spread(found), capsize=3, label=label)
    asked = list(dict.fromkeys(s.slice for s in summaries))
    axes.set_ylabel(f"recall, {asked[0]}" if len(asked) == 1 else "recall")
    axes.set_ylim(-0.03, 1.05)
    axes.grid(alpha=0.3)
    axes.set_xlabel(PLACES[column])
    if column == "state_bytes":
        axes.set_xscale("log")
    elif column == "length":
        lengths = sorted({s.row["length"] for s in summaries})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])


def scores_by_model(summaries: Sequence[Summary]) -> Figure:
    """A model a line, with its interval and what a guess scores."""
    size = (8, 1.2 + 0.4 * len(summaries))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    places, scores = range(len(summaries)), [s.score for s in summaries]
    axes.errorbar(scores, places, xerr=_spread(summaries), capsize=3, linestyle="")
    axes.plot([s.row["chance"] for s in summaries], places, "|", markersize=14, **CHANCE)
    axes.set_yticks(places, [s.model for s in summaries])
    axes.invert_yaxis()
    axes.set_xlabel(f"recall, {summaries[0].slice}")
    axes.set_xlim(-0.03, 1.05)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _spread(summaries: Sequence[Summary]) -> np.ndarray:
    """How far the interval reaches below and above each score."""
    scores = np.array([s.score for s in summaries])
    below, above = scores - [s.low for s in summaries], [s.high for s in summaries] - scores
    # The mean of equal scores can round to just outside their interval.
    return np.maximum([below, above], 0.0)


def chance_against(axes: Axes, summaries: Sequence[Summary], column: str) -> None:
    """What a guess scores: a line, or a mark at each place where it is not the same for all."""
    chance = {(s.row[column], s.row["chance"]): None for s in summaries}
    if len({value for _, value in chance}) == 1:
        axes.axhline(summaries[0].row["chance"], linestyle=":", marker="", **CHANCE)
    else:
        places, values = zip(*chance, strict=True)
        axes.plot(places, values, "_", markersize=14, **CHANCE)


def losses_against_attention(axes: Axes, losses: Sequence[Loss]) -> None:
    """Loss on text; the axis reaches a tenth beyond the values, or noise would look like much."""
    for loss in losses:
        spread = [[loss.nll - loss.low], [loss.high - loss.nll]]
        axes.errorbar(
            loss.row["attention_share"], loss.nll, yerr=spread, capsize=3, label=loss.model
        )
    axes.set_xlabel("share of attention layers")
    axes.set_ylabel(f"loss on text, tokens {losses[0].slice} (nats)")
    axes.set_ylim(0.9 * min(s.low for s in losses), 1.1 * max(s.high for s in losses))
    axes.grid(alpha=0.3)


def beside(axes: Axes) -> None:
    """The legend beside the axes, where long names of models hide nothing."""
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def accuracy_against_state(summaries: Sequence[Summary]) -> Figure:
    """Recall of the hardest slice against the bytes that one sequence is kept in."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    scores_against(axes, summaries, "state_bytes")
    beside(axes)
    return figure


def accuracy_against_attention(summaries: Sequence[Summary]) -> Figure:
    """Recall, and loss at the answers, against the share of attention layers."""
    figure, (recall, loss) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    scores_against(recall, summaries, "attention_share")
    for summary in summaries:
        loss.plot(summary.row["attention_share"], summary.nll, label=summary.model)
    loss.set_xlabel("share of attention layers")
    loss.set_ylabel("loss at the answers (nats)")
    loss.grid(alpha=0.3)
    beside(loss)
    return figure


def text_loss(losses: Sequence[Loss]) -> Figure:
    """Loss on held-out text against the share of attention layers."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    losses_against_attention(axes, losses)
    beside(axes)
    return figure


def heat_maps(summaries: Sequence[Summary]) -> Figure:
    """Recall by number of pairs and length, one map a model."""
    models = _by(summaries, lambda s: s.model)
    across = min(len(models), 4)
    down = -(-len(models) // across)
    size = (3.2 * across, 2.8 * down)
    figure, grid = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    lengths = sorted({s.row["length"] for s in summaries})
    pairs = sorted({s.row["pairs"] for s in summaries})
    for axes in grid.flat[len(models) :]:
        axes.set_visible(False)
    for axes, (model, found) in zip(grid.flat, models.items(), strict=False):
        values = np.full((len(pairs), len(lengths)), np.nan)
        for s in found:
            values[pairs.index(s.row["pairs"]), lengths.index(s.row["length"])] = s.score
        axes.imshow(values, vmin=0, vmax=1, origin="lower", aspect="auto", cmap="viridis")
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "black" if value > 0.6 else "white"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(range(len(pairs)), [str(count) for count in pairs])
        axes.set_xlabel("length")
        axes.set_ylabel("pairs")
        axes.set_title(model, fontsize=8)
    return figure


def rate_robustness(summaries: Sequence[Summary]) -> Figure:
    """Mean recall over seeds against the learning rate; the area under it in the legend."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for s in summaries:
        rates = sorted(s.scores)
        means = [float(np.mean(s.scores[rate])) for rate in rates]
        axes.plot(rates, means, label=f"{s.model} ({s.robustness:.2f})")
    tried = sorted({rate for s in summaries for rate in s.scores})
    axes.set_xscale("log")
    axes.set_xticks(tried, [f"{rate:g}" for rate in tried])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(f"recall on {summaries[0].slice}")
    axes.grid(alpha=0.3)
    beside(axes)
    return figure


def steps_to_threshold(rows: Rows, names: Callable[[str], str]) -> Figure:
    """Steps until 90 % of the answers were right in an eval in training, a point a run."""
    found = collections.defaultdict(list)
    for row in rows:
        if row.get("steps_to_90"):
            found[names(row["run"])].append((row["run"], row["steps_to_90"]))
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.4 * len(found)), layout="constrained")
    for place, (_, runs) in enumerate(found.items()):
        steps = sorted(set(runs))
        axes.plot([step for _, step in steps], [place] * len(steps), "o", alpha=0.6)
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.set_xlabel("steps to 90 % recall")
    axes.set_ylim(-0.5, len(found) - 0.5)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    return figure

"""Draws recall against attention share and state bytes, or length, or model, from collect's CSV.

    python scripts/plot.py ratio.csv --out ratio.png [--slice T64_K16] [--without repeat=1]
    python scripts/plot.py niah.csv --out niah.png --against length

Each model (runs that differ in learning rate and seed alone) stands at the rate of its best mean
over slices and seeds; the point is the mean over seeds and the bar its 95 % interval over seeds
and examples; a failed run counts as 0. Models of one pattern and several sizes are joined by a
line. `--slice mean` draws the mean over all slices of the table. Where the table has losses on text
too (collect's `--eval recall,ppl`), they stand beside the recall, against the attention share.

`--against length` draws a line a model over the lengths that it was asked at, each at one number of
pairs; `--against model` stands models side by side that differ in neither share nor state.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import collect
import figures
from fastweights import analysis, cli, files
from fastweights.analysis import Loss, Summary
from fastweights.errors import UserError, check

COLUMNS = (
    "run", "status", "pattern", "eval", "slice", "pairs", "length", "lr", "seed", "recall",
    "attention_share", "state_bytes", "chance",
)  # fmt: skip
PLACE = ("attention_share", "state_bytes")
DRAWN = collect.needs((*PLACE, "pattern", "length", "pairs", "chance"), PLACE)
MEAN = "mean"
# What models stand against -> what the figure calls them.
AGAINST = {"size": figures.pattern_of, "length": figures.model_of, "model": figures.model_of}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("table", type=pathlib.Path, help="CSV from scripts/collect.py")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="PNG, SVG or PDF")
    parser.add_argument(
        "--slice", help=f"slice to draw, or {MEAN} (default: the one with most pairs)"
    )
    parser.add_argument(
        "--without", nargs="+", default=(), help="leave out runs whose name has one of these in it"
    )
    parser.add_argument("--against", choices=AGAINST, default="size", help="(default: size)")
    args = parser.parse_args(argv)
    points, losses = read_points(args.table, args.slice, args.without, args.against)
    draw(points, losses, args.out, args.against)
    name = AGAINST[args.against]
    for point in sorted(points, key=lambda point: -point.score):
        print(
            f"{name(point):>9}  {point.slice}  share {point.row['attention_share']:.3f}  "
            f"state {point.row['state_bytes']:>9,} B  recall {point.score:.3f} "
            f"({point.low:.3f} to {point.high:.3f}, {point.seeds} seeds, lr {point.lr:g})"
        )
    for loss in sorted(losses, key=lambda loss: loss.nll):
        print(
            f"{loss.row['pattern']:>9}  share {loss.row['attention_share']:.3f}  "
            f"loss {loss.nll:.4f} ({loss.low:.4f} to {loss.high:.4f}, lr {loss.lr:g})"
        )
    return 0


def read_points(
    table: pathlib.Path,
    name: str | None = None,
    without: Sequence[str] = (),
    against: str = "size",
) -> tuple[list[Summary], list[Loss]]:
    """One summary a model, on the slice `name`, of the runs whose name has none of `without`.

    Against length, one for each slice; against size, beside them the losses on text, if the table
    has such.

    Raises:
      UserError: the table is none of collect's, no run in it finished, no such slice or name, two
        models that stand on one spot under one label, or one slice asked for against length.
    """
    rows = collect.read_rows(table, COLUMNS)
    for text in without:
        kept = [row for row in rows if text not in row["run"]]
        check(len(kept) < len(rows), f"--without '{text}' is in no run's name in '{table}'.")
        rows = kept
    check(bool(rows), f"--without leaves no run of '{table}'; leave fewer out.")
    others = sorted({row["eval"] for row in rows} - set(DRAWN))
    check(
        not others,
        f"'{table}' has rows of the eval {', '.join(others)}, which are not drawn; gather "
        f"{', '.join(DRAWN)} alone (scripts/collect.py --eval).",
    )
    collect.check_cells(table, rows, DRAWN)
    losses = analysis.losses(rows)
    rows = [row for row in rows if row["eval"] != analysis.LOSS_EVAL]
    done = [row for row in rows if row["status"] == "done"]
    check(
        bool(done) or not losses,
        f"'{table}' has losses on text and no recall; gather both with scripts/collect.py --eval "
        "recall,ppl.",
    )
    check(
        bool(done),
        f"'{table}' has no finished run (no row of status 'done'); see its status column.",
    )
    if against == "length":
        check(
            name is None,
            f"--against length draws every slice; leave --slice {name} out.",
        )
        points = [s for s in analysis.summarise(rows) if "/" not in s.slice]
    else:
        points = on_slice(rows, name)
    check_apart(points, against)
    return points, losses if against == "size" else []


def on_slice(rows: Sequence[dict[str, Any]], name: str | None) -> list[Summary]:
    """The summaries on one slice, by default that with most pairs, of these the longest."""
    done = [row for row in rows if row["status"] == "done"]
    known = sorted({row["slice"] for row in done})
    if name == MEAN:
        rows, name = analysis.mean_over_slices(rows), analysis.ALL_SLICES
    else:
        name = name or max(done, key=lambda row: (row["pairs"], row["length"]))["slice"]
        check(name in known, f"slice '{name}' is not in the table; it has {', '.join(known)}.")
    return [point for point in analysis.summarise(rows) if point.slice == name]


def check_apart(points: Sequence[Summary], against: str) -> None:
    """Checks that no two points would be taken for each other.

    Raises:
      UserError: two are.
    """
    spots: dict[tuple[str, int], Summary] = {}
    for point in points:
        if against == "size":
            spot = (figures.pattern_of(point), point.row["state_bytes"])
            told = (
                "have the same pattern and state, and what else they differ in the figure does not "
                "show; leave one of them out (--without), or draw them --against model."
            )
        else:
            spot = (point.model, point.row["length"])
            told = "have one length; draw one slice (--slice), against something else."
        other = spots.setdefault(spot, point)
        if other is point:
            continue
        names = other.model, point.model
        if names[0] == names[1]:
            names = (f"{other.model} on {other.slice}", f"{point.model} on {point.slice}")
        if names[0] == names[1]:
            told = f"are in the evals {other.eval} and {point.eval}; gather one of them."
        raise UserError(f"'{names[0]}' and '{names[1]}' {told}")


def draw(
    points: Sequence[Summary], losses: Sequence[Loss], out: pathlib.Path, against: str = "size"
) -> None:
    """The figure of `against`, saved."""
    if against == "model":
        figure = figures.scores_by_model(points)
    elif against == "length":
        figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
        figures.scores_against(axes, points, "length")
        figures.chance_against(axes, points, "length")
        figures.beside(axes)
    else:
        figure = draw_sizes(points, losses)
    try:
        files.save_figure(figure, out)
    finally:
        plt.close(figure)


def draw_sizes(points: Sequence[Summary], losses: Sequence[Loss]) -> Figure:
    """Recall against state bytes (log), and where no pattern has two sizes against its share."""
    columns = ["state_bytes"]
    if len({figures.pattern_of(point) for point in points}) == len(points):
        columns.insert(0, "attention_share")
    count = len(columns) + bool(losses)
    size = (7, 4.5) if count == 1 else (5 * count, 4)
    figure, grid = plt.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
    panels = list(grid[0])
    if losses:
        figures.losses_against_attention(panels.pop(1), losses)
    for axes, column in zip(panels, columns, strict=True):
        figures.scores_against(axes, points, column, figures.pattern_of)
        figures.chance_against(axes, points, column)
        axes.legend()
    return figure


if __name__ == "__main__":
    cli.run(main)

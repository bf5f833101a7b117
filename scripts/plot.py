"""Draws recall against attention share and against state bytes from collect's CSV.

    python scripts/plot.py ratio.csv --out ratio.png [--slice T64_K16] [--without repeat=1]

Each model (runs that differ in learning rate and seed alone) stands at the rate of its best mean
over slices and seeds; the point is the mean over seeds and the bar its 95 % interval over seeds
and examples; a failed run counts as 0. Models of one pattern and several sizes are joined by a
line. `--slice mean` draws the mean over all slices of the table.
"""

import argparse
import collections
import pathlib
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import collect
from fastweights import analysis, cli, files
from fastweights.analysis import Summary
from fastweights.errors import check

COLUMNS = (
    "run", "status", "pattern", "eval", "slice", "pairs", "length", "lr", "seed", "recall",
    "attention_share", "state_bytes", "chance",
)  # fmt: skip
MEAN = "mean"


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
    args = parser.parse_args(argv)
    points = read_points(args.table, args.slice, args.without)
    draw(points, args.out)
    for point in sorted(points, key=lambda point: -point.score):
        print(
            f"{point.row['pattern']:>9}  share {point.row['attention_share']:.3f}  "
            f"state {point.row['state_bytes']:>9,} B  recall {point.score:.3f} "
            f"({point.low:.3f} to {point.high:.3f}, {point.seeds} seeds, lr {point.lr:g})"
        )
    return 0


def read_points(
    table: pathlib.Path, name: str | None = None, without: Sequence[str] = ()
) -> list[Summary]:
    """One summary a model, on the slice `name`, of the runs whose name has none of `without`.

    Raises:
      UserError: the table is none of collect's, no run in it finished, no such slice or name, or
        two models that stand on one spot under one label.
    """
    rows = collect.read_rows(table, COLUMNS)
    for text in without:
        kept = [row for row in rows if text not in row["run"]]
        check(len(kept) < len(rows), f"--without '{text}' is in no run's name in '{table}'.")
        rows = kept
    done = [row for row in rows if row["status"] == "done"]
    check(
        bool(done),
        f"'{table}' has no finished run (no row of status 'done'); see its status column.",
    )
    for row in done:
        for column in COLUMNS:
            check(
                column in row,
                f"run '{row['run']}' has no {column} in the table; leave its rows out, or make the "
                "table with scripts/collect.py --eval recall.",
            )
    known = sorted({row["slice"] for row in done})
    if name == MEAN:
        rows, name = analysis.mean_over_slices(rows), analysis.ALL_SLICES
    else:
        name = name or max(done, key=lambda row: (row["pairs"], row["length"]))["slice"]
        check(name in known, f"slice '{name}' is not in the table; it has {', '.join(known)}.")
    points = [point for point in analysis.summarise(rows) if point.slice == name]
    spots: dict[tuple[str, int], str] = {}
    for point in points:
        spot = (point.row["pattern"], point.row["state_bytes"])
        check(
            spot not in spots,
            f"'{spots.get(spot)}' and '{point.model}' have the same pattern and state, and what "
            "else they differ in the figure does not show; leave one of them out (--without).",
        )
        spots[spot] = point.model
    return points


def draw(points: Sequence[Summary], out: pathlib.Path) -> None:
    """Recall against state bytes (log), and where no pattern has two sizes against its share."""
    patterns = collections.defaultdict(list)
    for point in points:
        patterns[point.row["pattern"]].append(point)
    both = all(len(found) == 1 for found in patterns.values())
    size = (10, 4) if both else (7, 4.5)
    figure, grid = plt.subplots(
        1, 1 + both, figsize=size, sharey=True, layout="constrained", squeeze=False
    )
    for axes, column in zip(grid[0], ("attention_share", "state_bytes")[1 - both :], strict=True):
        draw_panel(axes, list(patterns.values()), column)
    grid[0, 0].set_ylabel(f"recall, {points[0].slice}")
    try:
        files.save_figure(figure, out)
    finally:
        plt.close(figure)


def draw_panel(axes: Axes, patterns: Sequence[Sequence[Summary]], column: str) -> None:
    for found in patterns:
        points = sorted(found, key=lambda point: point.row[column])
        # The mean of equal scores can round to just outside them; a bar has no negative length.
        spread = [
            [max(point.score - point.low, 0.0) for point in points],
            [max(point.high - point.score, 0.0) for point in points],
        ]
        axes.errorbar(
            [point.row[column] for point in points],
            [point.score for point in points],
            yerr=spread,
            fmt="o-",
            capsize=3,
            label=points[0].row["pattern"],
        )
    axes.axhline(patterns[0][0].row["chance"], color="grey", linestyle=":", label="chance")
    if column == "state_bytes":
        axes.set_xscale("log")
        axes.set_xlabel("state of one sequence (bytes)")
    else:
        axes.set_xlabel("share of attention layers")
    axes.set_ylim(0, 1.05)
    axes.legend()
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    cli.run(main)

"""Draws recall against attention share and against state bytes from collect's CSV.

    python scripts/plot.py ratio.csv --out ratio.png [--slice T64_K16] [--without repeat=1]

Each model (runs that differ in learning rate and seed alone) stands at the rate of its best mean
over slices and seeds; the point is the mean over seeds and the bar its 95 % interval over seeds
and examples; a failed run counts as 0. Models of one pattern and several sizes are joined by a
line. `--slice mean` draws the mean over all slices of the table. Where the table has losses on text
too (collect's `--eval recall,ppl`), they stand beside the recall, against the attention share.
"""

import argparse
import pathlib
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

import collect
import figures
from fastweights import analysis, cli, files
from fastweights.analysis import Loss, Summary
from fastweights.errors import check

COLUMNS = (
    "run", "status", "pattern", "eval", "slice", "pairs", "length", "lr", "seed", "recall",
    "attention_share", "state_bytes", "chance",
)  # fmt: skip
PLACE = ("attention_share", "state_bytes")
DRAWN = collect.needs((*PLACE, "pattern", "length", "pairs", "chance"), PLACE)
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
    points, losses = read_points(args.table, args.slice, args.without)
    draw(points, losses, args.out)
    for point in sorted(points, key=lambda point: -point.score):
        print(
            f"{point.row['pattern']:>9}  share {point.row['attention_share']:.3f}  "
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
    table: pathlib.Path, name: str | None = None, without: Sequence[str] = ()
) -> tuple[list[Summary], list[Loss]]:
    """One summary a model, on the slice `name`, of the runs whose name has none of `without`.

    Beside them the losses on text, if the table has such.

    Raises:
      UserError: the table is none of collect's, no run in it finished, no such slice or name, or
        two models that stand on one spot under one label.
    """
    rows = collect.read_rows(table, COLUMNS)
    for text in without:
        kept = [row for row in rows if text not in row["run"]]
        check(len(kept) < len(rows), f"--without '{text}' is in no run's name in '{table}'.")
        rows = kept
    check(bool(rows), f"--without leaves no run of '{table}'; leave fewer out.")
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
    return points, losses


def draw(points: Sequence[Summary], losses: Sequence[Loss], out: pathlib.Path) -> None:
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
        axes.axhline(points[0].row["chance"], color="grey", linestyle=":", label="chance")
        axes.legend()
    try:
        files.save_figure(figure, out)
    finally:
        plt.close(figure)


if __name__ == "__main__":
    cli.run(main)

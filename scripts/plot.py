"""Draws recall against attention share and against state bytes from collect's CSV.

    python scripts/plot.py ratio.csv --out ratio.png [--slice T64_K16]

Each pattern stands at the learning rate that is best for it in the mean over seeds; the point is
the mean over seeds and the bar reaches from the worst to the best seed; a failed run counts as 0.
"""

import argparse
import collections
import math
import pathlib
import re
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import collect
from fastweights import cli, files
from fastweights.errors import check

COLUMNS = (
    "run", "status", "pattern", "slice", "pairs", "length", "lr", "seed", "recall",
    "attention_share", "state_bytes", "chance",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("table", type=pathlib.Path, help="CSV from scripts/collect.py")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="PNG, SVG or PDF")
    parser.add_argument("--slice", help="slice to draw (default: the one with most pairs)")
    args = parser.parse_args(argv)
    points = best_points(read_rows(args.table), args.slice)
    draw(points, args.out)
    for point in sorted(points, key=lambda p: -p["recall"]):
        print(
            f"{point['pattern']:>9}  share {point['attention_share']:.3f}  "
            f"state {point['state_bytes']:>7,} B  recall {point['recall']:.3f} "
            f"({point['low']:.3f} to {point['high']:.3f}, {point['seeds']} seeds, "
            f"lr {point['lr']:g})"
        )
    return 0


def read_rows(table: pathlib.Path) -> list[dict[str, str]]:
    """The finished and failed rows of a CSV.

    Raises:
      UserError: no such file, no CSV, a column is missing, or no finished row in it.
    """
    rows = [
        row for row in collect.read_table(table, COLUMNS) if re.match("done$|failed", row["status"])
    ]
    check(
        any(row["status"] == "done" for row in rows),
        f"'{table}' has no finished run (no row of status 'done'); see its status column.",
    )
    return rows


def number(row: dict[str, str], column: str) -> float:
    """A cell as a finite number.

    Raises:
      UserError: it is none.
    """
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    check(
        math.isfinite(value),
        f"run '{row['run']}' has {column} '{row[column]}' in the table, which is no finite number; "
        "leave the row out, or make the table with scripts/collect.py --eval recall.",
    )
    return value


def best_points(rows: list[dict[str, str]], name: str | None) -> list[dict[str, Any]]:
    """One point a pattern, at its best learning rate, for the slice `name`.

    Raises:
      UserError: no such slice, a cell that is no number, or runs that differ in more than pattern,
        learning rate and seed, whose mean would say nothing.
    """
    finished = [row for row in rows if row["status"] == "done"]
    name = (
        name
        or max(finished, key=lambda row: (number(row, "pairs"), number(row, "length")))["slice"]
    )
    known = sorted({row["slice"] for row in finished})
    check(name in known, f"slice '{name}' is not in the table; it has {', '.join(known)}.")
    facts = {row["pattern"]: row for row in finished if row["slice"] == name}
    failed = {
        row["run"]: {**row, "recall": "0"}
        for row in rows
        if row["status"] != "done" and row["pattern"] in facts
    }
    seeds, runs = collections.defaultdict(list), {}
    for row in [*(row for row in finished if row["slice"] == name), *failed.values()]:
        place = (row["pattern"], number(row, "lr"), row["seed"])
        check(
            place not in runs,
            f"runs '{runs.get(place)}' and '{row['run']}' have the same pattern, lr and seed, "
            "and what else they differ in the figure does not show; leave one of them out.",
        )
        runs[place] = row["run"]
        seeds[row["pattern"], number(row, "lr")].append(number(row, "recall"))
    points = []
    for pattern, row in facts.items():
        lr = max(
            (lr for p, lr in seeds if p == pattern), key=lambda lr: np.mean(seeds[pattern, lr])
        )
        scores = seeds[pattern, lr]
        points.append(
            {
                "pattern": pattern,
                "attention_share": number(row, "attention_share"),
                "state_bytes": int(number(row, "state_bytes")),
                "lr": lr,
                "recall": float(np.mean(scores)),
                "low": min(scores),
                "high": max(scores),
                "seeds": len(scores),
                "slice": name,
                "chance": number(row, "chance"),
            }
        )
    return points


def draw(points: list[dict[str, Any]], out: pathlib.Path) -> None:
    """Two panels: recall against attention share, and against state bytes (log)."""
    figure, (share, state) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    draw_panel(share, points, "attention_share", "share of attention layers")
    draw_panel(state, points, "state_bytes", "state of one sequence (bytes)")
    state.set_xscale("log")
    share.set_ylabel(f"recall on {points[0]['slice']}")
    try:
        files.save_figure(figure, out)
    finally:
        plt.close(figure)


def draw_panel(axes: Axes, points: list[dict[str, Any]], key: str, label: str) -> None:
    for i, point in enumerate(points):
        # The mean of equal scores can round to just outside them; a bar has no negative length.
        below, above = point["recall"] - point["low"], point["high"] - point["recall"]
        spread = [[max(below, 0.0)], [max(above, 0.0)]]
        axes.errorbar(point[key], point["recall"], yerr=spread, fmt="o", capsize=3)
        # Points may coincide: every second label stands below.
        place = (6, 4 if i % 2 else -12)
        axes.annotate(
            point["pattern"], (point[key], point["recall"]), place, textcoords="offset points"
        )
    axes.axhline(points[0]["chance"], color="grey", linestyle=":", label="chance")
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.05)
    axes.legend(loc="center right")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    cli.run(main)

"""Trains a small hybrid and its purely recurrent twin on recall, and shows what attention buys.

    python scripts/demo.py --workdir runs/demo [--seed 0]

Two runs of configs/mqar.py, the table of their recall by slice, and a bar chart `recall.png`.
Started again it goes on where it stopped.
"""

import argparse
import pathlib
import subprocess
import sys
from typing import Any

import matplotlib

import collect

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from fastweights import cli
from fastweights.errors import check

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNS = {"hybrid": "GA", "recurrent": "GG"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="folder of both runs")
    parser.add_argument("--seed", type=int, default=0)
    args, overrides = cli.parse(parser, argv)
    for name, pattern in RUNS.items():
        print(f"\n--- {name}: pattern {pattern} ---", flush=True)
        command = [sys.executable, str(ROOT / "train.py")]
        command += ["--config", str(ROOT / f"configs/mqar.py:pattern={pattern}")]
        command += ["--workdir", str(args.workdir / name), f"--config.seed={args.seed}"]
        command += [f"--config.{field}" for field in overrides]
        code = subprocess.run(command).returncode
        check(code == 0, f"the run '{name}' ended with exit code {code}; its message is above.")

    rows = [row for name in RUNS for row in collect.collect(args.workdir / name, "recall")]
    print()
    show(rows)
    picture = args.workdir / "recall.png"
    draw(rows, picture)
    print(f"figure: {picture}")
    return 0


def label(row: dict[str, Any]) -> str:
    """`hybrid (GA)`: which of the two runs a row belongs to."""
    kind = "hybrid" if row["attention_share"] else "recurrent"
    return f"{kind} ({row['layers']})"


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Multi-query associative recall", title_justify="left")
    for column in ("model", "slice", "recall", "chance", "state bytes", "weights", "seconds"):
        left = column in ("model", "slice")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            label(row),
            row["slice"],
            f"{row['recall']:.3f}",
            f"{row['chance']:.3f}",
            f"{row['state_bytes']:,}",
            f"{row['parameters']:,}",
            f"{row['seconds']:.0f}",
        )
    Console(soft_wrap=True).print(table)


def draw(rows: list[dict[str, Any]], out: pathlib.Path) -> None:
    """Bars of recall by slice, one colour a model, a tick at chance."""
    slices = list(dict.fromkeys(row["slice"] for row in rows))
    models = list(dict.fromkeys(label(row) for row in rows))
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    width = 0.8 / len(models)
    for i, model in enumerate(models):
        scores = [row["recall"] for row in rows if label(row) == model]
        places = [place + (i - (len(models) - 1) / 2) * width for place in range(len(slices))]
        axes.bar_label(axes.bar(places, scores, width, label=model), fmt="%.2f")
    for place, name in enumerate(slices):
        chance = next(row["chance"] for row in rows if row["slice"] == name)
        axes.hlines(chance, place - 0.45, place + 0.45, color="black", linestyles=":")
    axes.hlines([], 0, 0, color="black", linestyles=":", label="chance")
    axes.set_xticks(range(len(slices)), slices)
    axes.set_ylim(0, 1.25)
    axes.set_ylabel("recall")
    axes.set_title("Accuracy on the queried values, by length (T) and pairs (K)")
    axes.legend(loc="upper center", ncols=3)
    figure.savefig(out, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    cli.run(main)

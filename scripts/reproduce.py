"""Runs a config of configs/recall/, compares its results with what it claims, and notes both.

    python scripts/reproduce.py cpu --workdir runs/recall [--jobs 2]
    python scripts/reproduce.py zoology --rows results/zoology_h200.csv

The second trains nothing: it judges runs that were made elsewhere, folders of them or CSVs of
scripts/collect.py. Started again the first goes on where it stopped. The table goes to the terminal
and, once every run has ended, with hardware, commit and date to the end of
results/REPRODUCTIONS.md; of runs made elsewhere, with what --made tells of that. The exit code is 1
unless all claims hold.
"""

import argparse
import os
import pathlib
import platform
import time
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

import collect
import sweep
from fastweights import cli, evals, reproduction, sweeps
from fastweights import config as config_lib
from fastweights.errors import check
from fastweights.reproduction import Verdict
from fastweights.training import run_folder

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "recall"
NOTES = ROOT / "results" / "REPRODUCTIONS.md"
NOT_RUN = "was not run"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.py")))
    parser.add_argument("name", help=f"one of: {known}")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--workdir", type=pathlib.Path, help="folder of the runs")
    where.add_argument("--rows", type=pathlib.Path, nargs="+", help="judge these, train nothing")
    parser.add_argument("--made", help="with --rows: date, hardware, commit, to note the table")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time")
    parser.add_argument(
        "--notes", type=pathlib.Path, default=NOTES, help="file to add the table to"
    )
    args, overrides = cli.parse(parser, argv)
    path = CONFIGS / f"{args.name}.py"
    check(path.is_file(), f"there is no reproduction '{args.name}'; known: {known}.")
    claims = config_lib.call_config_file(str(path), "claims", pass_arg=False)
    check(bool(claims), f"{path}: claims() yields none; yield one Claim for each number expected.")
    names = sorted({name for claim in claims for name in evals.split_names(claim.eval)})
    started = time.perf_counter()
    if args.rows:
        check(
            not overrides, f"--rows judges what is there and takes no overrides, got {overrides}."
        )
        rows = collect.gather(args.rows, ",".join(names))
    else:
        check(not args.made, f"--made '{args.made}' goes with --rows; this run tells by itself.")
        fields = [f"--config.{field}" for field in overrides]
        command = ["--config", str(path), "--workdir", str(args.workdir), "--jobs", str(args.jobs)]
        sweep.main([*command, *fields])
        rows = collect.collect(args.workdir, ",".join(names))
    rows += not_run(rows, sweeps.read_points(str(path), overrides), names)
    seconds = time.perf_counter() - started
    if config_lib.defines(str(path), "measurements"):
        rows += config_lib.call_config_file(str(path), "measurements", pass_arg=False)
    verdicts = [reproduction.judge(claim, rows) for claim in claims]
    show(verdicts)
    held = sum(verdict.holds for verdict in verdicts)
    print(f"{held} of {len(verdicts)} claims hold ({seconds:.0f} s in this start)")
    lacking = ("unfinished", NOT_RUN)
    ended = not any(row["status"].startswith(lacking) for row in rows)
    if args.made or (ended and not (args.rows or overrides)):
        args.notes.parent.mkdir(parents=True, exist_ok=True)
        with args.notes.open("a") as file:
            file.write(markdown(args.name, verdicts, rows, args.made or here()))
        print(f"noted in {args.notes}")
    return 0 if held == len(verdicts) else 1


def not_run(
    rows: list[dict], points: Sequence[sweeps.Point], names: Sequence[str]
) -> list[dict[str, str]]:
    """Rows of the sweep's points that have none."""
    there = {row["run"].rsplit("/", 1)[-1] for row in rows}
    missing = [point.name for point in points if point.name not in there]
    print(f"{len(points) - len(missing)} of {len(points)} runs are there")
    return [{"run": run, "status": NOT_RUN, "eval": name} for run in missing for name in names]


def show(verdicts: list[Verdict]) -> None:
    table = Table(title="claims", title_justify="left")
    for column in ("runs", "slice", "chance", "expected", "scores (one a seed)", ""):
        table.add_column(column)
    for verdict in verdicts:
        claim = verdict.claim
        outcome = "holds" if verdict.holds else "FAILS"
        told = (claim.runs, claim.slice, chance(verdict), claim.expected, scores(verdict), outcome)
        table.add_row(*told)
    Console(soft_wrap=True).print(table)


def chance(verdict: Verdict) -> str:
    return f"{verdict.chance:.3f}" if verdict.scores else "-"


def scores(verdict: Verdict) -> str:
    mine, others = (
        " ".join(f"{score:.3f}" for score in found) for found in (verdict.scores, verdict.others)
    )
    return f"{verdict.note} (seeds {mine} against {others})" if others else verdict.note or mine


def here() -> str:
    """Date, hardware and versions of this machine."""
    device = jax.devices()[0]
    where = (
        f"{jax.device_count()} x {device.device_kind}"
        if device.platform != "cpu"
        else (f"{os.cpu_count()} CPU cores ({platform.machine()})")
    )
    return (
        f"{time.strftime('%Y-%m-%d')}, {where}, commit {run_folder.git_commit()}, jax "
        f"{jax.__version__}"
    )


def markdown(name: str, verdicts: list[Verdict], rows: list[dict], made: str) -> str:
    """A section for the notes."""
    rows = [row for row in rows if row["status"] != NOT_RUN]
    training = sum({row["run"]: float(row.get("seconds") or 0.0) for row in rows}.values())
    lines = [
        f"\n## {name}: {made}\n",
        f"{sum(v.holds for v in verdicts)} of {len(verdicts)} claims hold; "
        f"{len({row['run'] for row in rows})} runs, {training:,.0f} s of training in all.\n",
        "| runs | slice | chance | expected | found (one a seed) | holds | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        claim = verdict.claim
        cells = (
            claim.runs, claim.slice, chance(verdict), claim.expected, scores(verdict),
            "yes" if verdict.holds else "**no**", claim.source,
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    cli.run(main)

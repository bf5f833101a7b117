"""Gathers finished and unfinished runs under a folder into one tidy CSV, a line a run and slice.

    python scripts/collect.py runs/ratio [--eval recall,length] > ratio.csv

A run without results of that eval gets one line, whose `status` says how far it came;
one whose files can't be read gets one line with the status "broken: ..." and the cause.

A sweep that was run on several machines is several folders; a CSV written earlier can stand in the
place of one, and of a run that is in two the later one counts:

    python scripts/collect.py monday.csv runs/ratio > tuesday.csv
"""

import argparse
import csv
import json
import math
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from fastweights import analysis, cli, evals, flops, pattern
from fastweights.config import Config
from fastweights.errors import UserError, check
from fastweights.tasks import TASKS, eval_slices
from fastweights.training import metrics, run_folder

COLUMNS = (
    "run", "status", "task", "pattern", "layers", "attention_share", "parameters", "state_bytes",
    "lr", "seed", "step", "seconds", "eval", "slice", "length", "pairs", "recall", "error",
    "whole", "chance", "cheater", "nll", "steps_to_90", "matched",
)  # fmt: skip
WHOLE_NUMBERS = ("parameters", "state_bytes", "seed", "step", "length", "pairs", "steps_to_90")
NUMBERS = (
    "attention_share", "lr", "seconds", "recall", "error", "whole", "chance", "cheater", "nll",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "sources",
        type=pathlib.Path,
        nargs="+",
        help="runs, folders of runs, or CSVs of this script",
    )
    parser.add_argument("--eval", default="recall", help="the evals whose rows to gather")
    args, rest = cli.parse(parser, argv)
    check(not rest, f"collect reads what is on disk and takes no overrides, got {rest}.")
    write_rows(gather(args.sources, args.eval), sys.stdout)
    return 0


def needs(scored: Sequence[str] = (), text: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Eval -> the columns that its finished rows must have: those that any reader takes, and more.

    Other evals have columns of their own.

    Args:
      scored: what is taken of rows of recall besides.
      text: what is taken of losses on text besides.
    """
    run = ("slice", "lr", "seed")
    recall = (*run, "recall", *scored)
    return {"recall": recall, "length": recall, analysis.LOSS_EVAL: (*run, "nll", *text)}


def collect(folder: pathlib.Path, names: str) -> list[dict[str, Any]]:
    """The CSV's rows, runs in order of their names and in each the evals in the order of `names`.

    Raises:
      UserError: no run in the folder.
    """
    marks = ("config.json", "FAILED")  # A run that could not start has the second alone.
    runs = sorted({path.parent for mark in marks for path in folder.glob(f"**/{mark}")})
    check(bool(runs), f"'{folder}' holds no run (no config.json below it); check the path.")
    found = evals.split_names(names)
    return [row for run in runs for name in found for row in run_rows_or_cause(folder, run, name)]


def gather(
    sources: Sequence[pathlib.Path], names: str, needed: Mapping[str, Sequence[str]] | None = None
) -> list[dict[str, Any]]:
    """The rows of folders and of CSVs; a run's are those of the last source that has the run.

    Raises:
      UserError: a source that is neither, or that holds nothing of these evals, or a row of a CSV
        without what is `needed` of its eval (by default what `needs` gives).
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    wanted = evals.split_names(names)
    for source in sources:
        rows = collect(source, names) if source.is_dir() else read_rows(source)
        rows = [row for row in rows if row["eval"] in wanted]
        if not source.is_dir():
            check_cells(source, rows, needed or needs())
        absent = [name for name in wanted if all(row["eval"] != name for row in rows)]
        check(
            not absent,
            f"'{source}' has no row of the eval {', '.join(absent)}; gather it with --eval "
            f"{names}.",
        )
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            found.setdefault(row["run"], []).append(row)
        runs |= found
    return [row for name in sorted(runs) for row in runs[name]]


def write_rows(rows: Sequence[dict[str, Any]], file: TextIO) -> None:
    """The rows as a CSV that `read_rows` gives back; what only some evals tell comes last."""
    others = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
    writer = csv.DictWriter(file, (*COLUMNS, *others), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def read_rows(table: pathlib.Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, Any]]:
    """The rows of a CSV as `collect` gives them: numbers as such, and no empty cells.

    Columns that only some evals have stay text.

    Raises:
      UserError: no such file, no CSV, no rows, one of `columns` is missing, a row says nothing of
        its run, or a cell of a column of numbers is no finite one or one that can't be.
    """
    check(
        table.exists(),
        f"'{table}' does not exist; check the path, or make a table with scripts/collect.py.",
    )
    try:
        with table.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, restval="")
            rows, header = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"'{table}' can't be read as CSV ({error}); give the file from scripts/collect.py."
        ) from error
    check(bool(rows), f"'{table}' has no rows; make it with scripts/collect.py.")
    twice = sorted({name for name in header if header.count(name) > 1})
    check(not twice, f"'{table}' has the column {', '.join(twice)} twice; leave one out.")
    wider = [row["run"] for row in rows if None in row]
    check(
        not wider,
        f"'{table}' has more cells than columns in a row of run {', '.join(wider)}; make it again "
        "with scripts/collect.py.",
    )
    missing = [name for name in columns if name not in rows[0]]
    check(
        not missing,
        f"'{table}' has no column {', '.join(missing)}; make it with scripts/collect.py.",
    )
    for row in rows:
        empty = [name for name in ("run", "status", "eval") if not row[name]]
        check(
            not empty,
            f"'{table}' has a row of run '{row['run']}' without {', '.join(empty)}; leave it out, "
            "or make the table again with scripts/collect.py.",
        )

    def cell(row: dict[str, str], name: str) -> Any:
        if name not in WHOLE_NUMBERS + NUMBERS:
            return row[name]
        try:
            value = float(row[name])
        except ValueError:
            value = math.nan
        whole = name in WHOLE_NUMBERS  # 64.0 too, as other programs write them
        check(
            value.is_integer() if whole else math.isfinite(value),
            f"'{table}': run '{row['run']}' has {name} '{row[name]}', which is no "
            f"{'whole' if whole else 'finite'} number; leave its rows out, or make the table again "
            "with scripts/collect.py.",
        )
        check(
            (name != "recall" or 0 <= value <= 1)
            and (name != "state_bytes" or value > 0 or not row.get("recall")),
            f"'{table}': run '{row['run']}' has {name} '{row[name]}', which is "
            f"{'outside 0 to 1' if name == 'recall' else 'not above 0'}; leave its rows out, or "
            "make the table again with scripts/collect.py.",
        )
        return int(value) if whole else value

    return [{name: cell(row, name) for name in row if row[name]} for row in rows]


def check_cells(
    table: pathlib.Path, rows: Sequence[dict[str, Any]], needed: Mapping[str, Sequence[str]]
) -> None:
    """Checks that rows of a CSV have what is needed of their eval.

    Raises:
      UserError: a finished row lacks one or is of text and of no range of positions, or one of a
        failed run has a rate and no seed.
    """
    for row in rows:
        done = row["status"] == "done"
        cells = needed.get(row["eval"], ()) if done else ()
        if row["status"].startswith("failed") and "lr" in row:
            cells = ("seed",)
        lacking = [name for name in cells if name not in row]
        check(
            not lacking,
            f"'{table}': run '{row['run']}' has no {', '.join(lacking)} in a row of the eval "
            f"{row['eval']}; leave its rows out, or make the table again with scripts/collect.py.",
        )
        check(
            not done
            or row["eval"] != analysis.LOSS_EVAL
            or re.fullmatch(r"\d+-\d+", row["slice"]) is not None,
            f"'{table}': run '{row['run']}' has the slice '{row.get('slice')}' in the eval "
            f"{row['eval']}, which is no range such as 256-511; leave its rows out, or make the "
            "table again with scripts/collect.py.",
        )


def name_of(folder: pathlib.Path, run: pathlib.Path) -> str:
    """Below the folder, or of it where it is the run itself."""
    return str(run.relative_to(folder)) if run != folder else folder.resolve().name


def run_rows_or_cause(folder: pathlib.Path, run: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """The rows of one run; of a broken one a single row that says why."""
    try:
        return run_rows(folder, run, name)
    except UserError as error:
        cause = str(error)
    except Exception as error:  # Whatever a damaged file raises must not hide the other runs.
        cause = f"'{run}' can't be read ({type(error).__name__}: {error}); restore or delete it."
    status = " ".join(f"broken: {cause}".split())
    return [{"run": name_of(folder, run), "status": status, "eval": name}]


def run_rows(folder: pathlib.Path, run: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """The rows of one run: its last results of the eval, else its status alone."""
    if not (run / "config.json").is_file():
        status = f"failed: {run_folder.failure(run)}"
        return [{"run": name_of(folder, run), "status": status, "eval": name}]
    config = run_folder.load_config(run)
    letters = config.model.layout.letters
    trained = metrics.read_metrics(run, "train")
    last = trained[-1] if trained else {"step": 0, "seconds": 0.0}
    common = {
        "run": name_of(folder, run),
        "task": config.data.kind,
        "pattern": config.model.pattern,
        "layers": letters,
        "attention_share": pattern.attention_share(letters),
        "parameters": flops.param_counts(config.model)["total"],
        "lr": config.optim.lr,
        "seed": config.seed,
        "step": last["step"],
        "seconds": round(last["seconds"], 1),
        "eval": name,
        "steps_to_90": steps_to(run, 0.9),
        "matched": config.matched,
    }
    results = sorted(run.glob(f"evals/{name}-*.json"), key=result_step)
    if not results:
        cause = run_folder.failure(run)
        status = f"unfinished at step {last['step']} of {config.steps}"
        if cause or run_folder.is_done(run):
            status = f"failed: {cause}" if cause else f"done without the eval {name}"
        return [{**common, "status": status, "state_bytes": state_bytes(config, {})}]
    status = "done" if run_folder.is_done(run) else "unfinished"
    found = read_result(results[-1])
    return [
        {
            **common,
            **row,
            "status": status,
            "step": found["step"],
            "state_bytes": state_bytes(config, row),
            "cheater": cheater(config, row),
        }
        for row in found["rows"]
    ]


def steps_to(run: pathlib.Path, recall: float) -> int | None:
    """The step of the first eval in training whose mean recall is as high; None if none is."""
    reached = [
        record["step"]
        for record in metrics.read_metrics(run, "eval")
        if record.get(evals.RECALL, 0.0) >= recall
    ]
    return min(reached, default=None)


def cheater(config: Config, row: dict[str, Any]) -> float | None:
    """What the best guess that ignores the context scores; None for a row of no task's slice."""
    if config.data.kind not in TASKS:
        return None
    parts = {part.name: part for part in eval_slices(config.data.task)}
    part = parts.get(row["slice"].partition("/")[0])
    return None if part is None else analysis.best_cheater(config.data.task, part)


def result_step(path: pathlib.Path) -> int:
    """The step in the name of an eval's file, `NAME-STEP.json`."""
    step = path.stem.split("-")[-1]
    check(
        step.isdecimal(), f"'{path}' has no step in its name (NAME-STEP.json); rename or delete it."
    )
    return int(step)


def read_result(path: pathlib.Path) -> dict[str, Any]:
    """What an eval wrote: its step and its rows, at least one.

    Raises:
      UserError: the file holds something else.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"'{path}' is not JSON ({error}); delete it and eval again.") from error
    rows = found.get("rows") if isinstance(found, dict) and "step" in found else None
    check(
        isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows),
        f"'{path}' holds no step and rows of an eval; delete it and eval again.",
    )
    return found


def state_bytes(config: Config, row: dict[str, Any]) -> int:
    """Bytes one sequence of the row's length (the training length, if it has none) is kept in."""
    return flops.state_bytes(config.model, row.get("length", config.data.length))["total"]


if __name__ == "__main__":
    cli.run(main)

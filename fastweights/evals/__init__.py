"""Evals by name: functions of (context, parameters), run in training, after it, or alone."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from fastweights.data import DataConfig
from fastweights.errors import check
from fastweights.evals import ablation, age, ar_hits, length, perplexity, recall, state_rank
from fastweights.evals.forward import Context
from fastweights.evals.harness import PREFIX, HarnessEval
from fastweights.evals.result import Result
from fastweights.evals.text_recall import MQAR_TEXT, NIAH, PHONEBOOK
from fastweights.files import write_atomic

# Mean recall within the trained length and beyond it.
RECALL, BEYOND = "recall/mean", "length/mean"
# Each has `evaluate(context, params) -> Result` and `check_fits(data)`, which raises `UserError`
# for data that the eval has nothing to say of.
EVALS: dict[str, Any] = {
    "recall": recall,
    "ppl": perplexity,
    "length": length,
    "ablation": ablation,
    "age": age,
    "state_rank": state_rank,
    "ar_hits": ar_hits,
    **NIAH,
    "phonebook": PHONEBOOK,
    "mqar_text": MQAR_TEXT,
}
KNOWN = f"{', '.join(EVALS)}, {PREFIX}TASK"


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """When and what to evaluate.

    Attributes:
      every: steps between evals in training, 0 for none.
      during: names of the evals in training, such as "recall" or "recall,ppl".
      final: names of the evals after the last step.
      max_batches: limit of batches an eval reads of the held-out text; 0 for all.
      stop_at: the recall at which an eval in training ends the run; 0 for never. With the eval
        "length" beside "recall" in training, recall beyond the trained length must reach it too.
    """

    every: int = 0
    during: str = "recall"
    final: str = "recall"
    max_batches: int = 0
    stop_at: float = 0.0

    def __post_init__(self):
        check(self.every >= 0, f"eval.every is {self.every}; use 0 (none) or more.")
        check(self.max_batches >= 0, f"eval.max_batches is {self.max_batches}; use 0 or more.")
        split_names(self.final)
        check(
            self.stop_at == 0 or (self.every > 0 and "recall" in split_names(self.during)),
            f"eval.stop_at is {self.stop_at} but the evals in training are '{self.during}' every "
            f"{self.every} steps; have recall among them, or set stop_at=0.",
        )

    def stops(self, evaluated: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the metrics of one of these evals in training end the run."""
        names = split_names(self.during)
        asked = [metric for metric in (RECALL, BEYOND) if metric.partition("/")[0] in names]
        # A record of other evals, from before they were changed, says nothing.
        return self.stop_at > 0 and any(
            all(found.get(metric, 0.0) >= self.stop_at for metric in asked) for found in evaluated
        )


def split_names(names: str) -> list[str]:
    """The evals in a comma-separated list.

    Raises:
      UserError: an eval that does not exist.
    """
    found = [name.strip() for name in names.split(",") if name.strip()]
    check(bool(found), f"the list of evals '{names}' is empty; name some of {KNOWN}.")
    for name in found:
        check(
            name in EVALS or name.startswith(PREFIX),
            f"eval '{name}' does not exist; known: {KNOWN}.",
        )
    return found


def _find(name: str) -> Any:
    return HarnessEval(name) if name.startswith(PREFIX) else EVALS[name]


def run(names: str, context: Context, params: Any) -> dict[str, Result]:
    """Runs the named evals in order."""
    return {name: _find(name).evaluate(context, params) for name in split_names(names)}


def check_fits(names: str, data: DataConfig) -> None:
    """Raises `UserError` if one of the named evals can't be run on these data."""
    for name in split_names(names):
        _find(name).check_fits(data)


def flat_metrics(results: dict[str, Result]) -> dict[str, float]:
    """All metrics as `eval/metric`."""
    return {
        f"{name}/{metric}": value
        for name, result in results.items()
        for metric, value in result.metrics.items()
    }


def write(workdir: pathlib.Path, step: int, results: dict[str, Result]) -> None:
    """One JSON file an eval and step under `evals/`: metrics and rows."""
    (workdir / "evals").mkdir(exist_ok=True)
    for name, result in results.items():
        record = {"eval": name, "step": step, **dataclasses.asdict(result)}
        file = f"{re.sub(r'[^a-zA-Z0-9_.]+', '-', name)}-{step}.json"
        write_atomic(workdir / "evals" / file, json.dumps(record, indent=2) + "\n")


def print_tables(step: int, results: dict[str, Result], console: Console | None = None) -> None:
    """A table an eval."""
    console = console or Console(soft_wrap=True)
    for name, result in results.items():
        table = Table(title=f"{name} at step {step}", title_justify="left")
        for column in result.rows[0]:
            table.add_column(column, justify="left" if column == "slice" else "right")
        for row in result.rows:
            table.add_row(*(_cell(value) for value in row.values()))
        console.print(table)
        console.print("  ".join(f"{k} {v:.4f}" for k, v in result.metrics.items()), highlight=False)


def _cell(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)

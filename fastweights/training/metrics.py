"""Where metrics go: JSON lines on disk (the truth), the console, and wandb for those who ask."""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import rich.progress
from rich.console import Console

from fastweights.errors import UserError, check
from fastweights.files import write_atomic


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What is logged, and how often.

    Attributes:
      every: steps between lines.
      wandb: "disabled", "offline" or "online".
      project: wandb's project.
      profile_start: first step of a profiler window, 0 for none; the trace goes to `profile/`.
      profile_steps: length of that window.
    """

    every: int = 50
    wandb: str = "disabled"
    project: str = "fastweights"
    profile_start: int = 0
    profile_steps: int = 5

    def __post_init__(self):
        check(self.every >= 1, f"log.every is {self.every}; set it to 1 or more.")
        check(
            self.wandb in ("disabled", "offline", "online"),
            f"log.wandb is '{self.wandb}'; use disabled, offline or online.",
        )
        check(
            self.profile_start >= 0 and self.profile_steps >= 1,
            f"log.profile_start {self.profile_start} and log.profile_steps {self.profile_steps} "
            "give no window; use a start of 0 (none) or more and at least one step.",
        )


class MetricsLog:
    """Writes each record to `metrics.jsonl`, and to wandb when the config asks for it."""

    def __init__(self, workdir: pathlib.Path, *, step: int, lead: bool, wandb_run: Any = None):
        """Opens the log.

        Args:
          workdir: the run folder.
          step: where the run starts; lines of later steps are dropped, they will come again.
          lead: whether this is the process that writes; the others keep silent.
          wandb_run: from `start_wandb`.
        """
        path = workdir / "metrics.jsonl" if lead else pathlib.Path(os.devnull)
        kept = _read_lines(path) if path.is_file() else []
        # The final evals come again too.
        kept = [record for record in kept if record["step"] <= step and record["kind"] != "final"]
        # Seconds of training up to here, over all earlier starts.
        self.seconds = max((record.get("seconds", 0.0) for record in kept), default=0.0)
        if lead:
            write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a")
        self._wandb = wandb_run

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Adds one line; it has left the process when this returns, so a kill loses nothing."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._wandb is not None:
            named = {f"{kind}/{name}": value for name, value in values.items()}
            self._guarded(self._wandb.log, {**named, "train/step": step})

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._guarded(self._wandb.finish)

    def _guarded(self, call: Callable[..., Any], *args: Any) -> None:
        """Calls wandb; its own trouble must never end a run."""
        try:
            call(*args)
        except Exception as error:
            print(f"wandb: {error}; going on without it.", file=sys.stderr)
            self._wandb = None


def read_metrics(workdir: pathlib.Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run, oldest first; of one kind ("train", "eval") if named."""
    path = workdir / "metrics.jsonl"
    records = _read_lines(path) if path.is_file() else []
    return [record for record in records if kind in (None, record["kind"])]


def _read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    records = []
    # A kill can leave the last line cut short; what is before it is whole.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            records.append(json.loads(line))
            check({"kind", "step"} <= records[-1].keys(), "a record has a kind and a step")
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"line {number} of '{path}' is no record of a run ({error}); restore the file or "
                "delete that line."
            ) from error
    return records


def start_wandb(config: LogConfig, workdir: pathlib.Path, run_id: str, fields: dict) -> Any:
    """A wandb run whose id is the run folder's, so that a resumed run goes on with one curve.

    Returns None when disabled or when wandb can't start: training goes on and says so.
    """
    if config.wandb == "disabled":
        return None
    try:
        import wandb  # slow to import and optional

        mode: Any = config.wandb
        run = wandb.init(
            project=config.project,
            id=run_id,
            name=workdir.name,
            dir=str(workdir),
            mode=mode,
            resume="allow",
            config=fields,
            settings=wandb.Settings(init_timeout=20),
        )
        # wandb drops lines below its own last step; ours may repeat after a resume.
        run.define_metric("*", step_metric="train/step")
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        print(f"wandb could not start ({reason}); training goes on without it.", file=sys.stderr)
        return None
    return run


class Progress:
    """One console line a log interval, and a bar under it on a terminal."""

    def __init__(self, steps: int, start: int, *, seconds: float, quiet: bool):
        """Counts from step `start`, after `seconds` of training in earlier starts."""
        self._console = Console(quiet=quiet, soft_wrap=True, highlight=False)
        self._steps = steps
        self._started = self._interval = time.perf_counter()
        self._start = self._last_step = start
        self._seconds_before = seconds
        self._waited = 0.0
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=start)
        self._bar.start()

    def waited(self, seconds: float) -> None:
        """Adds time the loop stood waiting for data."""
        self._waited += seconds

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def interval(
        self, step: int, tokens_per_step: int, flops_per_step: float, peak_flops: float | None
    ) -> dict[str, float]:
        """Speeds since the last call: tokens/s, share of time waiting for data, MFU, ETA in s."""
        now = time.perf_counter()
        seconds = max(now - self._interval, 1e-9)
        done = step - self._last_step
        speeds = {
            "tokens_per_s": done * tokens_per_step / seconds,
            "data_wait": self._waited / seconds,
            "seconds": self._seconds_before + now - self._started,
            "eta_s": (now - self._started) / max(step - self._start, 1) * (self._steps - step),
        }
        if peak_flops is not None:
            speeds["mfu"] = done * flops_per_step / seconds / peak_flops
        self._interval, self._last_step, self._waited = now, step, 0.0
        return speeds

    def leave_out(self, seconds: float) -> None:
        """Takes the time of an eval or a save out of the present interval's speeds."""
        self._interval += seconds

    def line(self, step: int, values: dict[str, float]) -> None:
        """step | loss | acc | lr | tok/s | mfu | wait | eta"""
        parts = [
            f"step {step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {values['loss']:.4f}",
            f"acc {values['accuracy']:.3f}",
            f"lr {values['lr']:.2e}",
            f"{values['tokens_per_s']:,.0f} tok/s",
            *([f"mfu {values['mfu']:.1%}"] if "mfu" in values else []),
            f"wait {values['data_wait']:.0%}",
            f"eta {_clock(values['eta_s'])}",
        ]
        self.say(" | ".join(parts))
        if values["data_wait"] > 0.1:
            self.say("  more than 10% of the time went into waiting for data")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

"""Checkpoints through orbax: state and data position in one, written asynchronously.

Orbax writes a step into a temporary folder and renames it when whole, so a kill in the middle
leaves the earlier steps as they were. This module is the only one that knows orbax.
"""

import dataclasses
import logging
import pathlib
import shutil
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from fastweights.errors import UserError, check
from fastweights.training.optim import path_names
from fastweights.training.state import State

METRIC = "metric"

# Orbax raises a failed write to us, and its threads log the same error with a traceback before.
logging.getLogger("absl").addFilter(lambda record: record.exc_info is None)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep.

    Attributes:
      every: steps between saves; the last step is always saved.
      keep_last: how many of the newest to keep.
      keep_best: how many of the best by `best_metric` to keep besides; 0 for none.
      best_metric: an in-training eval's metric, such as "recall/mean".
      best_mode: "max" or "min".
    """

    every: int = 500
    keep_last: int = 2
    keep_best: int = 0
    best_metric: str = "recall/mean"
    best_mode: str = "max"

    def __post_init__(self):
        for name in ("every", "keep_last"):
            value = getattr(self, name)
            check(value >= 1, f"checkpoint.{name} is {value}; set it to 1 or more.")
        check(self.keep_best >= 0, f"checkpoint.keep_best is {self.keep_best}; use 0 or more.")
        check(
            self.best_mode in ("max", "min"),
            f"checkpoint.best_mode is '{self.best_mode}'; use 'max' or 'min'.",
        )


class Checkpoints:
    """The checkpoints of one run. Use as a context manager: leaving it waits for the last write."""

    def __init__(self, workdir: pathlib.Path, config: CheckpointConfig, *, read_only: bool = False):
        """Opens the run's checkpoints; `read_only` while another process may be writing them."""
        self._config = config
        self._directory = (workdir / "checkpoints").absolute()
        # Any: orbax's policies do not satisfy its own protocols' types.
        training: Any = ocp.training
        policies = training.preservation_policies
        keep = [policies.LatestN(config.keep_last)]
        if config.keep_best:
            keep.append(
                policies.BestN(
                    get_metric_fn=lambda metrics: metrics[METRIC],
                    reverse=config.best_mode == "min",
                    n=config.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._orbax = training.Checkpointer(
            self._directory,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy(keep),
            # What a kill left half-written; for a reader it may be a save in flight.
            cleanup_tmp_directories=not read_only,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self._orbax.close()

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, oldest first."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def save(
        self, step: int, state: State, *, data_position: int, evals: dict[str, float] | None
    ) -> None:
        """Starts to write `step`; returns once the state is copied from the devices.

        Args:
          step: number of finished steps.
          state: the training state; may be donated to the next step at once.
          data_position: index of the next batch.
          evals: metrics of the evals at this step, None when none ran.

        Raises:
          UserError: the disk is full or the write failed, this one or the one before it.
        """
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._directory).free
        check(
            free > needed,
            f"step {step} was not saved: a checkpoint takes {needed / 1e6:.1f} MB and "
            f"'{self._directory}' has {free / 1e6:.1f} MB free; free some and start again "
            f"(steps saved: {self.steps() or 'none'}).",
        )
        metric = (evals or {}).get(self._config.best_metric)
        try:
            self._orbax.save_checkpointables_async(
                step,
                {"state": state, "data": {"next_index": data_position}},
                metrics=None if metric is None else {METRIC: float(metric)},
            )
        except Exception as error:
            raise self._failed(step, error) from error

    def wait(self) -> None:
        """Returns when the last started write is on disk; raises `UserError` if it failed."""
        try:
            self._orbax.wait()
        except Exception as error:
            raise self._failed(None, error) from error

    def choose(self, step: int | None) -> int:
        """`step`, or the last one with a whole checkpoint.

        Raises:
          UserError: there is none of that step, or none at all.
        """
        saved, run = self.steps(), self._directory.parent
        check(bool(saved), f"'{run}' has no checkpoint yet; train it first.")
        check(
            step is None or step in saved,
            f"'{run}' has no checkpoint of step {step}; it has {saved}.",
        )
        return saved[-1] if step is None else step

    def restore(self, step: int, abstract: State) -> tuple[State, int]:
        """The state of `step`, laid out as `abstract` says, and the index of its next batch.

        Raises:
          UserError: the checkpoint holds other parameters; each differing one is named.
        """
        state = self._restore(step, abstract, partial=False)
        try:
            data = self._orbax.load_checkpointables(step, {"data": None})
            return state, int(data["data"]["next_index"])
        except Exception as error:
            raise self._damaged(step, error) from error

    def restore_params(self, step: int, abstract: State) -> Any:
        """Only the parameters of `step`, without reading the rest; arguments and errors as above.

        Step 0, which an import makes, holds nothing else.
        """
        return self._restore(step, {"params": abstract["params"]}, partial=True)["params"]

    def _restore(self, step: int, abstract: State, *, partial: bool) -> State:
        """The parts of the state that are in `abstract`; all of them unless `partial`."""
        try:
            stored = self._orbax.checkpointables_metadata(step).metadata["state"]
        except Exception as error:
            raise self._damaged(step, error) from error
        if not jax.tree.leaves(stored):
            raise self._damaged(step, ValueError("it holds no arrays"))
        if partial:
            stored = {name: part for name, part in stored.items() if name in abstract}
        differing = _tree_differences(stored, abstract)
        check(
            not differing,
            f"checkpoint {step} in '{self._directory}' is from another model: "
            f"{'; '.join(differing)}; use that model's config or another --workdir.",
        )
        context = ocp.Context()
        context.pytree.loading.partial_load = partial
        try:
            with context:
                return self._orbax.load_checkpointables(step, {"state": abstract})["state"]
        except Exception as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> UserError:
        reason = str(error).strip().split("\n")[0][:200]
        return UserError(
            f"checkpoint {step} in '{self._directory}' is damaged ({reason}); delete its folder to "
            "go on from an earlier one."
        )

    def _failed(self, step: int | None, error: Exception) -> UserError:
        which = "the last checkpoint" if step is None else f"step {step}"
        reason = str(error).strip().split("\n")[0][:300]
        return UserError(
            f"{which} could not be written to '{self._directory}' ({reason}); "
            f"earlier checkpoints are intact ({self.steps() or 'none'}): "
            "check the disk and start again."
        )


def _tree_differences(stored: Any, wanted: Any) -> list[str]:
    """One phrase for each parameter that is missing, unknown or of another shape."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {".".join(path_names(path)): tuple(leaf.shape) for path, leaf in leaves}

    old, new = shapes(stored), shapes(wanted)
    phrases = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            phrases.append(f"{name} {old[name]} is stored but not in the model")
        elif name not in old:
            phrases.append(f"{name} {new[name]} is in the model but not stored")
        elif old[name] != new[name]:
            phrases.append(f"{name} is stored as {old[name]} and {new[name]} in the model")
    return phrases

"""Optimisers and learning-rate schedules; every choice by parameter name, never by rank.

Scanned layers carry a leading layer axis, so a rank test would take a stacked bias for a matrix.
"""

import dataclasses
import math
from typing import Any

import jax
import optax

from fastweights.errors import UserError, check

# Last part of a parameter's path -> is it a weight matrix (decayed, and orthogonalised by Muon
# inside the blocks)? Every parameter must be listed: a new name is a decision, not an accident.
MATRICES = frozenset({"kernel", "embedding", "head"})
OTHERS = frozenset({"scale", "conv_q", "conv_k", "conv_v", "A_log", "dt_bias", "D"})
OTHERS |= {"conv_bias_q", "conv_bias_k", "conv_bias_v"}
# The systems of state spaces: a decay would pull their rates, steps and maps off their meaning.
OTHERS |= {"log_dt", "A_imag", "B_real", "B_imag", "C_real", "C_imag", "P_real", "P_imag"}
OTHERS |= {"conv_x", "conv_bias_x"}
# Embedding and head rows are vectors of single tokens; Muon's orthogonalisation is for maps
# between hidden spaces (https://kellerjordan.github.io/posts/muon/), so these stay with AdamW.
NOT_FOR_MUON = frozenset({"embedding", "head"})


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Optimiser and schedule.

    Attributes:
      name: "adamw" or "muon" (matrices of the blocks by Muon, the rest by AdamW).
      lr: peak learning rate.
      schedule: "cosine" (warm-up, then cosine to `end_lr_ratio * lr` at the last step) or
        "wsd" (warm-up, stable, then linear to `end_lr_ratio * lr` over the last `decay_steps`).
      warmup_steps: linear from 0.
      decay_steps: for "wsd" only.
      end_lr_ratio: final over peak learning rate.
      weight_decay: decoupled, on what `decayed` names.
      decayed: "matrices" or "all": as PyTorch's optimisers do unless told otherwise, norms, gates
        and decay rates too, which pulls Mamba-2's steps and rates towards fast forgetting.
      clip_norm: limit of the gradients' global norm; 0 for none.
      nonfinite: "stop" ends the run before the update, "skip" drops the update and counts it.
    """

    name: str = "adamw"
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: int = 100
    decay_steps: int = 200
    end_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    decayed: str = "matrices"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    nonfinite: str = "stop"

    def __post_init__(self):
        for name, value, allowed in (
            ("name", self.name, ("adamw", "muon")),
            ("schedule", self.schedule, ("cosine", "wsd")),
            ("decayed", self.decayed, ("matrices", "all")),
            ("nonfinite", self.nonfinite, ("stop", "skip")),
        ):
            check(
                value in allowed,
                f"optim.{name} is '{value}'; use one of: {', '.join(allowed)}.",
            )
        check(0 < self.lr < math.inf, f"optim.lr is {self.lr}; it must be positive.")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            check(0 <= value < 1, f"optim.{name} is {value}; it must lie in [0, 1).")
        for name in ("warmup_steps", "decay_steps", "weight_decay", "clip_norm", "end_lr_ratio"):
            value = getattr(self, name)
            check(value >= 0, f"optim.{name} is {value}; it must not be negative.")


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the number of finished steps."""
    warmup = min(config.warmup_steps, steps)
    end = config.lr * config.end_lr_ratio
    rise = optax.linear_schedule(0.0, config.lr, warmup)
    if config.schedule == "cosine":
        # optax refuses a decay of no steps; a run that only warms up never reaches it.
        fall = optax.cosine_decay_schedule(
            config.lr, max(steps - warmup, 1), alpha=config.end_lr_ratio
        )
        return optax.join_schedules([rise, fall], [warmup])
    decay = min(config.decay_steps, steps - warmup)
    stable = optax.constant_schedule(config.lr)
    fall = optax.linear_schedule(config.lr, end, decay)
    return optax.join_schedules([rise, stable, fall], [warmup, steps - decay])


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, direction by Adam or Muon, decoupled decay, rate.

    optax's own `muon` decays every parameter of its Adam group, so the decay stands outside it.
    """
    if config.name == "adamw":
        direction = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    else:
        muon = optax.contrib.muon(
            1.0,
            adam_b1=config.b1,
            adam_b2=config.b2,
            eps=config.eps,
            # Update size alike for every shape, so that one learning rate serves both groups
            # (Liu et al. 2025, arXiv:2502.16982).
            consistent_rms=0.2,
            muon_weight_dimension_numbers=muon_dimensions,
        )
        direction = optax.chain(muon, optax.scale(-1.0))
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(
            config.weight_decay, decay_mask if config.decayed == "matrices" else None
        ),
        optax.scale_by_learning_rate(schedule(config, steps)),
    )


def path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A pytree path's keys as plain strings."""
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def decay_mask(params: Any) -> Any:
    """True for the weight matrices.

    Raises:
      UserError: a parameter whose name is in neither list.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_matrix(path), params)


def muon_dimensions(params: Any) -> Any:
    """Which axes Muon maps between, for the matrices inside the blocks; None for all others."""

    def dimensions(path: tuple[Any, ...], leaf: Any) -> Any:
        if not _is_matrix(path) or path_names(path)[-1] in NOT_FOR_MUON:
            return None
        # Kernels are [..., in, out]; a scanned group's have the layer axis in front.
        return optax.contrib.MuonDimensionNumbers(
            reduction_axis=leaf.ndim - 2, output_axis=leaf.ndim - 1
        )

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _is_matrix(path: tuple[Any, ...]) -> bool:
    name = path_names(path)[-1]
    if name not in MATRICES | OTHERS:
        raise UserError(
            f"parameter '{'.'.join(path_names(path))}' is in neither list of training/optim.py; "
            "say there whether it is a weight matrix."
        )
    return name in MATRICES

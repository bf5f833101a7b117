"""A run opened for reading: its parameters on a mesh of the reader's choice."""

import pathlib
from typing import Any, NamedTuple

import jax
from flax import nnx

from fastweights.config import Config
from fastweights.training import optim
from fastweights.training.checkpoint import Checkpoints
from fastweights.training.state import make_blueprint


class Loaded(NamedTuple):
    """Parameters of one step with the model they belong to."""

    graphdef: nnx.GraphDef
    params: Any
    step: int


def load_params(
    workdir: pathlib.Path, config: Config, mesh: jax.sharding.Mesh, step: int | None = None
) -> Loaded:
    """The parameters of a run's checkpoint; a save in flight is left alone.

    Args:
      workdir: the run's folder.
      config: its config.
      mesh: where the parameters shall lie.
      step: which checkpoint, the last one by default.

    Raises:
      UserError: no checkpoint, none of that step, or one of another model.
    """
    tx = optim.make_optimizer(config.optim, config.steps)
    blueprint = make_blueprint(config.model, tx, mesh)
    with Checkpoints(workdir, config.checkpoint, read_only=True) as checkpoints:
        step = checkpoints.choose(step)
        params = checkpoints.restore_params(step, blueprint.abstract)
    return Loaded(blueprint.graphdef, params, step)

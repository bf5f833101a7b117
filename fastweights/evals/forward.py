"""The forward pass that evals share: loss and correctness of every target token."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from fastweights import sharding
from fastweights.model import bind
from fastweights.training.loss import TokenLoss, token_loss

if TYPE_CHECKING:
    from fastweights.config import Config

Batch = dict[str, np.ndarray]


class Context:
    """A run's config, model and mesh with the compiled forward pass; one serves all evals."""

    def __init__(
        self,
        config: Config,
        graphdef: nnx.GraphDef,
        mesh: jax.sharding.Mesh,
        workdir: pathlib.Path | None = None,
    ):
        """`workdir` is the run's folder, for evals that look for a tokenizer there."""
        self.config, self.graphdef, self.workdir = config, graphdef, workdir
        self.rows = config.batch_size // config.accum_steps
        self._mesh = mesh

        def forward(params: Any, batch: Batch) -> TokenLoss:
            return token_loss(bind(graphdef, params), batch, loss_chunk=config.loss_chunk)

        self._forward = jax.jit(forward, out_shardings=sharding.replicated(mesh))

    def scores(self, params: Any, batches: Iterable[Batch]) -> Iterator[tuple[Batch, TokenLoss]]:
        """Each global batch of `rows` rows with the loss (nats) and correctness of its positions.

        Positions without a target hold 0 and False. All values are NumPy arrays [rows, length].
        """
        for batch in batches:
            # Every process holds the whole batch; each device takes its rows from it.
            placed = {
                name: jax.make_array_from_callback(
                    array.shape,
                    sharding.batch_sharding(self._mesh, array.shape[1]),
                    lambda index, array=array: array[index],
                )
                for name, array in batch.items()
            }
            yield batch, jax.device_get(self._forward(params, placed))

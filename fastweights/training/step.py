"""One optimiser step as a pure function of (state, batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fastweights import sharding
from fastweights.model import bind
from fastweights.training.loss import IGNORE, Answers, Sums, training_loss
from fastweights.training.state import Blueprint, State

if TYPE_CHECKING:
    from fastweights.config import Config

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

BATCH_FIELDS = ("tokens", "targets", "segment_ids", "positions")


def make_train_step(
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    *,
    accum_steps: int,
    loss_chunk: int,
    z_loss: float,
    balance_loss: float = 0.0,
    answers: Answers | None = None,
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """Builds the step; the caller jits it with pinned shardings and a donated state.

    The loss is the mean over all target tokens of the global batch, so its gradient does not
    depend on how the rows are split over microbatches or devices. A step whose loss or gradient
    is not finite leaves parameters and optimiser untouched and counts itself in `skipped`; the
    caller decides whether to go on.

    The metrics are float32 scalars `loss` (nats a target token), `accuracy`, `z` (mean squared
    log-partition), `target_tokens`, `grad_norm` and, where it is part of the loss, `balance`, plus
    `finite` (bool) and `bad_gradients`, one bool a parameter in the order of
    `jax.tree.leaves(params)`.
    """

    def scaled_loss(params: Any, batch: Batch, total: jax.Array) -> tuple[jax.Array, Sums]:
        model = bind(graphdef, params)
        return training_loss(
            model,
            batch,
            loss_chunk=loss_chunk,
            z_loss=z_loss,
            total=total,
            balance_loss=balance_loss,
            answers=answers,
        )

    grad_fn = jax.value_and_grad(scaled_loss, has_aux=True)

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        params = state["params"]
        # A batch without a single target gives loss and gradient 0, not 0/0.
        total = jnp.maximum((batch["targets"] != IGNORE).sum(dtype=jnp.float32), 1.0)
        if accum_steps == 1:
            (loss, sums), grads = grad_fn(params, batch, total)
        else:
            loss, sums, grads = _accumulate(grad_fn, params, batch, total, accum_steps)

        grad_norm = optax.tree.norm(grads)
        bad_gradients = jnp.stack([~jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])
        finite = jnp.isfinite(loss) & ~bad_gradients.any()
        updates, opt = tx.update(grads, state["opt"], params)
        updated = {"params": optax.apply_updates(params, updates), "opt": opt}
        kept = {"params": params, "opt": state["opt"]}
        new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, kept)
        new_state["step"] = state["step"] + 1
        new_state["skipped"] = state["skipped"] + jnp.where(finite, 0, 1)
        metrics = {
            "loss": sums.nll / total,
            "z": sums.z / total,
            "accuracy": sums.correct / total,
            "target_tokens": sums.count,
            "grad_norm": grad_norm,
            "finite": finite,
            "bad_gradients": bad_gradients,
        }
        if balance_loss:
            metrics["balance"] = sums.balance / total
        return new_state, metrics

    return train_step


def answers_of(config: Config, mesh: jax.sharding.Mesh) -> Answers:
    """Counted over the whole batch; row by row where microbatches or several devices cut it."""
    if mesh.size == 1 and config.accum_steps == 1:
        return Answers(config.batch_size, config.data.answers(config.batch_size))
    return Answers(1, config.data.answers(None))


def _accumulate(
    grad_fn: Callable, params: Any, batch: Batch, total: jax.Array, accum_steps: int
) -> tuple[jax.Array, Sums, Any]:
    """Sums loss and gradient over microbatches; float32 accumulators whatever the parameters."""

    def split(x: jax.Array) -> jax.Array:
        # Every accum_steps-th row, so that each device's rows stay on that device.
        rows = x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:])
        return sharding.constrain(jnp.moveaxis(rows, 1, 0), None, "batch", "tokens")

    def body(carry: Any, microbatch: Batch) -> tuple[Any, None]:
        (loss, sums), grads = grad_fn(params, microbatch, total)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, (loss, sums, grads)), None

    zeros = (
        jnp.zeros((), jnp.float32),
        Sums(*[jnp.zeros((), jnp.float32)] * len(Sums._fields)),
        jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params),
    )
    (loss, sums, grads), _ = jax.lax.scan(body, zeros, jax.tree.map(split, batch))
    return loss, sums, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def compile_step(
    config: Config, blueprint: Blueprint, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> jax.stages.Compiled:
    """Compiles the step of a run for its mesh, once.

    The executable takes one shape and one placement: another raises, it never compiles again. The
    state is donated.
    """
    batch_sharding = sharding.batch_sharding(mesh, config.data.length)
    step = jax.jit(
        make_train_step(
            blueprint.graphdef,
            tx,
            accum_steps=config.accum_steps,
            loss_chunk=config.loss_chunk,
            z_loss=config.z_loss,
            balance_loss=config.balance_loss,
            answers=answers_of(config, mesh),
        ),
        # Pinned on both sides, or the compiler may lay the new state out otherwise than the old.
        in_shardings=(blueprint.shardings, batch_sharding),
        out_shardings=(blueprint.shardings, sharding.replicated(mesh)),
        donate_argnums=0,
    )
    shape = jax.ShapeDtypeStruct(
        (config.batch_size, config.data.length), jnp.int32, sharding=batch_sharding
    )
    with jax.set_mesh(mesh):
        lowered = step.lower(blueprint.abstract, dict.fromkeys(BATCH_FIELDS, shape))
        return lowered.compile(compiler_options(mesh))


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, bool] | None:
    """What programs with training steps in them are compiled with."""
    if mesh.devices.flat[0].platform != "gpu":
        return None
    # That pass writes a kernel's result straight into a stacked array, and where the result is
    # used elsewhere too runs the kernel a second time for it.
    return {"xla_gpu_enable_dynamic_slice_fusion": False}


def place_batch(batch: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> Batch:
    """Lays this process's rows of a batch (`sharding.share_of_rows`) on its devices."""
    _, count = sharding.share_of_rows(mesh)
    rows, length = batch["tokens"].shape
    placement = sharding.batch_sharding(mesh, length)
    return {
        name: jax.make_array_from_process_local_data(placement, batch[name], (rows * count, length))
        for name in BATCH_FIELDS
    }

"""Runs that differ in seed and learning rate alone, trained as one program.

The members' states are stacked along a leading axis and go through one compiled loop, which makes
its own batches: side by side on accelerators, where small models leave most of a device idle, and
one after the other on CPUs, where that is faster (what is shared there is the compiling). A member
is what train.py would make of the same config, with the same batches: it has a run folder of its
own, with its metrics, evals and last checkpoint.

The group's own folder holds one checkpoint of all members. A member whose loss or gradient is not
finite stops there, as train.py does, and the others go on.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fastweights import config as config_lib
from fastweights import evals, sharding
from fastweights.data.pipeline import TEXT
from fastweights.errors import check
from fastweights.files import read_json, write_atomic
from fastweights.model import init_params
from fastweights.ops.attention import MASK_OF_HEADS
from fastweights.pattern import attention_share
from fastweights.tasks import device_batch
from fastweights.training import metrics, optim, run_folder
from fastweights.training.checkpoint import Checkpoints
from fastweights.training.state import fresh_state, make_blueprint
from fastweights.training.step import answers_of, compiler_options, make_train_step

Members = Mapping[pathlib.Path, config_lib.Config]

RUNNING = -1


def shared(config: config_lib.Config) -> config_lib.Config | None:
    """What members of one group have in common; None for a run that can be in no group."""
    if config.data.kind == TEXT or not config.data.on_device or config.log.wandb != "disabled":
        return None
    narrow = jnp.dtype(config.model.dtype).itemsize == 2
    attends = attention_share(config.model.layout.letters) > 0
    if narrow and attends and config.data.length**2 > MASK_OF_HEADS:
        return None  # jax has no such masks for cuDNN under vmap
    # Updates are proportional to the learning rate: each member's are those of rate 1, scaled.
    return dataclasses.replace(config, seed=0, optim=dataclasses.replace(config.optim, lr=1.0))


class Program(NamedTuple):
    """A group's functions.

    Attributes:
      abstract: the stacked state as shapes.
      init: seeds_N -> stacked state: a `training.state.State` and `failed_at`, `RUNNING` or the
        step that was not finite.
      advance: (state, seeds_N, rates_N, start, stops_N, places_M) -> (state, metrics of each
        member's last step). Takes each running member at `places` from step `start` to its stop.
        The state is donated.
      side_by_side: whether members that have ended cost as much as those that run.
      context: for evals of single members.
    """

    abstract: Any
    init: Callable[..., Any]
    advance: Callable[..., Any]
    side_by_side: bool
    context: evals.Context
    mesh: jax.sharding.Mesh


def make_program(config: config_lib.Config, size: int) -> Program:
    """The program of `size` members of which `config` is what they share."""
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    unit = optim.make_optimizer(config.optim, config.steps)
    blueprint = make_blueprint(config.model, unit, mesh)
    side_by_side = _side_by_side()
    stops = config.optim.nonfinite == "stop"

    def init_one(seed: jax.Array) -> Any:
        state = fresh_state(init_params(config.model, jax.random.key(seed)), unit)
        return state | {"failed_at": jnp.full((), RUNNING, jnp.int32)}

    def advance_one(member: Any) -> Any:
        state, seed, rate, start, stop = member

        def update(updates, state, params=None):
            updates, state = unit.update(updates, state, params)
            return jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates), state

        step = make_train_step(
            blueprint.graphdef,
            optax.GradientTransformation(unit.init, update),
            accum_steps=config.accum_steps,
            loss_chunk=config.loss_chunk,
            z_loss=config.z_loss,
            balance_loss=config.balance_loss,
            answers=answers_of(config, mesh),
        )

        def body(carry: Any) -> Any:
            index, state, _ = carry
            batch = device_batch(
                config.data.task,
                seed=seed,
                index=index,
                rows=config.batch_size,
                length=config.data.length,
            )
            failed_at = state["failed_at"]
            state, found = step({k: v for k, v in state.items() if k != "failed_at"}, batch)
            if stops:
                failed_at = jnp.where(found["finite"], failed_at, index + 1)
            found = {k: v.astype(jnp.float32) for k, v in found.items() if v.ndim == 0}
            return index + 1, state | {"failed_at": failed_at}, found

        def goes_on(carry: Any) -> jax.Array:
            return (carry[0] < stop) & (carry[1]["failed_at"] == RUNNING)

        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(body, (start, state, None))[2],
        )
        _, state, found = jax.lax.while_loop(goes_on, body, (start, state, nothing))
        return state, found

    def advance(state_N, seeds_N, rates_N, start, stops_N, places_M):
        starts_N = jnp.broadcast_to(start, seeds_N.shape)
        members_N = (state_N, seeds_N, rates_N, starts_N, stops_N)
        at_once = len(places_M) if side_by_side else 1
        if len(places_M) == size:
            return jax.lax.map(advance_one, members_N, batch_size=at_once)
        members_M = jax.tree.map(lambda x: x[places_M], members_N)
        state_M, found_M = jax.lax.map(advance_one, members_M, batch_size=at_once)
        state_N = jax.tree.map(lambda x, new: x.at[places_M].set(new), state_N, state_M)
        nothing_N = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), found_M)
        return state_N, jax.tree.map(lambda x, new: x.at[places_M].set(new), nothing_N, found_M)

    def init(seeds_N: jax.Array) -> Any:
        return jax.vmap(init_one)(seeds_N)

    placement = sharding.replicated(mesh)
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement),
        jax.eval_shape(init, jax.ShapeDtypeStruct((size,), jnp.uint32)),
    )
    quick = {"xla_backend_optimization_level": 0}
    return Program(
        abstract,
        jax.jit(init, out_shardings=placement, compiler_options=quick),
        jax.jit(
            advance,
            donate_argnums=0,
            out_shardings=placement,
            compiler_options=compiler_options(mesh),
        ),
        side_by_side,
        evals.Context(config, blueprint.graphdef, mesh),
        mesh,
    )


def _side_by_side() -> bool:
    return jax.default_backend() != "cpu"


def _places(going: list[bool], narrow: bool) -> list[int]:
    """Members that go on, and so many others that it is all, a half, a quarter of them, ...

    Where those that have ended cost as much, the program is compiled again for fewer of them.
    """
    size = len(going)
    while narrow and size % 2 == 0 and sum(going) <= size // 2:
        size //= 2
    return sorted(sorted(range(len(going)), key=lambda n: not going[n])[:size])


class _Member:
    """A run of the group: its folder, log and how far it is."""

    def __init__(self, folder: pathlib.Path, config: config_lib.Config, step: int):
        self.folder, self.config = folder, config
        if step == 0:
            # Without a checkpoint of the group nothing of it counts.
            run_folder.clear_results(folder)
        if not run_folder.is_done(folder):
            run_folder.open_run(folder, config, step)
        self.log = metrics.MetricsLog(folder, step=step, lead=not run_folder.is_done(folder))
        self.seconds = self.log.seconds
        self.schedule = optim.schedule(config.optim, config.steps)
        # An eval that was good enough ended this run.
        self.ended = config.eval.stops(metrics.read_metrics(folder, "eval"))

    def note(self, step: int, values: dict[str, float], speeds: dict[str, float]) -> None:
        record = values | {"lr": float(np.asarray(self.schedule(step - 1)))} | speeds
        self.log.write("train", step, record)


def train(folder: pathlib.Path, members: Members, should_stop: Callable[[int], bool]) -> bool:
    """Trains a group to the end, or goes on with it; returns whether it came to the end.

    Args:
      folder: of the group.
      members: run folder -> config, the same at each start.
      should_stop: asked after each stretch of steps, with the number of finished ones.

    Raises:
      UserError: the configs differ in more than seed and learning rate, or the folder was written
        for other members.
    """
    configs = list(members.values())
    common = shared(configs[0])
    check(
        common is not None and all(shared(config) == common for config in configs),
        f"the {len(configs)} runs of the group '{folder}' differ in more than seed and learning "
        "rate, or are no tasks with data.on_device=true; start them apart.",
    )
    assert common is not None
    program = make_program(common, len(configs))
    seeds_N = jnp.asarray([config.seed for config in configs], jnp.uint32)
    rates_N = jnp.asarray([config.optim.lr for config in configs], jnp.float32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(program.mesh))
        stack.enter_context(run_folder.claim(folder))
        for member, config in members.items():
            stack.enter_context(run_folder.claim(member))
            run_folder.check_config(member, config)
        _check_members(folder, members)
        checkpoints = stack.enter_context(Checkpoints(folder, common.checkpoint))
        saved = checkpoints.steps()
        if saved:
            state_N, step = checkpoints.restore(saved[-1], program.abstract)
        else:
            state_N, step = program.init(seeds_N), 0
        runs = [_Member(path, config, step) for path, config in members.items()]
        for run in runs:
            stack.callback(run.log.close)
        counted, last = time.perf_counter(), (time.perf_counter(), step)
        while True:
            failed_at_N = np.asarray(state_N["failed_at"])
            going = [
                not run.ended and at == RUNNING
                for run, at in zip(runs, failed_at_N.tolist(), strict=True)
            ]
            if step == common.steps or not any(going):
                break
            if should_stop(step):
                if step not in checkpoints.steps():
                    checkpoints.save(step, state_N, data_position=step, evals=None)
                return False
            stop = _next_event(common, step)
            stops_N = jnp.asarray([stop if on else step for on in going], jnp.int32)
            places_M = jnp.asarray(_places(going, program.side_by_side), jnp.int32)
            state_N, found_N = program.advance(
                state_N, seeds_N, rates_N, jnp.asarray(step, jnp.int32), stops_N, places_M
            )
            found_N = jax.device_get(found_N)
            step = stop
            now = time.perf_counter()
            tokens = common.batch_size * common.data.length * (step - last[1])
            speed = tokens / (now - last[0])
            logs = step % common.log.every == 0 or step == common.steps
            for n, run in enumerate(runs):
                # Its share of the time, so that the seconds of all runs can be summed.
                run.seconds += (now - counted) / sum(going) if going[n] else 0.0
                if going[n] and logs and found_N["finite"][n]:
                    values = {name: float(value[n]) for name, value in found_N.items()}
                    run.note(step, values, {"tokens_per_s": speed, "seconds": run.seconds})
            counted = now
            if logs:
                _say(step, common.steps, found_N, going, speed)
            if common.eval.every and step % common.eval.every == 0:
                for n, run in enumerate(runs):
                    if going[n] and found_N["finite"][n]:
                        flat = _evaluate(program, state_N, n, common.eval.during)[1]
                        run.log.write("eval", step, flat)
                        run.ended = common.eval.stops([flat])
            if step % common.checkpoint.every == 0 or step == common.steps:
                checkpoints.save(step, state_N, data_position=step, evals=None)
            last = (time.perf_counter(), step)
        if step not in checkpoints.steps():
            checkpoints.save(step, state_N, data_position=step, evals=None)
        checkpoints.wait()
        for n, run in enumerate(runs):
            if not run_folder.is_done(run.folder):
                _finish(program, state_N, n, run)
    return True


def _check_members(folder: pathlib.Path, members: Members) -> None:
    """Notes who the members are; the stacked state of a group is of these and in this order."""
    path = folder / "members.json"
    wanted = {str(member): [c.seed, c.optim.lr] for member, c in members.items()}
    if path.is_file():
        check(
            list(read_json(path).items()) == list(wanted.items()),
            f"'{folder}' holds a group of other runs; delete it to train these.",
        )
    else:
        write_atomic(path, "".join(config_lib.json_text(wanted)))


def _next_event(config: config_lib.Config, step: int) -> int:
    """The next step at which something has to be logged, evaluated or saved."""
    intervals = [config.log.every, config.checkpoint.every]
    intervals += [config.eval.every] if config.eval.every else []
    return min(config.steps, *(step - step % every + every for every in intervals))


def _evaluate(program: Program, state_N: Any, n: int, names: str) -> tuple[dict, dict[str, float]]:
    params = jax.tree.map(lambda x: x[n], state_N["params"])
    results = evals.run(names, program.context, params)
    return results, evals.flat_metrics(results)


def _finish(program: Program, state_N: Any, n: int, run: _Member) -> None:
    """The member's last checkpoint and final evals; a failed one only says so."""
    state = jax.tree.map(lambda x: x[n], state_N)
    failed_at, step = int(state.pop("failed_at")), int(state["step"])
    if failed_at != RUNNING:
        run_folder.mark_failed(
            run.folder, f"not finite at step {failed_at}; lower optim.lr or use nonfinite=skip"
        )
        print(f"FAILED at step {failed_at}: {run.folder.name}", flush=True)
        return
    with Checkpoints(run.folder, run.config.checkpoint) as checkpoints:
        if step not in checkpoints.steps():
            checkpoints.save(step, state, data_position=step, evals=None)
    results, flat = _evaluate(program, state_N, n, run.config.eval.final)
    run.log.write("final", step, flat)
    evals.write(run.folder, step, results)
    run_folder.mark_done(run.folder, step)
    shown = "  ".join(f"{name} {value:.4f}" for name, value in flat.items())
    print(f"done: {run.folder.name}  {shown}", flush=True)


def _say(step: int, steps: int, found_N: Any, going: list[bool], speed: float) -> None:
    losses = found_N["loss"][np.asarray(going)]
    print(
        f"step {step:>{len(str(steps))}}/{steps} | {len(losses)} runs | loss {losses.min():.4f} to "
        f"{losses.max():.4f} | {speed:,.0f} tok/s a run",
        flush=True,
    )

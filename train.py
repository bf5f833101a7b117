"""Trains one run from a config, or goes on with it.

    python train.py --config configs/mqar.py --workdir runs/mqar [--config.a.b=value] [--dry_run]
    python train.py --workdir runs/imported [--config.a.b=value]

The same command on the same workdir resumes from the last whole checkpoint, bit for bit; on a
finished run it only evaluates. Without --config it is the workdir's own config that counts, such as
an imported model's. SIGTERM saves and exits with 0.
"""

import argparse
import contextlib
import pathlib
import time
from typing import Any

import grain
import jax

from fastweights import cli, evals, flops, sharding
from fastweights import config as config_lib
from fastweights.data import check_vocab, iterate, train_dataset, vocab_size
from fastweights.errors import UserError, check
from fastweights.training import banner, metrics, optim, run_folder
from fastweights.training.checkpoint import Checkpoints
from fastweights.training.joining import agree, initialize
from fastweights.training.processes import stop_on_sigterm, watch
from fastweights.training.state import init_state, make_blueprint, start_from
from fastweights.training.step import compile_step, place_batch


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, config_lib.Config]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", help="path.py or path.py:arg (default: the workdir's own)")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="the run's folder")
    parser.add_argument("--dry_run", action="store_true", help="print the plan, train nothing")
    parser.add_argument("--multihost", action="store_true", help="this is one process of several")
    parser.add_argument("--coordinator", help="host:port of process 0 (default: ask the cluster)")
    parser.add_argument("--num_processes", type=int, help="(default: ask the cluster)")
    parser.add_argument("--process_id", type=int, help="(default: ask the cluster)")
    parser.add_argument("--init_timeout", type=int, default=300, help="seconds to find the others")
    parser.add_argument(
        "--silence", type=int, default=100, help="seconds after which a silent process is dead"
    )
    args, overrides = cli.parse(parser, argv)
    if args.config is None:
        return args, config_lib.override(run_folder.load_config(args.workdir), overrides)
    return args, config_lib.load(args.config, overrides)


def main(argv: list[str] | None = None) -> int:
    # ---- Config, processes, mesh ----------------------------------------------------------------
    args, config = parse_args(argv)
    others = (args.coordinator, args.num_processes, args.process_id)
    if args.multihost:
        initialize(*others, args.init_timeout, args.silence)
        agree(config)
    else:
        alone = all(told is None for told in others)
        check(alone, "--coordinator, --num_processes and --process_id go with --multihost; add it.")
    should_stop = stop_on_sigterm()
    lead = jax.process_index() == 0
    changed = run_folder.check_config(args.workdir, config)
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(config.batch_size // config.accum_steps, mesh, config.data.length)

    # ---- Data: batch i is a function of (seed, i), so its position is one number ----------------
    check_vocab(vocab_size(config.data), config.model.vocab_size)
    index, count = sharding.share_of_rows(mesh)
    dataset = train_dataset(
        config.data,
        seed=config.seed,
        rows=config.batch_size,
        process_index=index,
        process_count=count,
    )

    # ---- State and step, compiled once ----------------------------------------------------------
    tx = optim.make_optimizer(config.optim, config.steps)
    blueprint = make_blueprint(config.model, tx, mesh)
    started = time.perf_counter()
    compiled = compile_step(config, blueprint, tx, mesh)
    if lead:
        seconds = time.perf_counter() - started
        print(banner.describe(config, mesh, blueprint, compiled, seconds), flush=True)
    if args.dry_run:
        return 0

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        if lead:
            stack.enter_context(run_folder.claim(args.workdir))
        checkpoints = stack.enter_context(Checkpoints(args.workdir, config.checkpoint))
        stack.enter_context(watch(args.workdir, args.silence))

        # ---- Restore: the run's own last whole checkpoint, else a fresh state -------------------
        saved = checkpoints.steps()
        if saved and saved[-1] > 0:
            step = saved[-1]
            state, position = checkpoints.restore(step, blueprint.abstract)
        elif saved:
            # An imported model: parameters alone, and no step taken yet.
            step, position = 0, 0
            params = checkpoints.restore_params(step, blueprint.abstract)
            state = start_from(params, tx, blueprint)
        else:
            step, position = 0, 0
            state = init_state(config.model, tx, blueprint, config.seed)

        # ---- Run folder, written only now that the restore has worked ---------------------------
        wandb_run = None
        if lead:
            run_folder.open_run(args.workdir, config, step)
            for name, (old, new) in changed.items():
                print(f"config field {name} changes from {old!r} to {new!r}")
            run_id = run_folder.read_info(args.workdir)["id"]
            fields = config_lib.flat(config)
            wandb_run = metrics.start_wandb(config.log, args.workdir, run_id, fields)
        batches = iterate(dataset)
        grain.experimental.set_next_index(batches, position)
        context = evals.Context(config, blueprint.graphdef, mesh, args.workdir)
        log = metrics.MetricsLog(args.workdir, step=step, lead=lead, wandb_run=wandb_run)
        stack.callback(log.close)
        progress = metrics.Progress(config.steps, step, seconds=log.seconds, quiet=not lead)
        stack.callback(progress.close)
        if saved:
            only = ": this run is finished, evaluating only" if step == config.steps else ""
            progress.say(f"resuming from step {step} of {config.steps}{only}")

        # ---- Loop: eval, save, next batch, step, in this order ----------------------------------
        schedule = optim.schedule(config.optim, config.steps)
        tokens = config.batch_size * config.data.length
        work = tokens * flops.train_flops_per_token(config.model, config.data.length)
        peak = flops.peak_flops(jax.devices()[0].device_kind)
        peak_all = peak and peak * jax.device_count()
        names = [
            "params." + ".".join(optim.path_names(p))
            for p, _ in jax.tree_util.tree_flatten_with_path(blueprint.abstract["params"])[0]
        ]
        resumed_at = step if saved else -1
        profiling = False
        good_enough = config.eval.stops(metrics.read_metrics(args.workdir, "eval"))

        def finish_step(number: int, pending: Any) -> None:
            """Reads the metrics of step `number`, which the device may still be working on."""
            values = jax.device_get(pending)
            if not values["finite"]:
                _not_finite(config, number, values, names, progress, checkpoints)
            if number % config.log.every == 0 or number in (1, config.steps):
                record = {k: float(v) for k, v in values.items() if v.ndim == 0}
                record["lr"] = float(schedule(number - 1))
                record |= progress.interval(number, tokens, work, peak_all)
                log.write("train", number, record)
                progress.line(number, record)
            progress.advance(number)

        pending = None
        while True:
            finished = step == config.steps or good_enough
            ending = finished or should_stop(step)
            results = {}
            if step > 0 and step != resumed_at:
                due_eval = config.eval.every > 0 and step % config.eval.every == 0
                due_save = ending or step % config.checkpoint.every == 0
                if (due_eval or due_save) and pending is not None:
                    finish_step(step, pending)
                    pending = None
                paused = time.perf_counter()
                if due_eval:
                    results = evals.flat_metrics(
                        evals.run(config.eval.during, context, state["params"])
                    )
                    log.write("eval", step, results)
                    shown = "  ".join(f"{k} {v:.4f}" for k, v in results.items())
                    progress.say(f"  eval at step {step}: {shown}")
                    if config.eval.stops([results]):
                        progress.say(f"  eval.stop_at {config.eval.stop_at} is reached")
                        finished = ending = due_save = True
                if due_save:
                    checkpoints.save(step, state, data_position=position, evals=results)
                if due_eval or due_save:
                    progress.leave_out(time.perf_counter() - paused)
            if ending:
                break

            if config.log.profile_start and step == config.log.profile_start:
                jax.profiler.start_trace(str(args.workdir / "profile"))
                profiling = True
            waiting = time.perf_counter()
            batch = next(batches)
            progress.waited(time.perf_counter() - waiting)
            placed = place_batch(batch, mesh)
            with (
                jax.transfer_guard("disallow"),
                jax.profiler.StepTraceAnnotation("train", step_num=step),
            ):
                state, new_pending = compiled(state, placed)
            step, position = step + 1, position + 1
            # The step before is read only now, while the device works on this one.
            if pending is not None:
                finish_step(step - 1, pending)
            pending = new_pending
            if profiling and step >= config.log.profile_start + config.log.profile_steps:
                jax.block_until_ready(state)
                jax.profiler.stop_trace()
                profiling = False

        if profiling:
            jax.profiler.stop_trace()
        checkpoints.wait()
        if not finished:
            saved_it = "saved" if step else "nothing to save yet"
            progress.say(f"stopped by SIGTERM at step {step}, {saved_it}; the same command goes on")
            return 0

        # ---- Final evals ------------------------------------------------------------------------
        final = evals.run(config.eval.final, context, state["params"])
        log.write("final", step, evals.flat_metrics(final))
        if lead:
            evals.write(args.workdir, step, final)
            evals.print_tables(step, final)
            run_folder.mark_done(args.workdir, step)
            progress.say(f"done: {args.workdir}")
    return 0


def _not_finite(
    config: config_lib.Config,
    step: int,
    values: dict[str, Any],
    names: list[str],
    progress: metrics.Progress,
    checkpoints: Checkpoints,
) -> None:
    """Ends the run, or says that the update was dropped, as the config wants it."""
    bad = [name for name, is_bad in zip(names, values["bad_gradients"], strict=True) if is_bad]
    cause = f"loss is {values['loss']}, gradient norm {values['grad_norm']}"
    if bad:
        cause += f", not finite in {len(bad)} of {len(names)} gradients (first: {bad[0]})"
    if config.optim.nonfinite == "skip":
        progress.say(f"step {step}: {cause}; update skipped")
        return
    raise UserError(
        f"step {step}: {cause}; stopped before its update (checkpoints: "
        f"{checkpoints.steps() or 'none'}): lower optim.lr, or set optim.nonfinite=skip."
    )


if __name__ == "__main__":
    cli.run(main)

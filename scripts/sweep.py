"""Runs every point of a sweep, skipping those that are done.

    python scripts/sweep.py --config configs/sweep_ratio.py --workdir runs/ratio [--jobs 2]

The config file has, beside `get_config(arg)`, a `sweep()` that yields one dict of dotted overrides
a point, such as {"model.pattern": "GA", "seed": 0}; `fastweights.sweeps.grid` makes them from axes,
and the key "arg" hands `get_config` its argument.
Each point is a run in a folder named after its overrides. With `data.on_device=true` points that
differ in seed and learning rate alone train as one program.

On a cluster, `--jobs 8 --slurm time=240,partition=gpu,gpus_per_node=1` makes each process a job of
Slurm (`pip install "fastweights[slurm]"`), eight at a time; one that runs out of time is queued
again and goes on.

Started again, a sweep goes on where it stopped, inside a run too; processes that outlived a killed
one are waited for. A failed run is told, becomes a row of the table that says why, stops no other,
and is tried again with --retry; the exit code is 1 if any failed.
"""

import argparse
import concurrent.futures
import contextlib
import pathlib
import sys
import threading
import time

from fastweights import cli, launching, sweeps
from fastweights.errors import check
from fastweights.training import run_folder

ROOT = pathlib.Path(__file__).resolve().parent.parent
POLL_SECONDS = 1.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", required=True, help="config file with sweep()")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time")
    parser.add_argument("--group", type=int, default=16, help="runs in one program at most")
    parser.add_argument("--slurm", help="run processes as Slurm jobs: time=MINUTES,KEY=VALUE,...")
    parser.add_argument("--only", default="", help="run only points whose name has this in it")
    parser.add_argument("--retry", action="store_true", help="try failed points again")
    parser.add_argument("--dry_run", action="store_true", help="list the points, run nothing")
    args, overrides = cli.parse(parser, argv)
    check(args.jobs >= 1, f"--jobs is {args.jobs}; use 1 or more.")
    check(args.group >= 1, f"--group is {args.group}; use 1 (no groups) or more.")

    points = [p for p in sweeps.read_points(args.config, overrides) if args.only in p.name]
    check(bool(points), f"--only '{args.only}' is in no point's name; see them with --dry_run.")
    print(f"{len(points)} runs in {args.workdir}", flush=True)
    if args.dry_run:
        print("\n".join(point.name for point in points))
        return 0
    for point in points:
        if args.retry and sweeps.state(args.workdir, point) == "failed":
            (args.workdir / point.name / "FAILED").unlink()
    units = sweeps.plan(args.workdir, points, args.group)
    waiting = {point.name for unit in units for point in unit.points}
    for point in points:
        if point.name not in waiting:
            tell(args.workdir, point)
    started = time.perf_counter()
    # Points that differ in seed alone, and restarts, share their compiled programs.
    env = {"JAX_COMPILATION_CACHE_DIR": str(args.workdir.absolute() / ".compiled")}
    leaving = threading.Event()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(args.jobs))
        # Left before the pool, which waits for what it has begun: Slurm's jobs are cancelled first.
        launch = (
            launching.here(env, args.jobs)
            if args.slurm is None
            else stack.enter_context(launching.slurm(args.workdir / ".slurm", args.slurm, env))
        )
        tasks = [pool.submit(run_unit, args.workdir, unit, launch, leaving) for unit in units]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            leaving.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    seconds = time.perf_counter() - started
    done = sum(sweeps.state(args.workdir, point) == "done" for point in points)
    failed = len(points) - done
    print(f"{done} of {len(points)} runs done in {seconds:.0f} s, {failed} failed")
    return 1 if failed else 0


def tell(workdir: pathlib.Path, point: sweeps.Point) -> None:
    """One line on a point that is not to be trained."""
    if sweeps.state(workdir, point) == "done":
        print(f"skipped (done)  {point.name}", flush=True)
    else:
        print(
            f"FAILED before  {point.name}: {run_folder.failure(workdir / point.name)}", flush=True
        )


def busy(workdir: pathlib.Path, unit: sweeps.Unit) -> bool:
    """Whether a process has the unit, or with another one some of its points."""
    folders = (unit.folder, *(workdir / point.name for point in unit.points))
    return any(run_folder.in_use(folder) for folder in folders)


def run_unit(
    workdir: pathlib.Path,
    unit: sweeps.Unit,
    launch: launching.Launch,
    leaving: threading.Event,
) -> None:
    """Trains one point or group in a process of its own, its output in `log.txt`.

    One that an earlier start of the sweep left behind is waited for, unless `leaving` is set.
    """
    if busy(workdir, unit):
        print(f"waiting  {unit.name[:80]}: another process trains it", flush=True)
        while busy(workdir, unit):
            if leaving.wait(POLL_SECONDS):
                return
        if all(sweeps.state(workdir, point) != "open" for point in unit.points):
            for point in unit.points:
                tell(workdir, point)
            return
    try:
        if len(unit.points) > 1:
            sweeps.note_group(unit)
            command = [sys.executable, str(ROOT / "scripts/train_group.py"), str(unit.folder)]
        else:
            unit.folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, str(ROOT / "train.py"), "--config", unit.points[0].spec]
            command += ["--workdir", str(unit.folder)]
            command += [f"--config.{field}" for field in unit.points[0].fields]
    except OSError as error:
        print(f"FAILED  {unit.name[:80]}: {error.strerror}", flush=True)
        return
    started = time.perf_counter()
    log_path = (
        workdir / f"{unit.folder.name}.log" if len(unit.points) > 1 else (unit.folder / "log.txt")
    )
    said_before = log_path.stat().st_size if log_path.exists() else 0
    code = launch(command, log_path)
    if busy(workdir, unit):  # One that was left behind while it started was quicker.
        run_unit(workdir, unit, launch, leaving)
        return
    seconds = time.perf_counter() - started
    lines = log_path.read_bytes()[said_before:].decode(errors="replace").strip().splitlines()
    # What a process says while it ends is not the cause.
    causes = [line for line in lines if line.startswith("error: ")]
    last = " ".join((causes or lines)[-1:])
    for point in unit.points:
        state = sweeps.state(workdir, point)
        if state == "done":
            print(f"done {seconds:8.0f} s  {point.name}", flush=True)
            continue
        if state == "open" and code <= 0:
            print(f"stopped  {point.name}: the same command goes on with it", flush=True)
            continue
        if state == "open":
            # Not of one that a signal ended: it can go on.
            (workdir / point.name).mkdir(exist_ok=True)
            run_folder.mark_failed(workdir / point.name, last)
        cause = run_folder.failure(workdir / point.name) or last
        print(f"FAILED (exit {code})  {point.name}: {cause}", flush=True)


if __name__ == "__main__":
    cli.run(main)

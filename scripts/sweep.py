"""Runs every point of a sweep, skipping those that are done.

    python scripts/sweep.py --config configs/sweep_ratio.py --workdir runs/ratio [--jobs 2]

The config file has, beside `get_config(arg)`, a `sweep()` that yields one dict of dotted overrides
a point, such as {"model.pattern": "GA", "seed": 0}. Each point is a run of train.py in a folder
named after its overrides: started again, a sweep goes on where it stopped, inside a run too. A
failed run is reported and does not stop the others; the exit code is 1 if any failed.
"""

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from fastweights import cli
from fastweights import config as config_lib
from fastweights.errors import UserError, check
from fastweights.training import run_folder

TRAIN = pathlib.Path(__file__).resolve().parent.parent / "train.py"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", required=True, help="config file with sweep()")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--dry_run", action="store_true", help="list the points, run nothing")
    args, overrides = cli.parse(parser, argv)
    check(args.jobs >= 1, f"--jobs is {args.jobs}; use 1 or more.")

    points = read_points(args.config, overrides)
    print(f"{len(points)} runs in {args.workdir}", flush=True)
    if args.dry_run:
        print("\n".join(points))
        return 0
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        tasks = [
            pool.submit(run_point, args.config, args.workdir / name, fields)
            for name, fields in points.items()
        ]
        try:
            failed = sum(not task.result() for task in tasks)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    seconds = time.perf_counter() - started
    print(f"{len(points) - failed} of {len(points)} runs done in {seconds:.0f} s, {failed} failed")
    return 1 if failed else 0


def read_points(spec: str, overrides: list[str]) -> dict[str, list[str]]:
    """Run name -> overrides of each point; all are checked before any runs.

    Raises:
      UserError: no sweep() in the file, two points of one name, or a point that is no valid config.
    """
    points: dict[str, list[str]] = {}
    found = config_lib.call_config_file(spec, "sweep", pass_arg=False)
    check(
        isinstance(found, list | tuple) and all(isinstance(point, dict) for point in found),
        f"{spec}: sweep() gives {found!r:.80}; it must yield one dict of overrides a run.",
    )
    for point in found:
        name = run_name(point)
        check(name not in points, f"{spec}: two points of sweep() are both '{name}'; drop one.")
        fields = [*overrides, *(f"{path}={value}" for path, value in point.items())]
        try:
            config_lib.load(spec, fields)
        except UserError as error:
            raise UserError(f"{spec}: sweep point '{name}': {error}") from error
        points[name] = fields
    check(bool(points), f"{spec}: sweep() yields no point; yield one dict of overrides a run.")
    return points


def run_name(point: dict[str, Any]) -> str:
    """`pattern=GA,lr=0.003,seed=0`: the last part of each field."""
    return ",".join(f"{path.split('.')[-1]}={value}" for path, value in point.items())


def run_point(spec: str, workdir: pathlib.Path, fields: list[str]) -> bool:
    """Trains one point, its output in `log.txt`; returns whether it is done."""
    if run_folder.is_done(workdir) and is_this_run(workdir, config_lib.load(spec, fields)):
        print(f"skipped (done)  {workdir.name}", flush=True)
        return True
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"FAILED  {workdir.name[:80]}: {error.strerror}", flush=True)
        return False
    command = [sys.executable, str(TRAIN), "--config", spec, "--workdir", str(workdir)]
    command += [f"--config.{field}" for field in fields]
    started = time.perf_counter()
    # Points that differ in seed alone, and restarts, share their compiled programs.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent / ".compiled")} | os.environ
    with (workdir / "log.txt").open("a") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=cache).returncode
    seconds = time.perf_counter() - started
    done = code == 0 and run_folder.is_done(workdir)
    if done:
        print(f"done {seconds:8.0f} s  {workdir.name}", flush=True)
    else:
        last = (workdir / "log.txt").read_text().strip().splitlines()[-1:]
        print(f"FAILED (exit {code})  {workdir.name}: {' '.join(last)}", flush=True)
    return done


def is_this_run(workdir: pathlib.Path, wanted: config_lib.Config) -> bool:
    """Whether the folder's run has this config, but for fields that leave its result alone."""
    changed = config_lib.differences(run_folder.load_config(workdir), wanted)
    return all(config_lib.is_safe(name) and name != "steps" for name in changed)


if __name__ == "__main__":
    cli.run(main)

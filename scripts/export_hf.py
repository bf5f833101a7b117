"""Writes a run's model as a published one: a folder that transformers loads.

    python scripts/export_hf.py --workdir runs/qwen --out models/mine [--step 500]

An imported model goes back as it came: the same files, names, dtypes and tensors kept aside. One
that was trained from scratch here is written where a published family has all its parts; otherwise
the error says which part none has. The folder appears when it is complete.
"""

import argparse
import pathlib

import jax

from fastweights import cli, interop, sharding
from fastweights.errors import check
from fastweights.model import DTYPES
from fastweights.training import optim, run_folder
from fastweights.training.checkpoint import Checkpoints
from fastweights.training.state import make_blueprint


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="the run's folder")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to make")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the last)")
    parser.add_argument("--dtype", choices=DTYPES, help="of a model from scratch (its parameters')")
    args = parser.parse_args(argv)

    config = run_folder.load_config(args.workdir)
    record = interop.load_record(args.workdir)
    check(
        record is None or args.dtype is None,
        f"'{args.workdir}' was imported and goes back in the dtypes it came in; leave --dtype out.",
    )
    if record is None:
        interop.express(config.model)  # says what can't be written before anything is loaded
    check(not args.out.exists(), f"'{args.out}' exists already; name a new folder or remove it.")
    mesh = sharding.make_mesh(config.mesh)
    blueprint = make_blueprint(config.model, optim.make_optimizer(config.optim, config.steps), mesh)
    with jax.set_mesh(mesh), Checkpoints(args.workdir, config.checkpoint, read_only=True) as saved:
        step = saved.choose(args.step)
        params = saved.restore_params(step, blueprint.abstract)
        if record is None:
            dtype = args.dtype or config.model.param_dtype
            name = interop.export_new(params, config.model, args.out, dtype)
        else:
            name = "as imported"
            interop.export_imported(params, config.model, record, args.out)
    print(f"{args.out}: step {step} of '{args.workdir}' ({name})")
    return 0


if __name__ == "__main__":
    cli.run(main)

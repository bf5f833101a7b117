"""Evaluates a run's checkpoint and writes the results into its folder.

    python eval.py --workdir runs/mqar [--step 1600] [--evals recall,length]

The model and the data come from the run's own config. `--config.a.b=value` overrides fields that do
not change the model, such as --config.data.mqar.test or --config.batch_size; the results are then
printed and not written, for they are not the run's own.
"""

import argparse
import pathlib

import jax

from fastweights import cli, evals, sharding
from fastweights import config as config_lib
from fastweights.data import check_vocab, vocab_size
from fastweights.errors import check
from fastweights.training import optim, run_folder
from fastweights.training.checkpoint import Checkpoints
from fastweights.training.state import make_blueprint


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="the run's folder")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the last)")
    parser.add_argument("--evals", help=f"comma-separated: {', '.join(evals.EVALS)}")
    args, overrides = cli.parse(parser, argv)

    stored = run_folder.load_config(args.workdir)
    config = config_lib.override(stored, overrides)
    changed = config_lib.differences(stored, config)
    for name, (old, new) in changed.items():
        check(
            not name.startswith("model.") or name.endswith(config_lib.FREE),
            f"--config.{name}={new} would change the model (it is {old!r}); leave it as it is.",
        )
    names = config.eval.final if args.evals is None else args.evals
    evals.check_fits(names, config.data)
    check_vocab(vocab_size(config.data), config.model.vocab_size)
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(config.batch_size // config.accum_steps, mesh)
    tx = optim.make_optimizer(config.optim, config.steps)
    blueprint = make_blueprint(config.model, tx, mesh)

    checkpoints = Checkpoints(args.workdir, config.checkpoint, read_only=True)
    with jax.set_mesh(mesh), checkpoints:
        step = checkpoints.choose(args.step)
        params = checkpoints.restore_params(step, blueprint.abstract)
        results = evals.run(names, evals.Context(config, blueprint.graphdef, mesh), params)
    if not changed:
        evals.write(args.workdir, step, results)
    evals.print_tables(step, results)
    return 0


if __name__ == "__main__":
    cli.run(main)

"""Evaluates a run's checkpoint and writes the results into its folder.

    python eval.py --workdir runs/mqar [--step 1600] [--evals recall,length,harness:TASK]

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
from fastweights.training import run_folder
from fastweights.training.loading import load_params


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="the run's folder")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the last)")
    parser.add_argument("--evals", help=f"comma-separated: {evals.KNOWN}")
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
    with jax.set_mesh(mesh):
        loaded = load_params(args.workdir, config, mesh, args.step)
        context = evals.Context(config, loaded.graphdef, mesh, args.workdir)
        results = evals.run(names, context, loaded.params)
    if not changed:
        evals.write(args.workdir, loaded.step, results)
    evals.print_tables(loaded.step, results)
    return 0


if __name__ == "__main__":
    cli.run(main)

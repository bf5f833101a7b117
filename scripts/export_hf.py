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
from fastweights.data import DataConfig
from fastweights.data.pipeline import TEXT
from fastweights.data.tokenizer import BYTES, load_tokenizer
from fastweights.errors import UserError, check
from fastweights.model import DTYPES
from fastweights.training import run_folder
from fastweights.training.loading import load_params


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
    try:
        mesh = sharding.make_mesh(config.mesh)
    except UserError:  # other devices than it was trained on: one will do
        mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        loaded = load_params(args.workdir, config, mesh, args.step)
        if record is None:
            dtype = args.dtype or config.model.param_dtype
            found = tokenizer_file(config.data, args.workdir)
            end_id = None
            if found is not None or config.data.kind == TEXT:
                end_id = load_tokenizer(found or BYTES).eod_id
            name = interop.export_new(
                loaded.params, config.model, args.out, dtype, end_id=end_id, tokenizer=found
            )
        else:
            name = "as imported"
            interop.export_imported(loaded.params, config.model, record, args.out)
    print(f"{args.out}: step {loaded.step} of '{args.workdir}' ({name})")
    return 0


def tokenizer_file(data: DataConfig, workdir: pathlib.Path) -> pathlib.Path | None:
    """The tokenizer.json of a run; None for one that read bytes or no text."""
    places = [workdir / interop.TOKENIZER]
    if data.kind == TEXT and data.text.path:
        places.append(pathlib.Path(data.text.path) / interop.TOKENIZER)
    elif data.kind == TEXT and data.text.tokenizer != BYTES:
        places.append(pathlib.Path(data.text.tokenizer))
    return next((path for path in places if path.is_file()), None)


if __name__ == "__main__":
    cli.run(main)

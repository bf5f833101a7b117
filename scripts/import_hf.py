"""Makes a run folder out of a published model: a folder with config.json and safetensors.

    python scripts/import_hf.py models/Qwen3.5-0.8B --workdir runs/qwen
    python eval.py --workdir runs/qwen
    python train.py --workdir runs/qwen --config.steps=500 --config.optim.lr=1e-5

Families: Qwen3.5, Qwen3-Next, OLMo-Hybrid, Mamba-2, Mamba. `--config.a.b=value` sets any field of
the run but those that say which model it is; until it has trained, `train.py` may change them too.
"""

import argparse
import dataclasses
import pathlib

import jax

from fastweights import cli, interop, sharding
from fastweights import config as config_lib
from fastweights.data.tokenizer import BYTES, load_tokenizer
from fastweights.errors import check
from fastweights.files import new_folder
from fastweights.model import DTYPES, ModelConfig
from fastweights.training import run_folder
from fastweights.training.checkpoint import Checkpoints


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="the published model")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="run folder to make")
    args, overrides = cli.parse(parser, argv)

    source = interop.open_checkpoint(args.folder)
    if (args.folder / interop.TOKENIZER).is_file():
        load_tokenizer(args.folder / interop.TOKENIZER)  # a broken one is told now
    start = run_config(source, args.workdir)
    config = config_lib.override(start, overrides)
    for name, (old, new) in config_lib.differences(start, config).items():
        check(
            not name.startswith("model.") or name.endswith(config_lib.FREE + interop.DTYPE_FIELDS),
            f"--config.{name}={new} would be another model than '{args.folder}' holds (it is "
            f"{old!r}); leave it as it is.",
        )
    mesh = sharding.make_mesh(config.mesh)
    with new_folder(args.workdir) as partial, jax.set_mesh(mesh):
        params = interop.load_params(source, config.model, mesh)
        interop.save_record(source, partial)
        with Checkpoints(partial, config.checkpoint) as checkpoints:
            checkpoints.save(0, {"params": params}, data_position=0, evals=None)
            checkpoints.wait()
        run_folder.open_run(partial, config, 0)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{args.workdir}: {source.family.name}, {config.model.num_layers} layers "
        f"{config.model.pattern}, {count:,} parameters in {config.model.param_dtype}, computing in "
        f"{config.model.dtype}"
    )
    return 0


def run_config(source: interop.Checkpoint, workdir: pathlib.Path) -> config_lib.Config:
    """A careful fine-tuning on text; parameters are float32, which updates can add up in."""
    model: ModelConfig = source.model
    if source.dtype in DTYPES:
        model = dataclasses.replace(model, dtype=source.dtype)
    fields = config_lib.defaults()
    fields.steps, fields.batch_size, fields.loss_chunk = 1000, 8, 256
    fields.data.kind, fields.data.length = "text", 512
    # Its own tokenizer where it has one; byte by byte only until real data are named.
    has_tokenizer = (tokenizer := source.folder / "tokenizer.json").is_file()
    fields.data.text.tokenizer = str(workdir / tokenizer.name) if has_tokenizer else BYTES
    fields.optim.lr, fields.optim.weight_decay = 1e-5, 0.0
    fields.eval.during = fields.eval.final = "ppl"
    fields.eval.max_batches = 50
    return dataclasses.replace(config_lib.freeze(fields), model=model)


if __name__ == "__main__":
    cli.run(main)

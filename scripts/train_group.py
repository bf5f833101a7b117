"""Trains the runs of one group of a sweep as one program; scripts/sweep.py starts it.

    python scripts/train_group.py runs/ratio/.groups/0123456789ab

Started again it goes on; SIGTERM saves and exits with 0.
"""

import argparse
import pathlib
import shutil

from fastweights import cli, sweeps
from fastweights.errors import check
from fastweights.training import group
from fastweights.training.processes import stop_on_sigterm


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="the group's folder")
    args, rest = cli.parse(parser, argv)
    check(not rest, f"a group's configs are fixed when it is begun, so {rest} can't be changed.")
    check(
        (args.folder / "group.json").is_file(),
        f"'{args.folder}' holds no group (no group.json); let scripts/sweep.py make it.",
    )
    finished = group.train(args.folder, sweeps.read_group(args.folder), stop_on_sigterm())
    if finished:
        # All that matters lies in the members' folders now.
        shutil.rmtree(args.folder)
    return 0


if __name__ == "__main__":
    cli.run(main)

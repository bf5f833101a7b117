"""Where a hybrid's attention layers belong: first, in the middle, last, or spread.

    python scripts/reproduce.py placement --workdir runs/placement          (one GPU)

Eight layers of which two are attention, the same in all, on 1 to 8 hops along shuffled edges and
on values written again; the rest as in ratio.py. Published (Meta 2025, Mamba-2 with one attention
layer in 13, loss at 1B parameters): first 2.771, middle 2.740; spread is as good as the middle. The
claim is that first is the worst. Not run yet.
"""

import pathlib

from ml_collections import ConfigDict

from fastweights.config import load_dict, parse_arg
from fastweights.reproduction import Order
from fastweights.sweeps import SEEDS, learning_rates

PLACES = {
    "first": "AAGGGGGG",
    "middle": "GGGAAGGG",
    "last": "GGGGGGAA",
    "spread": "GGGAGGGA",
}
# Task -> the slice that is judged.
TASKS = {"k_hop": "T96_K32_H4", "mqar_overwrite": "T160_K32_U16"}
META = "Meta 2025, arXiv:2510.04800"


def get_config(arg: str | None = None) -> ConfigDict:
    options = parse_arg(arg, task="k_hop", place="spread")
    base = pathlib.Path(__file__).with_name("ratio.py")
    return load_dict(f"{base}:task={options.task},pattern={PLACES[options.place]},layers=8")


def sweep():
    for task in TASKS:
        for place in PLACES:
            for lr in learning_rates(1e-2):
                for seed in SEEDS:
                    yield {"arg": f"task={task},place={place}", "optim.lr": lr, "seed": seed}


def claims():
    for task, part in TASKS.items():
        for place in ("middle", "last", "spread"):
            runs = (f"task={task},place={name}" for name in (place, "first"))
            yield Order(*runs, slice=part, by=0.02, source=META)

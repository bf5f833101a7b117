"""Where a hybrid's attention layers belong: first, in the middle, last, or spread.

    python scripts/reproduce.py placement --workdir runs/placement          (one GPU)

Eight layers of which two are attention, on 1 to 4 hops along shuffled edges; the rest as in
ratio.py. Published (Meta 2025, Mamba-2 with one attention layer in 13, loss at 1B parameters):
first 2.771, middle 2.740; spread is as good as the middle. The claim is that first is the worst.
On an H200 it is (results/placement_h200.csv, docs/measurements.md; 3.2e-2 was not run with
first and spread).
"""

import pathlib

from ml_collections import ConfigDict

from fastweights.config import load_dict, parse_arg
from fastweights.reproduction import ALL, Order
from fastweights.sweeps import SEEDS, learning_rates

PLACES = {
    "first": "AAGGGGGG",
    "middle": "GGGAAGGG",
    "last": "GGGGGGAA",
    "spread": "GGGAGGGA",
}
META = "Meta 2025, arXiv:2510.04800"


def get_config(arg: str | None = None) -> ConfigDict:
    options = parse_arg(arg, place="spread")
    base = pathlib.Path(__file__).with_name("ratio.py")
    return load_dict(f"{base}:task=k_hop,pattern={PLACES[options.place]},layers=8")


def sweep():
    for place in PLACES:
        for lr in learning_rates(3.2e-2):
            for seed in SEEDS:
                yield {"arg": f"place={place}", "optim.lr": lr, "seed": seed}


def claims():
    for place in ("middle", "last", "spread"):
        runs = (f"place={name}" for name in (place, "first"))
        yield Order(*runs, slice=ALL, by=0.02, source=META)

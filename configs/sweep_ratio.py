"""How much attention does recall need? Stacks from all to none of their layers attention.

    python scripts/sweep.py --config configs/sweep_ratio.py --workdir runs/ratio
    python scripts/collect.py runs/ratio > ratio.csv
    python scripts/plot.py ratio.csv --out ratio.png

Pure attention, hybrids of one to one, three to one and seven to one, and pure Gated DeltaNet,
DeltaNet and linear attention, each at two learning rates and two seeds, on recall of 8 pairs in 32
tokens. Four layers, and eight for seven to one, which has one attention layer as three to one has.
"""

import itertools
import pathlib

from ml_collections import ConfigDict

from fastweights.config import load_dict, parse_arg

PATTERNS = ("A", "GA", "GGGA", "GGGGGGGA", "G", "D", "L")
LEARNING_RATES = (3e-3, 1e-2)
SEEDS = (0, 1)


def get_config(arg: str | None = None) -> ConfigDict:
    parse_arg(arg)
    config = load_dict(str(pathlib.Path(__file__).with_name("mqar.py")))
    config.steps = 800
    config.data.length = 32
    config.data.mqar.vocab_size = config.model.vocab_size = 64
    config.data.mqar.train = ((32, 8, 1.0),)
    config.data.mqar.test = ((16, 4), (32, 8))
    config.model.num_layers = 4
    for letter in "LDG":
        mixer = config.model.mixers[letter]
        mixer.head_dim, mixer.value_head_dim = 8, 16
    config.optim.warmup_steps = 50
    config.eval.every = config.checkpoint.every = 400
    return config


def sweep():
    for seed, lr, pattern in itertools.product(SEEDS, LEARNING_RATES, PATTERNS):
        yield {
            "model.pattern": pattern,
            "model.num_layers": max(4, len(pattern)),
            "optim.lr": lr,
            "seed": seed,
        }

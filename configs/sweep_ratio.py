"""How much attention does recall need? Eight layers from all to none of them attention.

    python scripts/sweep.py --config configs/sweep_ratio.py --workdir runs/ratio --jobs 2
    python scripts/collect.py runs/ratio > ratio.csv
    python scripts/plot.py ratio.csv --out ratio.png

Patterns from pure attention over 1:1, 3:1 and 7:1 hybrids to pure Gated DeltaNet, DeltaNet and
linear attention, each at two learning rates and two seeds, on recall of 8 pairs in 32 tokens.
"""

import itertools
import pathlib

from ml_collections import ConfigDict

from fastweights.config import load_dict

PATTERNS = ("A", "GA", "GGGA", "GGGGGGGA", "G", "D", "L")
LEARNING_RATES = (3e-3, 1e-2)
SEEDS = (0, 1)


def get_config(arg: str | None = None) -> ConfigDict:
    config = load_dict(str(pathlib.Path(__file__).with_name("mqar.py")))
    config.steps = 600
    config.data.length = 32
    config.data.mqar.vocab_size = config.model.vocab_size = 64
    config.data.mqar.train = ((32, 8, 1.0),)
    config.data.mqar.test = ((16, 4), (32, 8))
    config.model.num_layers = 8
    for letter in "LDG":
        mixer = config.model.mixers[letter]
        mixer.head_dim, mixer.value_head_dim = 4, 16
    config.optim.warmup_steps = 30
    config.eval.every = config.checkpoint.every = 200
    return config


def sweep():
    for pattern, lr, seed in itertools.product(PATTERNS, LEARNING_RATES, SEEDS):
        yield {"model.pattern": pattern, "optim.lr": lr, "seed": seed}

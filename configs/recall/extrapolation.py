"""Hybrids beyond the trained length: attention layers without positions against rotary ones.

    python scripts/reproduce.py extrapolation --workdir runs/extrapolation          (one GPU)

The hybrid of niah.py (three Gated DeltaNet layers, one of attention) on a number in text: trained
on 128 to 512 bytes, asked up to four times as far, with rotary positions on all of each head, a
quarter of it, or none. Published (Kimi Linear 2025): layers without positions do better in long
contexts than rotary ones, for the recurrent layers tell the order. Rotary positions get no
extension here. Not run yet.
"""

import pathlib

from ml_collections import ConfigDict

from fastweights.config import load_dict, parse_arg
from fastweights.reproduction import Claim, Order
from fastweights.sweeps import SEEDS, learning_rates

SHARES = (0.0, 0.25, 1.0)
KIMI = "Kimi Linear 2025, arXiv:2510.26692"


def get_config(arg: str | None = None) -> ConfigDict:
    options = parse_arg(arg, rope=0.0)
    base = pathlib.Path(__file__).with_name("niah.py")
    return load_dict(f"{base}:variant=single_2,mixer=GGGA,rope={options.rope}")


def sweep():
    for share in SHARES:
        for lr in learning_rates(1e-2):
            for seed in SEEDS:
                yield {"arg": f"rope={share}", "optim.lr": lr, "seed": seed}


def claims():
    for share in SHARES:
        # Within the trained length positions make no difference.
        yield Claim(f"rope={share}", "T512_K1", low=0.98, source=KIMI, over="mean")
    yield Order("rope=0.0", "rope=1.0", "T2048_K1", 0.02, KIMI, eval="length")

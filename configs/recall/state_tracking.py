"""What can a recurrence keep track of? Parity and words of S3, trained at 32 tokens, read to 256.

    python scripts/reproduce.py state_tracking --workdir runs/state --jobs 2

One layer of width 32, two heads of 16, no MLP, no short convolution: the write strength and the key
depend on the token alone. With beta in (0, 2) the delta rule solves parity, and words of swaps,
beyond the training length, for one token asks for one reflection; of all of S3, whose rotations
take two, it gets the sign right (1/3). With beta in (0, 1) parity falls towards 1/2 and S3 to 1/6
(Grazzi et al. 2024). How far swaps reach is a matter of the seed: 0.69 to 1.00 at 256 tokens over
six, so that the claim on two of them fails. 20 runs of 15 to 30 s on 2 CPU cores.
"""

import itertools

from ml_collections import ConfigDict

from fastweights.config import defaults, parse_arg
from fastweights.reproduction import Claim

GRAZZI = "Grazzi et al. 2024, arXiv:2411.12537"
OURS = "measured with this code"


def get_config(arg: str | None = None) -> ConfigDict:
    parse_arg(arg)
    config = defaults()
    config.steps = 600
    config.batch_size = 64

    config.data.kind = "parity"
    config.data.length = 32

    config.model.vocab_size = 6
    config.model.d_model = 32
    config.model.num_layers = 1
    config.model.pattern = "D"
    config.model.mlp = "none"
    config.model.dtype = "float32"
    for letter in "ADG":
        mixer = config.model.mixers[letter]
        mixer.num_heads, mixer.head_dim, mixer.conv_size = 2, 16, 0

    config.optim.lr = 1e-2
    config.optim.weight_decay = 0.0
    config.optim.warmup_steps = 50

    config.eval.final = "recall,length"
    config.checkpoint.every = 600
    config.log.every = 100
    return config


def sweep():
    for seed, beta_to_2 in itertools.product((0, 1, 2), (False, True)):
        yield {"data.kind": "parity", **delta_net(beta_to_2), "seed": seed}
    for seed in (0, 1):
        negative = {"model.mixers.G.allow_neg_eigval": True}
        yield {"data.kind": "parity", "model.pattern": "G", **negative, "seed": seed}
        yield {"data.kind": "parity", "model.pattern": "A", "seed": seed}
        for alphabet, beta_to_2 in itertools.product(("swaps", "all"), (False, True)):
            words = {"data.kind": "s3", "data.s3.alphabet": alphabet}
            yield {**words, **delta_net(beta_to_2), "seed": seed}
        words = {"data.kind": "s3", "data.s3.alphabet": "all"}
        # In front, or claims on one layer would be on these too.
        yield {"model.num_layers": 2, **words, **delta_net(True), "seed": seed}


def delta_net(beta_to_2: bool) -> dict:
    return {"model.pattern": "D", "model.mixers.D.allow_neg_eigval": beta_to_2}


def claims():
    """At eight times the trained length; at the trained one, that it was learnt at all."""

    def delta(kind: str, beta_to_2: bool) -> str:
        return f"{kind},pattern=D,allow_neg_eigval={beta_to_2}"

    def beyond(runs: str, low: float, high: float, source: str) -> Claim:
        return Claim(runs, "T256", low, high, source, eval="length")

    swaps, words = "kind=s3,alphabet=swaps", "kind=s3,alphabet=all"
    for kind in ("kind=parity", swaps):
        yield Claim(delta(kind, True), "T32", low=0.99, source=GRAZZI)
        yield beyond(delta(kind, True), 0.98, 1.0, GRAZZI)
    yield beyond("kind=parity,pattern=G,allow_neg_eigval=True", 0.9, 1.0, OURS)
    yield beyond(delta("kind=parity", False), 0.0, 0.55, GRAZZI)
    yield beyond("kind=parity,pattern=A", 0.0, 0.55, GRAZZI)
    for kind in (swaps, words):
        yield beyond(delta(kind, False), 0.0, 0.2, GRAZZI)
    yield beyond(delta(words, True), 0.23, 0.4, GRAZZI)
    yield beyond("num_layers=2," + delta(words, True), 0.23, 0.5, OURS)

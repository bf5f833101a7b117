"""What can a recurrence keep track of? Parity and words of S3, trained at 32 tokens, read to 256.

    python scripts/sweep.py --config configs/state_tracking.py --workdir runs/state
    python scripts/collect.py runs/state --eval recall,length > state_tracking.csv

One layer of width 32, two heads of 16, no MLP, no short convolution: the write strength and the key
depend on the token alone. With beta in (0, 2) the delta rule solves parity and words of swaps far
beyond the training length, for one token asks for one reflection; of all of S3, whose rotations
take two, it gets the sign right (1/3). With beta in (0, 1) parity falls towards 1/2 and S3 to 1/6.
20 runs of 15 to 30 s on 2 CPU cores; the result is in docs/state_tracking.csv.
"""

import itertools

from ml_collections import ConfigDict

from fastweights.config import defaults, parse_arg


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
        yield {**words, **delta_net(True), "model.num_layers": 2, "seed": seed}


def delta_net(beta_to_2: bool) -> dict:
    return {"model.pattern": "D", "model.mixers.D.allow_neg_eigval": beta_to_2}

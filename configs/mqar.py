"""Small multi-query associative recall: a hybrid against its purely recurrent twin.

    python train.py --config configs/mqar.py --workdir runs/mqar
    python train.py --config configs/mqar.py:pattern=G --workdir runs/mqar_recurrent

Two layers without an MLP, width 48, one head of key dim 8 and value dim 32: 256 numbers of state
a layer for up to 16 pairs. The hybrid (a Gated DeltaNet layer, then attention) recalls all pairs,
the twin (two Gated DeltaNet layers) cannot hold them all. A third of the rows each has 16, 8 and 4
pairs: with four rows of five of 16, two seeds of three of the twin learn nothing.
"""

from ml_collections import ConfigDict

from fastweights.config import defaults, parse_arg


def get_config(arg: str | None = None) -> ConfigDict:
    options = parse_arg(arg, pattern="GA")
    config = defaults()
    config.steps = 1600
    config.batch_size = 64

    config.data.kind = "mqar"
    config.data.length = 64
    config.data.mqar.vocab_size = 128
    config.data.mqar.train = ((64, 16, 1.0), (32, 8, 2.0), (16, 4, 4.0))
    config.data.mqar.test = ((32, 8), (64, 16), (96, 16))

    config.model.vocab_size = 128
    config.model.d_model = 48
    config.model.num_layers = 2
    config.model.pattern = options.pattern
    config.model.mlp = "none"
    config.model.dtype = "float32"
    for letter in "LDG":
        mixer = config.model.mixers[letter]
        mixer.num_heads, mixer.head_dim, mixer.value_head_dim = 1, 8, 32
    config.model.mixers.A.num_heads, config.model.mixers.A.head_dim = 1, 16

    config.optim.lr = 3e-3
    config.optim.warmup_steps = 80

    config.eval.every = 400
    config.checkpoint.every = 400
    config.log.every = 100
    return config

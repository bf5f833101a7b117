"""A config that trains in seconds; the tests' runs start from it.

The argument picks the data: recall (default) or `text`.
"""

from ml_collections import ConfigDict

from fastweights.config import defaults, parse_arg


def get_config(arg: str | None = None) -> ConfigDict:
    options = parse_arg(arg, text=False)
    config = defaults()
    config.steps = 12
    config.batch_size = 8
    config.data.length = 16
    config.data.mqar.vocab_size = 32
    config.data.mqar.train = ((16, 3, 1.0), (8, 2, 1.0))
    config.data.mqar.test = ((8, 2), (16, 3), (24, 3))
    config.data.mqar.test_examples = 20
    if options.text:
        config.data.kind = "text"
        config.eval.during = config.eval.final = "ppl"
        config.eval.max_batches = 2
    config.model.vocab_size = 257 if options.text else 32
    config.model.d_model = 16
    config.model.num_layers = 2
    config.model.pattern = "GA"
    config.model.mlp_dim = 16
    config.model.dtype = "float32"
    mixers = config.model.mixers
    mixers.G.num_heads, mixers.G.num_qk_heads, mixers.G.head_dim = 4, 4, 4
    mixers.A.num_heads, mixers.A.head_dim = 4, 4
    config.optim.lr = 1e-3
    config.optim.warmup_steps = 2
    config.log.every = 1
    config.checkpoint.every = 4
    return config


def sweep():
    for pattern in ("G", "A"):
        yield {"model.pattern": pattern, "seed": 0}

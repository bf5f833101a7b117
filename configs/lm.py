"""Language modelling on bytes or any tokenizer: a 3:1 hybrid of Gated DeltaNet and attention.

    python train.py --config configs/lm.py --workdir runs/lm
    python train.py --config configs/lm.py:size=150m,pattern=GGGGGGGA --workdir runs/lm150 \
        --config.data.text.path=data/mine

Without data it reads the English help text that ships inside CPython, byte by byte, so that it runs
anywhere; a tenth of the topics is never trained on. Sizes: tiny (a laptop's CPU), 20m, 150m, 400m.
"""

from ml_collections import ConfigDict

from fastweights.config import defaults, parse_arg
from fastweights.errors import check

# layers, width, heads, row length, rows, learning rate
SIZES = {
    "tiny": (4, 128, 2, 256, 8, 2e-3),
    "20m": (8, 384, 6, 1024, 32, 1e-3),
    "150m": (12, 768, 6, 2048, 64, 6e-4),
    "400m": (24, 1024, 8, 4096, 64, 4e-4),
}


def get_config(arg: str | None = None) -> ConfigDict:
    options = parse_arg(arg, size="tiny", pattern="GGGA", vocab=257)
    check(
        options.size in SIZES,
        f"size '{options.size}' is not known; use one of {', '.join(SIZES)}.",
    )
    layers, width, heads, length, rows, lr = SIZES[options.size]
    tiny = options.size == "tiny"
    config = defaults()
    config.steps = 400 if tiny else 20_000
    config.batch_size = rows
    config.loss_chunk = 0 if tiny else 256

    config.data.kind = "text"
    config.data.length = length

    config.model.vocab_size = options.vocab
    config.model.d_model = width
    config.model.num_layers = layers
    config.model.pattern = options.pattern
    config.model.dtype = "float32" if tiny else "bfloat16"
    config.model.remat = "none" if tiny else "full"
    mixers = config.model.mixers
    for letter in "AWLDGK":
        mixers[letter].num_heads = heads
        mixers[letter].head_dim = width // heads
    mixers.A.qk_norm = mixers.W.qk_norm = True
    # Mamba-2 as published: twice the model width inside, in heads of 64.
    mixers.N.value_head_dim, mixers.N.num_heads = 64, 2 * width // 64

    config.optim.lr = lr
    config.optim.warmup_steps = config.steps // 20
    config.eval.during = "ppl"
    config.eval.final = "ppl,length"
    config.eval.every = 100 if tiny else 1000
    config.eval.max_batches = 0 if tiny else 50
    config.checkpoint.every = 200 if tiny else 1000
    return config

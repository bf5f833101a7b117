"""The dense Qwen3.5 text models' geometry: three layers of Gated DeltaNet, one of gated attention.

    python train.py --config configs/qwen3_5.py --workdir runs/qwen --dry_run
    python scripts/memory_table.py cache --config configs/qwen3_5.py:size=27b

    python scripts/import_hf.py models/Qwen3.5-0.8B --workdir runs/qwen

Sizes 0.8b, 2b, 4b, 9b and 27b (of Qwen3.5; 3.6 and 3.8 have the same one), as published but for the
vision tower and the layer that predicts a second token. A run from here starts from noise;
scripts/import_hf.py makes one that starts from a published checkpoint. Training options are those
of configs/lm.py, chosen for other sizes and never tried on these.
"""

import pathlib

from ml_collections import ConfigDict

from fastweights.config import load_dict, parse_arg
from fastweights.errors import check

# width, layers, MLP width, query heads, key/value heads, Gated DeltaNet's value heads, tied
SIZES = {
    "0.8b": (1024, 24, 3584, 8, 2, 16, True),
    "2b": (2048, 24, 6144, 8, 2, 16, True),
    "4b": (2560, 32, 9216, 16, 4, 32, True),
    "9b": (4096, 32, 12288, 16, 4, 32, False),
    "27b": (5120, 64, 17408, 24, 4, 48, False),
}


def get_config(arg: str | None = None) -> ConfigDict:
    options = parse_arg(arg, size="0.8b")
    check(
        options.size in SIZES,
        f"size '{options.size}' is not known; use one of {', '.join(SIZES)}.",
    )
    width, layers, mlp, heads, kv_heads, value_heads, tied = SIZES[options.size]
    config = load_dict(str(pathlib.Path(__file__).with_name("lm.py")) + ":size=400m")
    # Each piece of the loss adds a whole head's gradient, so with this vocabulary few and large.
    config.loss_chunk = 1024
    model = config.model
    model.vocab_size = 248_320
    model.d_model, model.num_layers, model.pattern = width, layers, "GGGA"
    model.mlp_dim, model.tie_embeddings = mlp, tied
    mixer = model.mixers.G
    mixer.num_heads, mixer.num_qk_heads, mixer.head_dim = value_heads, 16, 128
    mixer = model.mixers.A
    mixer.num_heads, mixer.num_kv_heads, mixer.head_dim = heads, kv_heads, 256
    mixer.rope_fraction, mixer.rope_theta = 0.25, 1e7
    mixer.qk_norm = mixer.output_gate = True
    return config

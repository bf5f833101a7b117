"""Qwen3-Next 80B-A3B: the layers of configs/qwen3_5.py with 512 experts, ten of them a token.

    python train.py --config configs/qwen3_next.py --workdir runs/next --dry_run
    python scripts/import_hf.py models/Qwen3-Next-80B-A3B --workdir runs/next

79,674,391,296 parameters, of which a token meets 3,874,929,408, as published. The first command
wants a machine that compiles a step of that size; the second takes everything from the folder that
it reads. Training options are those of configs/lm.py, never tried at this size.
"""

import pathlib

from ml_collections import ConfigDict

from fastweights.config import load_dict, parse_arg


def get_config(arg: str | None = None) -> ConfigDict:
    parse_arg(arg)
    config = load_dict(str(pathlib.Path(__file__).with_name("qwen3_5.py")))
    config.balance_loss = 0.001
    model = config.model
    model.vocab_size, model.tie_embeddings = 151_936, False
    model.d_model, model.num_layers = 2048, 48
    model.mlp, model.mlp_dim = "moe", 5120
    model.moe.num_experts, model.moe.top_k = 512, 10
    model.moe.dim = model.moe.shared_dim = 512
    model.mixers.G.num_heads = 32
    model.mixers.A.num_heads, model.mixers.A.num_kv_heads = 16, 2
    return config

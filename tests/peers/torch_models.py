"""Random models of each family, made and run by transformers; needs torch and nothing from here.

    python torch_models.py make OUT         a folder a model, with reference.npz: tokens and logits
    python torch_models.py logits FOLDER... logits of folders written elsewhere, into logits.npz

Weights are rounded to bfloat16, then computed with in float32. Geometries are what published models
do not have: odd head dims, three value heads a key head, three taps, irregular layers.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

TOKENS = (2, 21)
GDN = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=7,
    linear_value_head_dim=5,
    linear_conv_kernel_dim=3,
)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2)
SIZES = dict(vocab_size=260, hidden_size=32)
QWEN = dict(**SIZES, **GDN, **ATTENTION, head_dim=12, intermediate_size=40)
QWEN["rope_parameters"] = dict(
    rope_type="default", rope_theta=5e5, partial_rotary_factor=0.5, mrope_section=[1, 1, 1]
)
IRREGULAR = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
MODELS = {
    "qwen3_5_irregular": transformers.Qwen3_5TextConfig(
        **(QWEN | {"head_dim": 11}),  # of which five channels are to turn, so that six do
        num_hidden_layers=4,
        layer_types=IRREGULAR,
        tie_word_embeddings=False,
    ),
    "qwen3_5_vision": transformers.Qwen3_5Config(
        text_config=dict(**QWEN, num_hidden_layers=3, full_attention_interval=2),
        vision_config=dict(
            depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32
        ),
        tie_word_embeddings=True,
    ),
    "qwen3_next_sparse": transformers.Qwen3NextConfig(
        **QWEN,
        num_hidden_layers=4,
        full_attention_interval=2,
        decoder_sparse_step=2,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    ),
    "olmo_hybrid_nope": transformers.OlmoHybridConfig(
        **SIZES,
        **GDN,
        **ATTENTION,
        intermediate_size=40,
        num_hidden_layers=3,
        layer_types=IRREGULAR[1:],
        rope_parameters=dict(rope_type="default", rope_theta=None),
        linear_allow_neg_eigval=False,
        pad_token_id=0,
        eos_token_id=1,
    ),
    "mamba2": transformers.Mamba2Config(
        **SIZES,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        state_size=6,
        conv_kernel=3,
        chunk_size=16,
        time_step_limit=(0.01, 0.7),
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "mamba": transformers.MambaConfig(
        **SIZES, num_hidden_layers=2, state_size=5, conv_kernel=3, time_step_rank=3
    ),
}
MULTIMODAL = {"qwen3_5": transformers.Qwen3_5ForConditionalGeneration}
PLAIN_NORMS = ("linear_attn.norm.weight", "o_norm.weight", "mixer.norm.weight")


def randomize(model: torch.nn.Module, centred: bool) -> None:
    """Weights large enough that every part of the model moves the logits."""
    generator = torch.Generator().manual_seed(0)

    def draw(p: torch.Tensor) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.log(0.01 + 4 * torch.rand(p.shape, generator=generator)))
            elif "norm" in name and p.ndim == 1:
                plain = not centred or name.endswith(PLAIN_NORMS)
                p.copy_(0.3 * draw(p) + float(plain))
            elif "conv1d.weight" in name or p.ndim == 1:
                p.copy_(0.5 * draw(p))
            else:
                p.copy_(draw(p) * p.shape[-1] ** -0.5)
            p.copy_(p.to(torch.bfloat16).float())


def make(out: pathlib.Path) -> None:
    for name, config in MODELS.items():
        torch.manual_seed(0)
        auto = MULTIMODAL.get(config.model_type)
        model = auto(config) if auto else transformers.AutoModelForCausalLM.from_config(config)
        model = model.float().eval()
        randomize(model, centred=config.model_type.startswith("qwen"))
        tokens = torch.randint(0, 260, TOKENS, generator=torch.Generator().manual_seed(1))
        folder = out / name
        model.save_pretrained(folder)
        publish(folder, vision=bool(auto))
        np.savez_compressed(
            folder / "reference.npz", input_ids=tokens.numpy(), logits=run(model, tokens)
        )


def publish(folder: pathlib.Path, *, vision: bool) -> None:
    """Dtypes as published: bfloat16, but float32 for the decay's rates and the gated norm.

    The model with vision gets layers that predict a second token, and is cut into shards.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    wide = ("A_log", "linear_attn.norm.weight")
    tensors = {
        n: t if n.endswith(wide) else t.to(torch.bfloat16).contiguous() for n, t in tensors.items()
    }
    if not vision:
        save_file(tensors, path, metadata={"format": "pt"})
        return
    tensors["mtp.fc.weight"] = torch.arange(12.0).reshape(3, 4).to(torch.bfloat16)
    tensors["mtp.norm.weight"] = torch.full((4,), 0.5)
    names, places = sorted(tensors), {}
    path.unlink()
    for i in range(3):
        file = f"model.safetensors-{i + 1:05d}-of-00003.safetensors"
        shard = {n: tensors[n] for n in names[i::3]}
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def run(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=tokens).logits.float().numpy()


def logits(folder: pathlib.Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    auto = MULTIMODAL.get(config["model_type"], transformers.AutoModelForCausalLM)
    model, told = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    unread = {k: sorted(v) for k, v in told.items() if v and k != "unexpected_keys"}
    assert not unread, (folder, unread)
    tokens = torch.tensor(np.load(folder.parent / "tokens.npy"))
    np.savez(folder / "logits.npz", logits=run(model.eval(), tokens))


if __name__ == "__main__":
    command, *folders = sys.argv[1:]
    for argument in map(pathlib.Path, folders):
        make(argument) if command == "make" else logits(argument)

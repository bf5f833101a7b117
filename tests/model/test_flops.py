"""Counts from the config alone, held to the arrays themselves."""

import collections
import dataclasses

import jax
import pytest

import tiny_models
from fastweights import flops, mixers, model
from fastweights.errors import UserError

CONFIGS = [
    tiny_models.config("AWLDG", 7),
    tiny_models.config("AWLDG", 5, mlp="none", tie_embeddings=False),
    tiny_models.config("GGGA", 3, mlp_dim=0, mixers=mixers.MixerConfigs(), dtype="bfloat16"),
    tiny_models.config(
        "LG",
        4,
        mixers=tiny_models.replace_mixer("L", normalize=False, output_gate=False, conv_size=0),
    ),
    tiny_models.config("KN", 2),
    tiny_models.config("MS", 5, dtype="bfloat16"),
    tiny_models.config("M", 1, mixers=tiny_models.replace_mixer("M", conv_size=0, dt_rank=0)),
    tiny_models.config(
        "S", 1, mixers=tiny_models.replace_mixer("S", mode="diagonal", output_gate=False)
    ),
    tiny_models.config("K", 1, mixers=tiny_models.replace_mixer("K", output_gate=False)),
    tiny_models.config("N", 1, mixers=tiny_models.replace_mixer("N", conv_size=0)),
    tiny_models.config("L", 1, mixers=tiny_models.replace_mixer("L", feature_map="taylor")),
    tiny_models.config(
        "D", 1, mixers=tiny_models.replace_mixer("D", feature_map="dpfp", dpfp_nu=2)
    ),
    tiny_models.config("A", 2, mixers=tiny_models.replace_mixer("A", qk_norm=False, conv_size=4)),
    tiny_models.config(
        "A", 2, norm="plain", mixers=tiny_models.replace_mixer("A", qk_norm_over="row")
    ),
    tiny_models.config("GA", 5, mlp="moe", moe=tiny_models.EXPERTS),
    tiny_models.config(
        "GL", 2, mlp="moe", moe=dataclasses.replace(tiny_models.EXPERTS, shared_dim=0)
    ),
    tiny_models.config("D", 1, decoder="positions"),
]


def part_of(path, letters):
    """The part that a parameter counts under, from its place in the tree."""
    names = [key.key for key in path]
    if names[0] in ("embedding", "head", "decoder"):
        return {"embedding": "embed"}.get(names[0], names[0])
    if names[-2].endswith("norm") and names[-2] in ("mixer_norm", "mlp_norm", "final_norm"):
        return "norms"
    if names[2] == "mlp":
        return "mlp"
    return f"mixer_{letters[names[0]][int(names[1].removeprefix('layer_'))]}"


@pytest.mark.parametrize("cfg", CONFIGS, ids=range(len(CONFIGS)))
def test_parameters_are_those_of_the_tree(cfg):
    _, shapes, _ = model.abstract_model(cfg)
    letters = {"groups": cfg.layout.group, "tail": cfg.layout.tail}
    expected = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        expected[part_of(path, letters)] += leaf.size
    counts = flops.param_counts(cfg)
    total = counts.pop("total")
    assert {part: n for part, n in counts.items() if n} == dict(expected)
    assert total == sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_a_token_meets_some_of_the_experts():
    """Three of four layers have experts: of each of their matrices two in four are idle."""
    cfg = tiny_models.config("GA", 4, mlp="moe", moe=tiny_models.EXPERTS)
    total = flops.param_counts(cfg)["total"]
    assert total - flops.active_params(cfg) == 3 * 2 * 3 * 16 * 8
    dense = tiny_models.config("GA", 4, mlp="none")
    extra = flops.active_params(cfg) - flops.active_params(dense) - 4 * 16
    got = flops.forward_flops_per_token(cfg, 8) - flops.forward_flops_per_token(dense, 8)
    assert got == 2 * extra


@pytest.mark.parametrize("cfg", CONFIGS, ids=range(len(CONFIGS)))
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_cache_bytes_are_those_of_the_tree(cfg, dtype):
    graphdef, shapes, _ = model.abstract_model(cfg)
    cache = jax.eval_shape(lambda p: model.bind(graphdef, p).init_cache(3, 11, dtype), shapes)
    expected = collections.Counter()
    for part, letters in (("groups", cfg.layout.group), ("tail", cfg.layout.tail)):
        for i, letter in enumerate(letters):
            leaves = jax.tree.leaves(cache[part][f"layer_{i}"])
            expected[letter] += sum(x.size * x.dtype.itemsize for x in leaves)
    counts = flops.cache_bytes(cfg, 3, 11, dtype)
    assert counts.pop("total") == sum(expected.values())
    assert counts == dict(expected)


def test_state_bytes_of_published_layers():
    """One sequence of the 27B Qwen3.5 geometry: 3 MiB and 60 KiB a recurrent layer, 64 KiB x 16
    layers a token in attention."""
    cfg = model.ModelConfig(
        vocab_size=8,
        d_model=5120,
        num_layers=64,
        pattern="GGGA",
        mixers=mixers.MixerConfigs(
            G=mixers.GatedDeltaNetConfig(num_heads=48, num_qk_heads=16, head_dim=128),
            A=mixers.AttentionConfig(num_heads=24, num_kv_heads=4, head_dim=256),
        ),
    )
    counts = flops.state_bytes(cfg, 262_144)
    assert counts["G"] == 48 * (3 * 2**20 + 60 * 2**10)
    assert counts["A"] == 16 * 2**30
    assert counts["total"] == counts["G"] + counts["A"]
    assert flops.param_counts(cfg)["mixer_G"] == 48 * 115_876_064


def test_published_attention_parameters():
    """The 9B Qwen3.5 geometry, with q/k norms and output gate: 58,720,768 a layer."""
    cfg = model.ModelConfig(
        vocab_size=8,
        d_model=4096,
        num_layers=1,
        pattern="A",
        mixers=mixers.MixerConfigs(
            A=mixers.AttentionConfig(
                num_heads=16, num_kv_heads=4, head_dim=256, qk_norm=True, output_gate=True
            )
        ),
    )
    assert flops.param_counts(cfg)["mixer_A"] == 58_720_768


def test_a_short_context_does_not_fill_a_window():
    cfg = tiny_models.config("W", 1)
    full = flops.state_bytes(cfg, 3)["W"]
    assert flops.state_bytes(cfg, 1000)["W"] == full
    assert flops.state_bytes(cfg, 1)["W"] == full - 2 * 2 * 1 * 8 * 4


@pytest.mark.parametrize(
    ("letter", "memory"),
    [
        ("A", 4 * 4 * 8 * (1 + 2 + 3 + 4 + 5) / 5),  # causal: t keys for token t
        ("W", 4 * 2 * 8 * (1 + 2 + 3 + 3 + 3) / 5),  # at most 3
        ("L", 4 * 2 * 8 * 4),
        ("D", 8 * 2 * 8 * 8),
        ("G", 8 * 4 * 8 * 4),
        ("K", 8 * 2 * 8 * 4),
        ("M", 6 * 32 * 3),
        ("S", 20 * 16 * 4),
        ("N", 4 * 4 * 8 * 4),
    ],
)
def test_flops_are_those_of_matrices_and_memory(letter, memory):
    cfg = tiny_models.config(letter, 1)
    _, shapes, _ = model.abstract_model(cfg)
    matrices = conv = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = path[-1].key
        matrices += leaf.size * (name in ("kernel", "embedding"))
        conv += leaf.size * (name in ("conv_q", "conv_k", "conv_v", "conv_x"))
    expected = 2 * matrices + 2 * conv + memory
    assert flops.forward_flops_per_token(cfg, 5) == pytest.approx(expected)
    assert flops.train_flops_per_token(cfg, 5) == pytest.approx(3 * expected)


def test_a_decoder_costs_its_two_matrices():
    with_one, without = (tiny_models.config("D", 1, decoder=d) for d in ("positions", "none"))
    extra = flops.forward_flops_per_token(with_one, 8) - flops.forward_flops_per_token(without, 8)
    assert extra == 2 * 2 * 16 * 16


def test_an_untied_head_costs_what_a_tied_one_does():
    tied, untied = (tiny_models.config("GA", 2, tie_embeddings=tie) for tie in (True, False))
    assert flops.forward_flops_per_token(tied, 8) == flops.forward_flops_per_token(untied, 8)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 PCIe", None),
        ("cpu", None),
    ],
)
def test_peaks(kind, peak):
    assert flops.peak_flops(kind) == peak


def test_bad_lengths_are_refused():
    cfg = tiny_models.config()
    with pytest.raises(UserError, match="length of 0 tokens"):
        flops.forward_flops_per_token(cfg, 0)
    with pytest.raises(UserError, match="context_length is -1"):
        flops.state_bytes(cfg, -1)

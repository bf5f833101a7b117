"""Models that were never published: written where a family has all their parts, else refused."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import tiny_models
from fastweights import interop, mixers, model
from fastweights.errors import UserError
from fastweights.interop import export

QWEN = dict(mlp_dim=24, norm_eps=1e-6)
OLMO = dict(
    mlp_dim=24,
    post_norm="A",
    norm="plain",
    mixers=dataclasses.replace(
        tiny_models.replace_mixer("A", qk_norm_over="row", output_gate=False, rope_fraction=0.0),
        G=mixers.GatedDeltaNetConfig(num_heads=4, head_dim=8, norm_eps=1e-5, allow_neg_eigval=True),
    ),
)
MODELS = {
    "Qwen3.5": tiny_models.config("GGA", 7, **QWEN),
    "Qwen3.5, plain norms": tiny_models.config(
        "GA", 3, norm="plain", mixers=tiny_models.replace_mixer("A", num_heads=4), **QWEN
    ),
    "Qwen3-Next": tiny_models.config("GA", 5, mlp="moe", moe=tiny_models.EXPERTS, **QWEN),
    "OLMo-Hybrid": tiny_models.config("GA", 3, tie_embeddings=False, **OLMO),
    "Mamba-2": tiny_models.config("N", 3, mlp="none"),
    "Mamba": tiny_models.config("M", 2, mlp="none", tie_embeddings=False),
}


@pytest.mark.parametrize(("family", "config"), MODELS.items(), ids=MODELS)
def test_it_is_read_back_as_it_was(family, config, tmp_path, monkeypatch):
    """In shards of a thousand bytes; norms in the family's convention compute the same."""
    monkeypatch.setattr(export, "SHARD_BYTES", 1000)
    params, out = tiny_models.noisy_params(config), tmp_path / "out"
    family = family.split(",")[0]
    assert interop.export_new(params, config, out, "float32") == family
    source = interop.open_checkpoint(out)
    assert len(source.files) > 3 and source.family.name == family
    held = 0
    for row in source.rows():
        parts = row.split([source.read(name) for name in row.names])
        for param, part in zip(row.params, parts, strict=True):
            leaf = functools.reduce(lambda tree, key: tree[key], param.path, params)
            on_stream = bool({"mixer_norm", "mlp_norm", "final_norm"} & set(param.path))
            added = 1.0 if config.norm == "centred" else -1.0
            shift = added if on_stream and source.model.norm != config.norm else 0.0
            expected = np.asarray(leaf)[param.index] + shift
            np.testing.assert_allclose(part, expected, rtol=0, atol=1e-6)
            held += part.size
    assert held == sum(leaf.size for leaf in jax.tree.leaves(params))
    same = dataclasses.replace(source.model, dtype=config.dtype, norm=config.norm)
    trees = [model.abstract_model(c)[1] for c in (same, config)]
    assert trees[0] == trees[1]


def test_what_is_fragile_stays_wide(tmp_path):
    config = MODELS["Qwen3.5"]
    interop.export_new(tiny_models.noisy_params(config), config, tmp_path / "out", "bfloat16")
    (file,) = interop.open_checkpoint(tmp_path / "out").files.values()
    wide = {name.split(".", 3)[-1] for name, e in file.entries.items() if e.dtype == "F32"}
    assert wide == {"linear_attn.A_log", "linear_attn.norm.weight"}
    assert {e.dtype for e in file.entries.values()} == {"F32", "BF16"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (tiny_models.config("GK", 2), r"letter K of model.pattern 'GK' has no counterpart"),
        (tiny_models.config("GN", 2), r"the mix of letters in model.pattern 'GN' has no counter"),
        (
            tiny_models.config("GA", 2, mixers=tiny_models.replace_mixer("A", logit_cap=2.0)),
            r"Qwen3.5 being the nearest .*: model.mixers.A.logit_cap is 2.0 where Qwen3.5 has 0.0",
        ),
        (
            tiny_models.config("G", 2, mixers=tiny_models.replace_mixer("G", conv_size=0)),
            r"linear_conv_kernel_dim=0",
        ),
        (
            tiny_models.config("GA", 2, mixers=tiny_models.replace_mixer("A", output_gate=False)),
            r"model.mixers.A.output_gate is False where Qwen3.5 has True",
        ),
        (
            tiny_models.config("N", 2),
            r"Mamba-2 being the nearest .*: model.mlp is \['swiglu', 'swiglu'\] where Mamba-2 has",
        ),
        (
            tiny_models.config("GA", 2, decoder="positions"),
            r"model.decoder is 'positions' where Qwen3.5 has 'none'",
        ),
        (
            tiny_models.config("GA", 2, post_norm="G"),
            r"model.post_norm is 'G' where Qwen3.5 has ''",
        ),
    ],
)
def test_the_part_that_no_family_has_is_named(config, told, tmp_path):
    with pytest.raises(UserError, match=told):
        interop.export_new({}, config, tmp_path / "out", "float32")
    assert not list(tmp_path.iterdir())

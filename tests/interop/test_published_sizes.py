"""The geometries in configs/ have the published models' parameters, bytes and tensors."""

import pytest

from fastweights import config as config_lib
from fastweights import flops, interop
from fastweights.interop import olmo_hybrid
from fastweights.interop.fields import Fields

# Parameters of the text model by part, tensors of its file; parameters of the vision tower and of
# the layer that predicts a second token; bytes of the published file, which has all three.
QWEN3_5 = {
    "0.8b": (
        (189_778_752, 44_043_264, 264_241_152, 50_176, 254_279_680, 752_393_024, 320),
        (100_592_896, 20_452_864, 1_746_882_752),
    ),
    "2b": (
        (379_112_256, 88_083_456, 905_969_664, 100_352, 508_559_360, 1_881_825_088, 320),
        (331_416_576, 60_828_160, 4_548_144_832),
    ),
    "4b": (
        (1_011_356_160, 293_605_376, 2_264_924_160, 166_400, 635_699_200, 4_205_751_296, 426),
        (333_514_240, 120_599_552, 9_319_737_856),
    ),
    "9b": (
        (1_617_695_232, 469_766_144, 4_831_838_208, 266_240, 2_034_237_440, 8_953_803_264, 427),
        (456_010_480, 243_290_624, 19_306_216_416),
    ),
    "27b": (
        (5_562_051_072, 1_677_729_792, 17_112_760_320, 660_480, 2_542_796_800, 26_895_998_464, 851),
        (460_730_096, 424_699_392, 55_562_872_800),
    ),
}


@pytest.mark.parametrize("size", QWEN3_5)
def test_qwen3_5(size):
    config = config_lib.load(f"configs/qwen3_5.py:size={size}").model
    text, (vision, second, file_bytes) = QWEN3_5[size]
    counts = flops.param_counts(config)
    parts = [counts[name] for name in ("mixer_G", "mixer_A", "mlp", "norms")]
    parts += [counts["embed"] + counts["head"], counts["total"]]
    entries = interop.entries(config, "bfloat16")
    assert (*parts, len(entries)) == text
    total = sum(entry.nbytes for entry in entries.values())
    assert total + 2 * (vision + second) == file_bytes
    # All in bfloat16, as transformers saves it.
    narrow = 2 * counts["total"]
    assert total - narrow == 2 * 3 * config.num_layers // 4 * (config.mixers.G.num_heads + 128)


def test_qwen3_next():
    config = config_lib.load("configs/qwen3_next.py").model
    assert flops.param_counts(config)["total"] == 79_674_391_296
    assert flops.active_params(config) == 3_874_929_408
    family, written = interop.express(config)
    assert family.name == "Qwen3-Next" and written["num_experts_per_tok"] == 10


def test_olmo_hybrid():
    """The defaults of its published config: 7.43 billion parameters."""
    fields = dict(vocab_size=100_352, hidden_size=3840, intermediate_size=11_008)
    fields |= dict(num_hidden_layers=32, num_attention_heads=30)
    config = olmo_hybrid.read(Fields(fields, "config.json"), tied=False)
    assert round(flops.param_counts(config)["total"] / 1e9, 2) == 7.43
    assert interop.express(config)[0].name == "OLMo-Hybrid"

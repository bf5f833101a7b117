"""Bad options: one sentence with the value seen and the remedy."""

import pytest

from fastweights import mixers
from fastweights.errors import UserError

BAD = [
    ("A", dict(num_heads=0), r"num_heads is 0; give an integer of at least 1"),
    ("A", dict(num_heads=2.0), r"num_heads is 2.0; give an integer"),
    ("A", dict(head_dim=-8), r"head_dim is -8"),
    ("A", dict(conv_size=-1), r"conv_size is -1"),
    ("A", dict(num_heads=6, num_kv_heads=4), r"num_heads is 6, which num_kv_heads 4 .*multiple"),
    ("A", dict(rope_fraction=1.5), r"rope_fraction is 1.5; .*between 0 and 1"),
    ("A", dict(head_dim=5, rope_fraction=1.0), r"turns 6 channels; .*in the head"),
    ("A", dict(qk_norm_over="rows"), r"qk_norm_over is 'rows'; choose 'head' or 'row'"),
    ("G", dict(norm_eps=-1.0), r"norm_eps is -1.0; give a positive number, or 0"),
    ("A", dict(head_dim=8, rope_fraction=0.01), r"turns 0 channels; .*0 for none"),
    ("A", dict(rope_theta=0.0), r"rope_theta is 0.0; give a positive"),
    ("A", dict(logit_cap=-1.0), r"logit_cap is -1.0; give a positive number, or 0 for none"),
    ("A", dict(logit_cap=float("inf")), r"logit_cap is inf; give a positive number, or 0 for none"),
    ("A", dict(rope_theta=float("inf")), r"rope_theta is inf; give a positive number"),
    ("W", dict(window=0), r"window is 0; give an integer of at least 1"),
    ("L", dict(feature_map="cosine"), r"feature_map is 'cosine'; choose one of .*elu1"),
    ("L", dict(feature_map="identity", normalize=True), r"normalize is True .*elu1"),
    ("D", dict(feature_map="cosine"), r"feature_map is 'cosine'; choose one of .*elu1"),
    ("D", dict(feature_map="dpfp", dpfp_nu=0), r"dpfp_nu is 0; give an integer of at least 1"),
    ("D", dict(chunk_size=0), r"chunk_size is 0"),
    ("G", dict(num_heads=6, num_qk_heads=4), r"num_heads is 6, which num_qk_heads 4 .*multiple"),
    ("N", dict(time_step_limit=(0.1, 0.0)), r"time_step_limit is \(0.1, 0.0\); give two numbers"),
    ("G", dict(value_head_dim=-1), r"value_head_dim is -1"),
]


@pytest.mark.parametrize(("letter", "options", "sentence"), BAD)
def test_bad_options_are_refused(letter, options, sentence):
    _, config_class = mixers.MIXERS[letter]
    with pytest.raises(UserError, match=sentence):
        config_class(**options)


def test_every_letter_has_options():
    assert set(mixers.MIXERS) == set(vars(mixers.MixerConfigs()))
    for letter, (_, config_class) in mixers.MIXERS.items():
        assert type(getattr(mixers.MixerConfigs(), letter)) is config_class

"""Memory rules as functions of arrays, without any module system.

Every recurrent rule returns (output, final state) and takes `initial_state`, `segment_ids`,
`chunk_size` and `implementation`; see `gated_delta_rule`. Arrays are [batch, token, head, dim].
"""

from fastweights.ops.attention import softmax_attention
from fastweights.ops.cached_attention import cached_attention
from fastweights.ops.convolution import short_convolution
from fastweights.ops.features import (
    FEATURE_MAPS,
    FeatureMap,
    feature_map,
    l2_normalize,
    normalize_heads,
)
from fastweights.ops.rotary import rotary
from fastweights.ops.rules import (
    delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    kimi_delta_rule,
    linear_attention,
)
from fastweights.ops.segments import find_documents
from fastweights.ops.selective import selective_scan
from fastweights.ops.structured import state_space

__all__ = [
    "FEATURE_MAPS",
    "FeatureMap",
    "cached_attention",
    "delta_rule",
    "feature_map",
    "find_documents",
    "gated_delta_rule",
    "gated_linear_attention",
    "kimi_delta_rule",
    "l2_normalize",
    "linear_attention",
    "normalize_heads",
    "rotary",
    "selective_scan",
    "short_convolution",
    "softmax_attention",
    "state_space",
]

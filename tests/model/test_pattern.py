"""Patterns: tiling over depth without losing a layer, shares of attention, bad input."""

import pytest

from fastweights.errors import UserError
from fastweights.pattern import Layout, attention_share, expand


@pytest.mark.parametrize(
    ("pattern", "num_layers", "layout"),
    [
        ("GGGA", 8, Layout("GGGA", 2, "")),
        ("GGGA", 10, Layout("GGGA", 2, "GG")),
        ("GGGA", 3, Layout("", 0, "GGG")),
        ("A", 3, Layout("A", 3, "")),
        ("LWD", 4, Layout("LWD", 1, "L")),
    ],
)
def test_layout(pattern, num_layers, layout):
    assert expand(pattern, num_layers) == layout


@pytest.mark.parametrize("num_layers", range(1, 14))
def test_depth_is_what_was_asked_for(num_layers):
    letters = expand("LWDGA", num_layers).letters
    assert letters == ("LWDGA" * 3)[:num_layers]


@pytest.mark.parametrize(
    ("letters", "share"), [("GGGA", 0.25), ("AW", 1.0), ("GLD", 0.0), ("GAG", 1 / 3)]
)
def test_attention_share(letters, share):
    assert attention_share(letters) == pytest.approx(share)


@pytest.mark.parametrize(
    ("pattern", "num_layers", "sentence"),
    [
        ("", 2, r"pattern is empty; .*A, D, G, .*L, M, .*S, W"),
        (
            "GxA",
            2,
            r"Pattern 'GxA' has the unknown letter 'x'; known letters .*A, D, G, .*L, M, .*S, W",
        ),
        ("g", 2, r"unknown letter 'g'"),
        ("G", 0, r"num_layers is 0"),
    ],
)
def test_bad_patterns_are_refused(pattern, num_layers, sentence):
    with pytest.raises(UserError, match=sentence):
        expand(pattern, num_layers)


def test_share_of_nothing_is_refused():
    with pytest.raises(UserError, match="no layers"):
        attention_share("")

"""A stack as a string: one letter a layer, tiled over depth.

`GGGA` over 24 layers is the 3:1 hybrid: six equal groups that one `lax.scan` runs through. A depth
that is no multiple of the pattern keeps its last layers as an unrolled tail, so a model never
comes out shallower than asked for.
"""

from __future__ import annotations

import dataclasses

from fastweights.errors import check
from fastweights.mixers import MIXERS

# Letters whose cache grows with the context, or at least looks back at single tokens.
ATTENTION_LETTERS = frozenset("AW")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A pattern laid over a depth: `num_groups` copies of `group`, then `tail`."""

    group: str
    num_groups: int
    tail: str

    @property
    def letters(self) -> str:
        """The letter of every layer, first to last."""
        return self.group * self.num_groups + self.tail


def expand(pattern: str, num_layers: int) -> Layout:
    """Lays `pattern` over `num_layers` layers.

    Raises:
      UserError: an empty pattern, an unknown letter, or fewer than one layer.
    """
    known = ", ".join(sorted(MIXERS))
    check(bool(pattern), f"The pattern is empty; give one letter a layer out of {known}.")
    for letter in pattern:
        check(
            letter in MIXERS,
            f"Pattern {pattern!r} has the unknown letter {letter!r}; known letters "
            f"(case-sensitive) are {known}.",
        )
    check(num_layers >= 1, f"num_layers is {num_layers}; a model needs at least one layer.")
    num_groups, rest = divmod(num_layers, len(pattern))
    return Layout(pattern if num_groups else "", num_groups, pattern[:rest])


def attention_share(letters: str) -> float:
    """The share of layers, between 0 and 1, that are softmax attention (`A` or `W`)."""
    check(bool(letters), "The share of attention is asked of no layers; give at least one letter.")
    return sum(letter in ATTENTION_LETTERS for letter in letters) / len(letters)

"""Reading a published `config.json`: with types checked, and refusing what would go unheeded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastweights.errors import UserError, check

LETTERS = {"linear_attention": "G", "full_attention": "A"}


def decode(tree: Any) -> Any:
    """Numbers that JSON has no word for, as transformers writes them: {"__float__": "Infinity"}."""
    if isinstance(tree, Mapping):
        if tree.keys() == {"__float__"}:
            return float(str(tree["__float__"]))
        return {name: decode(value) for name, value in tree.items()}
    return [decode(value) for value in tree] if isinstance(tree, list) else tree


class Fields:
    """The fields of one config.

    Raises:
      UserError: (from all methods) a missing field, a wrong type, or a value that is not supported.
    """

    def __init__(self, tree: Mapping[str, Any], owner: str):
        """`owner` names the config in sentences."""
        self.tree, self.owner = tree, owner

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number, at least 1; a missing or null field is the default."""
        value = self.tree.get(name)
        value = default if value is None else value
        check(value is not None, f"{self.owner} has no {name}; give the folder's own config.json.")
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        check(ok, f"{self.owner} has {name}={value!r}; it must be an integer of at least 1.")
        assert isinstance(value, int)
        return value

    def number(self, name: str, default: float) -> float:
        """A positive finite number."""
        value = self.tree.get(name, default)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        check(
            ok and 0 < value < math.inf,
            f"{self.owner} has {name}={value!r}; it must be a positive number.",
        )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.tree.get(name, default)
        check(isinstance(value, bool), f"{self.owner} has {name}={value!r}; it must be a boolean.")
        return value

    def indices(self, name: str) -> list[int]:
        """A list of whole numbers from 0; empty where there is none."""
        value = self.tree.get(name) or []
        check(
            isinstance(value, list) and all(type(i) is int and i >= 0 for i in value),
            f"{self.owner} has {name}={value!r}; it must be a list of layers, counted from 0.",
        )
        return value

    def only(self, **allowed: Sequence[Any]) -> None:
        """Refuses fields with other values than these; the first is what a missing field means."""
        for name, values in allowed.items():
            value = self.tree.get(name, values[0])
            check(
                value in values,
                f"{self.owner} has {name}={value!r}, which is not supported here; only "
                f"{' or '.join(repr(v) for v in values)} is.",
            )

    def rope(self, head_dim: int, fraction: float) -> dict[str, Any]:
        """`rope_fraction` and `rope_theta` of attention, from any of the forms that exist.

        `fraction` is the family's default. A base of null means no positions.
        """
        given = {}
        for name in ("rope_scaling", "rope_parameters"):
            value = self.tree.get(name) or {}
            if not isinstance(value, Mapping):
                raise UserError(f"{self.owner} has {name}={value!r}; it must be an object.")
            for word in ("rope_type", "type"):
                kind = value.get(word, "default")
                check(
                    kind == "default",
                    f"{self.owner} has {word}={kind!r} in {name}, which is not supported here; "
                    "only 'default' is.",
                )
            given |= value
        named = Fields({**self.tree, **given}, self.owner)
        theta = named.tree.get("rope_theta", 10_000.0)
        if theta is None:
            return {"rope_fraction": 0.0}
        share = named.number("partial_rotary_factor", fraction)
        check(
            share <= 1,
            f"{self.owner} has partial_rotary_factor={share}; it must not be above 1.",
        )
        turned = int(head_dim * share)
        check(
            turned > 0,
            f"{self.owner} turns no channel of {head_dim} (partial_rotary_factor={share}); write a "
            "null rope_theta for attention without positions.",
        )
        return {"rope_fraction": turned / head_dim, "rope_theta": named.number("rope_theta", 1.0)}

    def layer_letters(self) -> str:
        """A letter a layer, from `layer_types` or every `full_attention_interval`-th."""
        count = self.integer("num_hidden_layers")
        kinds = self.tree.get("layer_types")
        if kinds is None:
            interval = self.integer("full_attention_interval", 4)
            return "".join("A" if (i + 1) % interval == 0 else "G" for i in range(count))
        check(
            isinstance(kinds, list),
            f"{self.owner} has layer_types={kinds!r}; it must be a list, one word a layer.",
        )
        check(
            len(kinds) == count,
            f"{self.owner} has layer_types for {len(kinds)} layers but num_hidden_layers={count}; "
            "they must agree.",
        )
        for kind in kinds:
            check(
                isinstance(kind, str) and kind in LETTERS,
                f"{self.owner} has the layer type {kind!r}, which is not supported here; only "
                f"{' and '.join(LETTERS)} are.",
            )
        return "".join(LETTERS[kind] for kind in kinds)


def shortest_pattern(letters: str) -> str:
    """The shortest pattern that tiles to these letters, so that most layers share one scan."""
    for period in range(1, len(letters)):
        if all(letter == letters[i % period] for i, letter in enumerate(letters)):
            return letters[:period]
    return letters


def layer_types(letters: str) -> list[str]:
    """What `layer_letters` reads; letters that have no word here are kept, to be refused by it."""
    words = {letter: kind for kind, letter in LETTERS.items()}
    return [words.get(letter, letter) for letter in letters]

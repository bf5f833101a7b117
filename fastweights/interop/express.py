"""Which published family a model from here can be written as, and what stands in the way.

A family's config is written from the model and read back; what comes back otherwise is what the
family cannot say.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fastweights.errors import UserError
from fastweights.interop.checkpoint import FAMILIES
from fastweights.interop.family import Family
from fastweights.interop.fields import Fields, decode
from fastweights.model import ModelConfig

# How a mixer is computed, not what it computes.
FREE = ("chunk_size", "implementation")


def express(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The family that a model belongs to, and its config.json.

    Raises:
      UserError: it belongs to none; names each part that the nearest one does not have.
    """
    letters = set(config.layout.letters)
    fitting = [family for family in FAMILIES if letters <= set(family.letters)]
    if not fitting:
        strange = sorted(letters - {x for family in FAMILIES for x in family.letters})
        parts = f"letter {', '.join(strange)} of" if strange else "the mix of letters in"
        known = "; ".join(f"{family.name}: {', '.join(family.letters)}" for family in FAMILIES)
        raise UserError(
            f"{parts} model.pattern '{config.pattern}' has no counterpart in a published family "
            f"({known}); this model can't be exported."
        )
    tried = []
    for family in fitting:
        written = family.write(config)
        try:
            fields = Fields(decode(json.loads(json.dumps(written))), family.name)
            back = family.read(fields, config.tie_embeddings)
        except UserError as error:
            tried.append((True, [str(error).rstrip(".").split("; ")[0]], family))
            continue
        ours, theirs = _essence(config), _essence(back)
        wrong = [
            f"{name} is {ours[name]!r} where {family.name} has {theirs.get(name)!r}"
            for name in ours
            if ours[name] != theirs.get(name)
        ]
        if not wrong:
            return family, written
        tried.append((False, wrong, family))
    # One whose config can't even be read back is the last to be called near.
    _, reasons, family = min(tried, key=lambda found: (found[0], len(found[1])))
    raise UserError(
        f"this model can't be exported, {family.name} being the nearest published family: "
        f"{'; '.join(reasons)}."
    )


def _essence(config: ModelConfig) -> dict[str, Any]:
    """What a model computes, defaults filled in, by the names of its fields.

    The convention of its norms' weights is left out, for a norm can be written in either.
    """
    letters, kinds = config.layout.letters, [config.mlp_kind(i) for i in range(config.num_layers)]
    found: dict[str, Any] = {
        f"model.{name}": getattr(config, name)
        for name in ("vocab_size", "d_model", "decoder", "tie_embeddings", "norm_eps")
    }
    found |= {"model.pattern": letters, "model.mlp": kinds}
    found["model.post_norm"] = "".join(sorted(set(config.post_norm) & set(letters)))
    if "swiglu" in kinds:
        found["model.mlp_dim"] = config.mlp_width
    if "moe" in kinds:
        found |= {f"model.moe.{k}": v for k, v in dataclasses.asdict(config.moe).items()}
    for letter in sorted(set(letters)):
        c = getattr(config.mixers, letter)
        options = {k: v for k, v in dataclasses.asdict(c).items() if k not in FREE}
        for name, filled in (
            ("num_kv_heads", "kv_heads"),
            ("num_qk_heads", "qk_heads"),
            ("value_head_dim", "value_dim"),
        ):
            if name in options:
                options[name] = getattr(c, filled)
        if "dt_rank" in options:
            options["dt_rank"] = c.rank(config.d_model)
        if "norm_eps" in options:
            options["norm_eps"] = c.norm_eps or config.norm_eps
        if options.get("rope_fraction") == 0:
            del options["rope_theta"]
        if options.get("qk_norm") is False:
            del options["qk_norm_over"]
        found |= {f"model.mixers.{letter}.{name}": value for name, value in options.items()}
    return found

"""A model laid out for decoding: layers one by one, matrices in the dtype they are multiplied in.

Training stacks equal layers and scans over them. A step of decoding would then copy every cache out
of its stack and into a new one; with layers apart each cache is written in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastweights import sharding
from fastweights.errors import check
from fastweights.mixers.layers import Columns
from fastweights.model import ModelConfig
from fastweights.training.optim import MATRICES


def unrolled(config: ModelConfig) -> ModelConfig:
    """The same model with all layers in the unrolled tail and no scanned group.

    Raises:
      UserError: the model has a decoder, and so no next token.
    """
    check(
        config.decoder == "none",
        f"model.decoder is '{config.decoder}', which gives back what has been read and foretells "
        "no next token; generate and score texts with a model without a decoder.",
    )
    # A pattern longer than the depth fills no whole group.
    return dataclasses.replace(config, pattern=config.layout.letters * 2, remat="none")


def for_decoding(config: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of `unrolled(config)` out of those of `config`.

    Args:
      config: the model as it was trained.
      params: its parameters, of any dtype; their arrays may be shared with the result.

    Returns:
      Parameters with matrices in the compute dtype; those from `join` as they are.
    """
    if is_joined(params):
        return params
    dtype, layout = jnp.dtype(config.dtype), config.layout

    def take(tree: Any, group: int | None) -> Any:
        """One group's share, its matrices cast: no second copy in the wide dtype ever exists."""

        def one(path: Any, leaf: jax.Array) -> jax.Array:
            leaf = leaf if group is None else leaf[group]
            # Every module casts its matrices before it multiplies, so that casting once changes no
            # result. Gates, norms and systems stay as wide as they are.
            return leaf.astype(dtype) if path[-1].key in MATRICES else leaf

        return jax.tree_util.tree_map_with_path(one, tree)

    layers = {}
    for index in range(len(layout.letters)):
        group, place = divmod(index, len(layout.group) or 1)
        if group < layout.num_groups:
            layers[f"layer_{index}"] = take(params["groups"][f"layer_{place}"], group)
        else:
            place = index - layout.num_groups * len(layout.group)
            layers[f"layer_{index}"] = take(params["tail"][f"layer_{place}"], None)
    rest = {name: part for name, part in params.items() if name not in ("groups", "tail")}
    return take(rest, None) | {"tail": layers}


# Maps of one x in a layer; those of a line also round alike, so that they are one product.
SIDE_BY_SIDE = (
    ("mixer/qkv/q", "mixer/qkv/k", "mixer/qkv/v", "mixer/read_out/gate", "mixer/gate"),
    ("mixer/beta/proj", "mixer/decay/proj"),
    ("mlp/gate", "mlp/up"),
    ("mlp/shared/gate", "mlp/shared/up"),
)


def join(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an `unrolled` model, a layer's "joined" holding its `SIDE_BY_SIDE` kernels.

    In their places stand arrays without rows. Over several devices all stays as it is, for what
    lies side by side would be cut elsewhere.
    """
    if is_joined(params) or len(jax.tree.leaves(params)[0].devices()) > 1:
        return params
    layers = {}
    for name, layer in params["tail"].items():
        layers[name] = layer = jax.tree.map(lambda x: x, layer)  # dicts of its own
        wholes = []
        for line in _lines(layer):
            wholes.append(jnp.concatenate([map_["kernel"] for map_ in line], axis=1))
            for map_ in line:
                map_["kernel"] = map_["kernel"][:0]
        layer["joined"] = wholes
    return params | {"tail": layers}


def is_joined(params: dict[str, Any]) -> bool:
    """Whether they come from `join`."""
    return any("joined" in layer for layer in params.get("tail", {}).values())


def split(params: dict[str, Any]) -> dict[str, Any]:
    """Undoes `join`, if it did anything, inside a traced function; `Columns` are the kernels."""
    if not is_joined(params):
        return params
    layers = {}
    for name, layer in params["tail"].items():
        layers[name] = layer = jax.tree.map(lambda x: x, layer)
        for whole, line in zip(layer.pop("joined"), _lines(layer), strict=True):
            start = 0
            for map_ in line:
                width = map_["kernel"].shape[1]
                map_["kernel"] = Columns(whole, start, width)
                start += width
    return params | {"tail": layers}


def _lines(layer: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The maps of each line of `SIDE_BY_SIDE` that the layer has, where they are several."""
    lines = []
    for paths in SIDE_BY_SIDE:
        line = []
        for path in paths:
            found: Any = layer
            for key in path.split("/"):
                found = found.get(key, {})
            # Experts' kernels are stacks of matrices.
            line += [found] if "kernel" in found and found["kernel"].ndim == 2 else []
        lines += [line] if len(line) > 1 else []
    return lines


class Placement(NamedTuple):
    """Where the arrays of a batch lie, given where the parameters do."""

    rows: jax.sharding.Sharding
    whole: jax.sharding.Sharding

    def of(self, tree: Any) -> Any:
        """A sharding for each leaf of caches: rows lead in all but single numbers."""
        return jax.tree.map(lambda x: self.rows if x.ndim else self.whole, tree)

    def shapes(self, tree: Any) -> Any:
        """The leaves as `ShapeDtypeStruct`s that say where they lie."""
        return jax.tree.map(
            lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
            tree,
            self.of(tree),
        )


def place_rows(params: Any, rows: int) -> Placement:
    """Rows over the batch axes of the mesh that the parameters lie on; else on their device.

    Raises:
      UserError: the mesh cannot cut so many rows.
    """
    placed = jax.tree.leaves(params)[0].sharding
    if not isinstance(placed, jax.sharding.NamedSharding):
        return Placement(placed, placed)
    mesh: Any = placed.mesh
    sharding.check_batch(rows, mesh)
    return Placement(sharding.batch_sharding(mesh), sharding.replicated(mesh))

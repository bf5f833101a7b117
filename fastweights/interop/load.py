"""From a published model's files to parameters on the devices, a tensor at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fastweights.errors import check
from fastweights.interop.checkpoint import Checkpoint
from fastweights.interop.tensors import Path
from fastweights.model import ModelConfig, abstract_model
from fastweights.sharding import param_shardings


def load_params(checkpoint: Checkpoint, config: ModelConfig, mesh: jax.sharding.Mesh) -> Any:
    """The parameters, laid over the mesh.

    One tensor at a time goes from its file to its place on the devices, so host memory holds little
    more than one tensor at any time.

    Args:
      config: `checkpoint.model`, perhaps with other dtypes.

    Raises:
      UserError: a tensor whose dtype the parameter's cannot hold.
    """
    _, shapes, axes = abstract_model(config)
    shardings = _by_path(param_shardings(axes, shapes, mesh))
    shapes = _by_path(shapes)
    leaves: dict[Path, jax.Array] = {}
    for row in checkpoint.rows():
        parts = row.split([checkpoint.read(name) for name in row.names])
        for param, part in zip(row.params, parts, strict=True):
            shape, sharding = shapes[param.path], shardings[param.path]
            lead = len(param.index)
            if math.prod(shape.shape[:lead]) == 1:  # an only slice is the whole
                part, lead = part.reshape(shape.shape), 0
            assert part.shape == shape.shape[lead:], (row, part.shape, shape)
            check(
                jnp.promote_types(part.dtype, shape.dtype) == shape.dtype,
                f"tensor '{row.names[0]}' is {part.dtype}, which {shape.dtype} parameters cannot "
                f"hold; set model.param_dtype={part.dtype}.",
            )
            piece = _place(np.asarray(part, shape.dtype), sharding, lead)
            if not lead:
                leaves[param.path] = piece
                continue
            if param.path not in leaves:
                leaves[param.path] = jnp.zeros(shape.shape, shape.dtype, device=sharding)
            leaves[param.path] = _writer(sharding)(leaves[param.path], piece, param.index)
    assert leaves.keys() == shapes.keys(), shapes.keys() ^ leaves.keys()
    return _nested(leaves)


def _place(piece: np.ndarray, sharding: NamedSharding, lead: int) -> jax.Array:
    """Puts one slice of a parameter on the devices, cut as the whole is."""
    spec = PartitionSpec(*sharding.spec[lead:])
    return jax.make_array_from_callback(
        piece.shape, NamedSharding(sharding.mesh, spec), lambda index: piece[index]
    )


@functools.cache
def _writer(sharding: NamedSharding) -> Any:
    def write(leaf, piece, index):
        start = (*index, *[0] * piece.ndim)
        return jax.lax.dynamic_update_slice(
            leaf, piece.reshape((1,) * len(index) + piece.shape), start
        )

    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(write, donate_argnums=0, out_shardings=sharding, compiler_options=quick)


def _by_path(tree: Any) -> dict[Path, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {tuple(str(key.key) for key in path): leaf for path, leaf in leaves}


def _nested(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        holder = tree
        for name in path[:-1]:
            holder = holder.setdefault(name, {})
        holder[path[-1]] = leaf
    return tree

"""Ops inside `jax.shard_map`, where JAX keeps track of the mesh axes that an array varies over."""

from typing import Any

import jax


def vary_alike(tree: Any) -> Any:
    """All arrays of a tree, made to vary over every axis that one of them varies over.

    A loop's carry must vary as what the loop adds to it, and a hand-written gradient knows nothing
    of mesh axes. The gradient of this cast is the sum over the axes, which is what an input that
    all devices share needs. Outside `shard_map` nothing happens.
    """

    def varying(x) -> frozenset:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*map(varying, jax.tree.leaves(tree)))

    def cast(x):
        missing = tuple(sorted(axes - varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)

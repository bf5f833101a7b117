"""Training state: one plain pytree `{params, opt, step, skipped}` and its shardings."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fastweights import sharding
from fastweights.model import ModelConfig, abstract_model, init_params

State = dict[str, Any]


class Blueprint(NamedTuple):
    """What a run needs to know of its state before any array exists.

    Attributes:
      graphdef: the model's static part; `model.bind(graphdef, params)` gives the module back.
      abstract: the state as `ShapeDtypeStruct`s that carry their shardings.
      shardings: the same tree of `NamedSharding`s.
    """

    graphdef: nnx.GraphDef
    abstract: State
    shardings: State


def make_blueprint(
    config: ModelConfig, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> Blueprint:
    """Shapes and shardings of the state; optimiser moments lie where their parameters lie."""
    graphdef, abstract_params, logical_axes = abstract_model(config)
    param_shardings = sharding.param_shardings(logical_axes, abstract_params, mesh)
    replicated = sharding.replicated(mesh)
    abstract = jax.eval_shape(lambda params: _fresh(params, tx), abstract_params)
    shardings = {
        "params": param_shardings,
        "opt": optax.tree_map_params(
            tx,
            lambda _, placement: placement,
            abstract["opt"],
            param_shardings,
            transform_non_params=lambda _: replicated,
        ),
        "step": replicated,
        "skipped": replicated,
    }
    abstract = jax.tree.map(
        lambda leaf, placement: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement),
        abstract,
        shardings,
    )
    return Blueprint(graphdef, abstract, shardings)


def init_state(
    config: ModelConfig, tx: optax.GradientTransformation, blueprint: Blueprint, seed: int
) -> State:
    """A fresh state, made in place on its devices; the values do not depend on the mesh."""

    def init(key: jax.Array) -> State:
        return _fresh(init_params(config, key), tx)

    return jax.jit(init, out_shardings=blueprint.shardings)(jax.random.key(seed))


def _fresh(params: Any, tx: optax.GradientTransformation) -> State:
    return {
        "params": params,
        "opt": tx.init(params),
        "step": jnp.zeros((), jnp.int32),  # batches consumed
        "skipped": jnp.zeros((), jnp.int32),  # of these, updates dropped as not finite
    }

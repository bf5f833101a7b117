"""Training state: one plain pytree `{params, opt, step, skipped}` and its shardings."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fastweights import sharding
from fastweights.model import ModelConfig, abstract_model, init_params
from fastweights.training.optim import path_names

State = dict[str, Any]

# For what runs once, so that compile time is most of its cost: twice as fast without LLVM's
# optimisation.
QUICK = {"xla_backend_optimization_level": 0}


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
    abstract = jax.eval_shape(lambda params: fresh_state(params, tx), abstract_params)
    shardings = {
        "params": param_shardings,
        "opt": _opt_shardings(abstract["opt"], abstract_params, param_shardings, replicated),
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
        return fresh_state(init_params(config, key), tx)

    return jax.jit(init, out_shardings=blueprint.shardings, compiler_options=QUICK)(
        jax.random.key(seed)
    )


def start_from(params: Any, tx: optax.GradientTransformation, blueprint: Blueprint) -> State:
    """The state before the first step of a run that starts from given parameters (donated)."""
    start = jax.jit(
        lambda params: fresh_state(params, tx),
        out_shardings=blueprint.shardings,
        donate_argnums=0,
        compiler_options=QUICK,
    )
    return start(params)


def _opt_shardings(opt: Any, params: Any, param_shardings: Any, replicated: Any) -> Any:
    """A leaf that ends in a parameter's path and has its shape lies as the parameter does.

    (`optax.tree_map_params` can't say it for optimisers that treat groups of parameters apart.)
    """
    known = {
        path_names(path): (leaf.shape, placement)
        for (path, leaf), placement in zip(
            jax.tree_util.tree_flatten_with_path(params)[0],
            jax.tree.leaves(param_shardings),
            strict=True,
        )
    }

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        names = path_names(path)
        for start in range(len(names)):
            shape, placement = known.get(names[start:], (None, None))
            if shape == leaf.shape:
                return placement
        return replicated

    return jax.tree_util.tree_map_with_path(place, opt)


def fresh_state(params: Any, tx: optax.GradientTransformation) -> State:
    """The state before the first step."""
    return {
        "params": params,
        "opt": tx.init(params),
        "step": jnp.zeros((), jnp.int32),  # batches consumed
        "skipped": jnp.zeros((), jnp.int32),  # of these, updates dropped as not finite
    }

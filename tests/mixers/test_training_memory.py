"""Memory of a training step of one linear mixer, from the compiled program."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import memory
import tiny_models
from fastweights import mixers


@pytest.mark.parametrize(
    ("letter", "packed_rows"), [(letter, True) for letter in "LDGKNM"] + [("S", False)]
)
def test_training_memory_of_a_layer(letter, packed_rows):
    """Forward and backward with default options."""
    module, config = mixers.MIXERS[letter]
    kinds = dict(dtype=jnp.float32, param_dtype=jnp.float32, norm_eps=1e-6)

    def build():
        return module(memory.WIDTH, config(), rngs=nnx.Rngs(0), **kinds)

    graphdef, state = nnx.split(nnx.eval_shape(build))
    params = nnx.to_pure_dict(state)

    def total(params, x_BTD, ids_BT):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x_BTD, segment_ids_BT=ids_BT)[0]))

    step = tiny_models.quick_jit(jax.value_and_grad(total, (0, 1)))

    def compile_at(length):
        x_BTD = jax.ShapeDtypeStruct((1, length, memory.WIDTH), jnp.float32)
        ids_BT = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed_rows else None
        return step.lower(params, x_BTD, ids_BT).compile()

    memory.assert_linear(compile_at)

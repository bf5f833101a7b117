"""Mamba's selective scan: what its memory holds. For its numbers see `test_edge_cases.py`."""

import jax
import jax.numpy as jnp

import memory
import ops_family as family
import tiny_models


def test_all_states_are_never_held():
    D, N = memory.WIDTH, 16

    def loss(x):
        y, S = family.call("selective_scan", x, implementation="chunked")
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(S))

    def compile_at(T):
        kinds = {n: (1, T, D) for n in ("x", "dt")} | {n: (1, T, N) for n in "BC"}
        kinds |= {"A": (D, N), "D": (D,)}
        x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in kinds.items()}
        return tiny_models.quick_jit(jax.value_and_grad(loss)).lower(x).compile()

    assert memory.assert_linear(compile_at) < memory.LENGTHS[1] * D * N / 4

"""Mamba's selective scan: what its memory holds. For its numbers see `test_edge_cases.py`."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import ops_family as family
import tiny_models


def test_all_states_are_never_held():
    """Forward and backward at D = 512, N = 16: linear in T and small beside B T D N numbers."""
    D, N = 512, 16

    def loss(x):
        y, S = family.call("selective_scan", x, implementation="chunked")
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(S))

    def compiled(T):
        kinds = {n: (1, T, D) for n in ("x", "dt")} | {n: (1, T, N) for n in "BC"}
        kinds |= {"A": (D, N), "D": (D,)}
        x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in kinds.items()}
        # Code quality changes no buffer, and compiling for it takes longer.
        return tiny_models.quick_jit(jax.value_and_grad(loss)).lower(x).compile()

    small, large = compiled(2048), compiled(8192)
    bytes_small, bytes_large = (c.memory_analysis().temp_size_in_bytes for c in (small, large))
    assert bytes_large <= 4.4 * bytes_small
    assert bytes_large < 40 * 8192 * D * 4
    shapes = re.findall(r"f32\[([\d,]+)\]", large.as_text())
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    assert largest < 8192 * D * N / 4

"""Which calls the TPU kernels take, and what is said where they do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AxisType

from fastweights import ops
from fastweights.ops.mosaic_tpu import support

MESH = ("data", "fsdp", "tensor")


def arrays(dtype=jnp.bfloat16, K=64, V=64, T=20):
    return (jnp.ones((1, T, 1, K), dtype),) * 2 + (jnp.ones((1, T, 1, V), dtype),)


@pytest.mark.parametrize(
    ("arguments", "state", "channels", "reason"),
    [
        (arrays(), None, False, None),
        (arrays(jnp.float32, K=60, V=256), None, False, None),
        (arrays(K=320), None, False, "320 and 64"),
        (arrays(jnp.float16), None, False, "q is float16"),
        (arrays(), jnp.zeros((1, 1, 64, 64), jnp.bfloat16), False, "ask for bfloat16"),
        (arrays(), None, True, "key channel"),
        (arrays(T=1), None, False, None),
        (arrays(T=1, K=60), None, False, "multiples of 8, and these are 60 and 64"),
    ],
)
def test_obstacles(on_tpu, arguments, state, channels, reason):
    got = support.obstacle(*arguments, state, channels=channels)
    assert got is None if reason is None else reason in got


@pytest.mark.parametrize(
    ("platform", "kind", "found"),
    [
        ("tpu", "TPU v5 lite", True),
        ("tpu", "TPU v5", True),
        ("tpu", "TPU v6 lite", True),
        ("tpu", "TPU7x", True),
        ("tpu", "TPU v4", False),
        ("gpu", "NVIDIA H200", False),
    ],
)
def test_the_device_that_is_meant_decides(platform, kind, found):
    """As when a program is compiled for a machine that is not here."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    assert not support.on_tpu()
    with jax.sharding.use_abstract_mesh(mesh):
        assert support.on_tpu() == found


def test_what_the_kernels_do_not_take_runs_without_and_says_so_once(on_tpu, recwarn):
    q, k, v = arrays(K=320)
    want, _ = ops.linear_attention(q, k, v, implementation="chunked")
    with pytest.warns(UserWarning, match="linear_attention: runs as XLA code, .* 320 and 64"):
        got, _ = ops.linear_attention(q, k, v)
    ops.linear_attention(q, k, v)
    np.testing.assert_array_equal(got, want)
    assert not on_tpu and not recwarn.list


def test_over_a_mesh_each_device_runs_the_kernels_on_its_part(on_tpu):
    """Four rows and two heads on eight devices, as on one."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((4, 20, 2, 8)), jnp.float32) for _ in range(3))

    def run(*arrays):
        out, pull = jax.vjp(lambda *a: ops.linear_attention(*a, scale=0.1), *arrays)
        return out, pull(out)

    alone = jax.jit(run)(q, k, v)
    with jax.set_mesh(jax.make_mesh((2, 2, 2), MESH, axis_types=(AxisType.Auto,) * 3)):
        cut = jax.jit(run)(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), cut, alone)
    assert on_tpu == [("rule", (4, 20, 2, 8)), ("rule", (1, 20, 1, 8))]


def test_members_of_vmap(on_tpu):
    members = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, 20, 1, 8)), jnp.float32)

    def call(x):
        return ops.linear_attention(x, x, x, scale=0.1)

    got = jax.jit(jax.vmap(call))(members)
    for i, x in enumerate(members):
        for whole, alone in zip(got, jax.jit(call)(x), strict=True):
            np.testing.assert_allclose(whole[i], alone, rtol=1e-5, atol=1e-5)
    assert len(on_tpu) == 2

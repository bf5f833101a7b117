"""Which calls the Hopper kernels take, and what is said where they do not."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fastweights.ops.mosaic_gpu.support as support
from fastweights import ops
from fastweights.ops import chunked, convolution, kernels
from fastweights.ops.mosaic_gpu import convolution as kernel
from fastweights.ops.mosaic_gpu import rule


@pytest.fixture(autouse=True)
def forget():
    kernels.say_once.cache_clear()


def arrays(dtype=jnp.bfloat16, K=64, V=64, T=20):
    return (jnp.ones((1, T, 1, K), dtype),) * 2 + (jnp.ones((1, T, 1, V), dtype),)


def test_a_call_for_kernels_falls_back_and_says_so_once(recwarn):
    q, k, v = arrays()
    want, _ = ops.linear_attention(q, k, v, implementation="chunked")
    with pytest.warns(UserWarning, match="linear_attention.*compute capability 9.0"):
        got, _ = ops.linear_attention(q, k, v, implementation="pallas")
    ops.linear_attention(q, k, v, implementation="pallas")
    assert (got == want).all() and not recwarn.list


@pytest.mark.parametrize("named", [None, "gpu"])
def test_a_default_device_may_be_named_by_its_platform(monkeypatch, named):
    card = types.SimpleNamespace(compute_capability="9.0")
    asked = []
    monkeypatch.setattr(
        support.jax, "local_devices", lambda backend=None: asked.append(backend) or [card]
    )
    with jax.default_device(named):
        assert support.on_hopper()
    assert asked == [named]


def test_a_normaliser_is_the_reason_told(monkeypatch):
    monkeypatch.setattr(support, "on_hopper", lambda: True)
    with pytest.warns(UserWarning, match="know no normaliser"):
        ops.linear_attention(*arrays(), normalize=True)


def test_auto_says_nothing_where_there_is_no_hopper():
    ops.linear_attention(*arrays())


@pytest.mark.parametrize(
    ("arguments", "state", "channels", "reason"),
    [
        (arrays(), None, False, None),
        (arrays(V=256), None, False, None),
        (arrays(jnp.float32), None, False, "q is float32"),
        (arrays(K=256), None, False, None),
        (arrays(K=320), None, False, "320 and 64"),
        (arrays(V=320), None, False, "64 and 320"),
        (arrays(), jnp.zeros((1, 1, 64, 64), jnp.bfloat16), False, "ask for bfloat16"),
        (arrays(), None, True, "key channel"),
        (arrays(jnp.float32, T=1), None, False, None),
        (arrays(jnp.float16, T=1), None, False, "q is float16"),
        (arrays(K=60, T=1), None, False, "multiples of 64, and these are 60 and 64"),
        (arrays(V=65, T=1), None, False, "64 and 65"),
        (arrays(K=60), None, False, None),
    ],
)
def test_obstacles_on_a_hopper(monkeypatch, arguments, state, channels, reason):
    monkeypatch.setattr(support, "on_hopper", lambda: True)
    got = support.obstacle(*arguments, state, channels=channels)
    assert got is None if reason is None else reason in got


@pytest.mark.parametrize(
    ("axis", "kind", "reason"),
    [
        ("data", AxisType.Auto, None),
        ("rows", AxisType.Auto, "not over 'rows'"),
        ("data", AxisType.Explicit, "not over 'data'"),
    ],
)
def test_meshes_the_kernels_can_be_cut_over(monkeypatch, axis, kind, reason):
    monkeypatch.setattr(support, "on_hopper", lambda: True)
    seen = []

    def ask(x):
        seen.append(support.obstacle(*arrays(), None, channels=False))
        return x

    with jax.set_mesh(jax.make_mesh((8,), (axis,), axis_types=(kind,))):
        ask(None)
        cut = jax.shard_map(ask, in_specs=P(axis), out_specs=P(axis), check_vma=False)
        jax.jit(cut)(jax.device_put(jnp.ones(8), P(axis)))
    with jax.set_mesh(jax.make_mesh((1,), (axis,))):
        ask(None)
    assert seen[1:] == [None, None]
    assert seen[0] is None if reason is None else reason in seen[0]


@pytest.fixture
def stand_ins(monkeypatch):
    """The kernels' XLA twins in their place, on Hopper GPUs that are none; the shapes they see."""
    shapes = []

    def core(q, k, v, *rest, scale):
        shapes.append((q.shape, v.shape))
        return chunked.core(q, k, v, *rest, scale=scale, chunk_size=16)

    def convolve(x, w, bias, reach, *, activation, unit):
        del reach
        shapes.append((x.shape, w.shape))
        form = convolution._weighted_sum
        y = form(convolution._prepend(None, x, w.shape[0] - 1), w, bias, None, activation)
        return convolution.normalize_heads(y, unit)

    monkeypatch.setattr(support, "on_hopper", lambda: True)
    monkeypatch.setattr(rule, "core", core)
    monkeypatch.setattr(kernel, "short_convolution", convolve)
    return shapes


def close(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=2e-2), got, want)


MESH = dict(data=2, fsdp=2, tensor=2)
SLICES = dict(data=2, tensor=2, sequence=2)


def over_mesh(call, *arrays, mesh=MESH):
    """The call's results and gradients over eight devices, and on one."""

    def run(*arrays):
        out, pull = jax.vjp(call, *arrays)
        return out, pull(out)

    alone = jax.jit(run)(*arrays)
    axes = (AxisType.Auto,) * len(mesh)
    with jax.set_mesh(jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=axes)):
        return jax.jit(run)(*arrays), alone


@pytest.mark.parametrize(
    ("mesh", "rows", "heads", "seen"),
    [
        (MESH, 4, (2, 4), ((1, 20, 1, 64), (1, 20, 2, 64))),
        (MESH, 4, (1, 4), ((1, 20, 1, 64), (1, 20, 4, 64))),
        (MESH, 3, (2, 2), ((3, 20, 1, 64), (3, 20, 1, 64))),
        (SLICES, 4, (2, 2), ((2, 10, 1, 64), (2, 10, 1, 64))),
    ],
    ids=["rows and heads", "a head that cannot be cut", "rows that cannot be cut", "slices"],
)
def test_over_a_mesh_each_device_runs_the_kernels_on_its_part(stand_ins, mesh, rows, heads, seen):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    H, G = heads
    q, k, v = normal(rows, 20, H, 64), normal(rows, 20, H, 64), normal(rows, 20, G, 64)
    k = k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True).astype(k.dtype)
    g = -jnp.abs(normal(rows, 20, G, dtype=jnp.float32))
    beta = jax.nn.sigmoid(normal(rows, 20, G, dtype=jnp.float32))
    segments = jnp.asarray(np.repeat([[1, 1, 2, 2]], rows, 0).repeat(5, 1))
    call = functools.partial(ops.gated_delta_rule, segment_ids=segments)
    close(*over_mesh(call, q, k, v, g, beta, mesh=mesh))
    assert seen in stand_ins


def test_over_a_mesh_each_device_convolves_its_part(stand_ins):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((4, 128, 256), (4, 256)))
    close(*over_mesh(lambda x, w: ops.short_convolution(x, w)[0], x, w))
    assert ((1, 128, 128), (4, 128)) in stand_ins
    y = jnp.concatenate([x, x[::-1]], axis=1)
    close(*over_mesh(lambda x, w: ops.short_convolution(x, w)[0], y, w, mesh=SLICES))
    assert ((2, 131, 128), (4, 128)) in stand_ins
    with pytest.warns(UserWarning, match="multiples of 64 channels, and a device has 32"):
        over_mesh(lambda x, w: ops.short_convolution(x, w)[0], x[:, :, :64], w[:, :64])


def test_heads_that_devices_share_are_scaled_behind_the_kernel(stand_ins):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((4, 128, 128), (4, 128)))
    close(*over_mesh(lambda x, w: ops.short_convolution(x, w, unit_heads=128)[0], x, w))
    assert ((1, 128, 64), (4, 64)) in stand_ins

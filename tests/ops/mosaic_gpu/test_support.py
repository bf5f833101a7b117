"""Which calls the Hopper kernels take, and what is said where they do not."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import fastweights.ops.mosaic_gpu.support as support
from fastweights import ops


@pytest.fixture(autouse=True)
def forget():
    support.say_once.cache_clear()


def arrays(dtype=jnp.bfloat16, K=64, V=64, T=20):
    return (jnp.ones((1, T, 1, K), dtype),) * 2 + (jnp.ones((1, T, 1, V), dtype),)


def test_a_call_for_kernels_falls_back_and_says_so_once(recwarn):
    q, k, v = arrays()
    want, _ = ops.linear_attention(q, k, v, implementation="chunked")
    with pytest.warns(UserWarning, match="linear_attention.*compute capability 9.0"):
        got, _ = ops.linear_attention(q, k, v, implementation="pallas")
    ops.linear_attention(q, k, v, implementation="pallas")
    assert (got == want).all() and not recwarn.list


def test_auto_says_nothing_where_there_is_no_hopper():
    ops.linear_attention(*arrays())


@pytest.mark.parametrize(
    ("arguments", "state", "channels", "reason"),
    [
        (arrays(), None, False, None),
        (arrays(V=256), None, False, None),
        (arrays(jnp.float32), None, False, "q is float32"),
        (arrays(K=192), None, False, "192 and 64"),
        (arrays(V=320), None, False, "64 and 320"),
        (arrays(), jnp.zeros((1, 1, 64, 64), jnp.bfloat16), False, "initial_state is bfloat16"),
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


def test_a_mesh_of_several_devices_is_an_obstacle_unless_the_call_is_cut_by_hand(monkeypatch):
    monkeypatch.setattr(support, "on_hopper", lambda: True)
    seen = []

    def ask(x):
        seen.append(support.obstacle(*arrays(), None, channels=False))
        return x

    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        ask(None)
        cut = jax.shard_map(ask, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        jax.jit(cut)(jnp.ones(8))
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        ask(None)
    assert "8 devices" in seen[0] and seen[1:] == [None, None]

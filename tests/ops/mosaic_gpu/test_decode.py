"""The kernel for one token: in Pallas' GPU simulator, and when the public rules choose it.

The simulator takes no note of which thread holds what; `scripts/check_kernels.py` does, on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ops_oracle
from fastweights import ops
from fastweights.ops import kernels
from fastweights.ops.mosaic_gpu import decode, support

NAMES = ops_oracle.NAMES


def draw(without=(), **dims):
    x = ops_oracle.random_inputs(0, T=1, **(dict(B=1, H=1, G=1, K=64, V=64) | dims))
    return {name: a for name, a in x.items() if name not in without}


def arguments(x):
    return [jnp.asarray(x[n]) if n in x else None for n in NAMES]


def simulated(K=64):
    return jax.jit(functools.partial(decode.core, scale=K**-0.5, simulate=True))


@pytest.mark.parametrize(
    "options",
    [
        dict(B=3, H=2, G=4, K=128, V=128),
        dict(H=2, G=2, V=192),
        dict(K=256, V=64),
        dict(G=3, K=128, without=("g",)),
        dict(B=2, V=128, without=("beta",)),
        dict(without=("g", "beta")),
    ],
    ids=str,
)
def test_one_token_matches_the_recurrence(options, races_found):
    x = draw(**options)
    want = ops_oracle.recurrence(x)
    o, S = simulated(x["q"].shape[-1])(*arguments(x))
    ops_oracle.assert_close({"o": o, "S": S}, {"o": want["o"], "S": want["S"]})
    assert not races_found()


def test_only_the_output_is_rounded_to_bfloat16():
    x = draw(K=128)
    for name in ("q", "k", "v"):
        x[name] = np.asarray(jnp.asarray(x[name], jnp.bfloat16), np.float32)
    want = ops_oracle.recurrence(x)
    q, k, v, *rest = arguments(x)
    o, S = simulated(128)(*(a.astype(jnp.bfloat16) for a in (q, k, v)), *rest)
    assert o.dtype == jnp.bfloat16
    ops_oracle.assert_close({"S": S}, {"S": want["S"]})
    ops_oracle.assert_close({"o": o}, {"o": want["o"]}, 3e-3)


@pytest.mark.parametrize("without", [(), ("g", "beta")], ids=str)
def test_gradients_are_those_of_the_recurrence(without):
    x = draw(without, G=2)
    present = [i for i, n in enumerate(NAMES) if n in x]
    inputs = arguments(x)

    def call(*some):
        whole = list(inputs)
        for i, a in zip(present, some, strict=True):
            whole[i] = a
        return simulated()(*whole)

    (o, S), pull = jax.vjp(call, *(inputs[i] for i in present))
    gradients = pull((jnp.asarray(x["do"]), jnp.asarray(x["dS"])))
    got = {f"d{NAMES[i]}": d for i, d in zip(present, gradients, strict=True)}
    ops_oracle.assert_close({"o": o, "S": S} | got, ops_oracle.recurrence(x))


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel ran, on a Hopper GPU that is none."""
    ran = []

    def core(*arguments, scale):
        ran.append(scale)
        return real(*arguments, scale=scale, simulate=True)

    real = decode.core
    monkeypatch.setattr(decode, "core", core)
    monkeypatch.setattr(support, "on_hopper", lambda: True)
    kernels.say_once.cache_clear()
    return ran


@pytest.mark.parametrize("implementation", ["auto", "pallas"])
def test_the_rules_send_one_token_to_the_kernel(calls, implementation):
    """Rows of padding change nothing, and g may come in the model's dtype."""
    x = draw(B=2, G=2)
    q, k, v, g, beta, state = arguments(x)
    rest = (g.astype(jnp.bfloat16), beta.astype(jnp.bfloat16))
    options = dict(initial_state=state, segment_ids=jnp.asarray([[1], [0]]))
    call = functools.partial(ops.gated_delta_rule, q, k, v, *rest, **options)
    got = jax.jit(functools.partial(call, implementation=implementation))()
    assert len(calls) == 1
    want = call(implementation="reference")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1][1], state[1])


def test_what_the_kernel_does_not_take_is_one_update_without_it(calls, recwarn):
    x = draw(K=60, without=("g", "beta"))
    q, k, v, _, _, state = arguments(x)
    call = functools.partial(ops.linear_attention, q, k, v, initial_state=state)
    want = call(implementation="reference")
    got = [call()]
    assert not recwarn.list
    with pytest.warns(UserWarning, match="multiples of 64, and these are 60 and 64"):
        got.append(call(implementation="pallas"))
    assert not calls
    for each in got:
        jax.tree.map(np.testing.assert_array_equal, each, want)


def test_under_shard_map_with_its_checks_the_kernel_is_left_out(calls):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("rows",))
    q, k, v, _, _, state = arguments(draw(B=2))
    rows = jax.sharding.PartitionSpec("rows")

    def call(q, k, v, state):
        return ops.linear_attention(q, k, v, initial_state=state)

    cut = jax.shard_map(call, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows)
    got = jax.jit(cut)(q, k, v, state)
    assert not calls
    want = ops.linear_attention(q, k, v, initial_state=state, implementation="reference")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)

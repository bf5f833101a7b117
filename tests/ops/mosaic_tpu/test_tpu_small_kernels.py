"""One token and the short convolution through the TPU kernels, on a TPU that is none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ops_family as family
import ops_oracle as oracle
from fastweights import ops
from fastweights.ops.mosaic_tpu import convolution, decode
from ops_family import RULES


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gated_delta_rule", dict(B=3, H=2, G=4, K=16, V=8)),
        ("gated_delta_rule", dict(G=9, K=8, V=24)),  # a key head in three blocks
        ("delta_rule", dict(K=128, V=64)),
        ("gated_linear_attention", dict(B=2, K=8, V=8)),
        ("linear_attention", dict(G=2, K=8, V=8)),
    ],
    ids=str,
)
def test_one_token(on_tpu, name, sizes):
    x = RULES[name].draw(1, **(dict(B=1, T=1, H=1, G=1) | sizes))
    family.check(name, x, implementation="pallas")
    assert [kernel for kernel, _ in on_tpu] == ["decode"]


def test_one_token_rounds_only_its_output_to_bfloat16(on_tpu):
    name = "gated_delta_rule"
    x, wide = family.narrowed(name, RULES[name].draw(1, B=1, T=1, H=1, G=1, K=8, V=16))
    got, want = family.run(name, x, implementation="pallas"), family.recurrence(name, wide)
    assert got["o"].dtype == jnp.bfloat16
    oracle.assert_close({"S": got["S"]}, {"S": want["S"]})
    oracle.assert_close({"o": got["o"]}, {"o": want["o"]}, 4e-3)


CONVOLUTIONS = [
    (dict(), "silu", 0),
    (dict(B=2, T=300, D=256, bias=True, packed=True), "silu", 128),
    (dict(T=520, W=3, bias=True, packed=True, dtype=jnp.bfloat16), None, 64),
    (dict(T=140, W=1), None, 128),
    (dict(T=300, W=8, packed=True), "silu", 0),
]


def draw(B=1, T=150, D=128, W=4, *, bias=False, packed=False, dtype=jnp.float32):
    """x, taps, bias, cotangent and segment ids: padding with NaN inside and at the end."""
    rng = np.random.default_rng(T + W)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    x, segments = normal(B, T, D).astype(dtype), None
    if packed:
        cuts = rng.choice(np.arange(1, T), size=8, replace=False)
        ids = np.cumsum(np.isin(np.arange(T), cuts))[None].repeat(B, 0) + 1
        ids[:, 5:9] = ids[:, 254:257] = ids[:, T - 3 :] = 0
        segments = jnp.asarray(ids)
        x = jnp.where(segments[..., None] != 0, x, jnp.nan)
    return x, normal(W, D), normal(D) if bias else None, normal(B, T, D), segments


def outputs_and_gradients(x, w, bias, dy, **options):
    @jax.jit
    def run(x, w, bias, dy):
        y, pull = jax.vjp(lambda *a: ops.short_convolution(*a, **options)[0], x, w, bias)
        return y, *pull(dy.astype(y.dtype))

    return run(x, w, bias, dy)


@pytest.mark.parametrize(("sizes", "activation", "unit_heads"), CONVOLUTIONS, ids=str)
def test_convolution(request, sizes, activation, unit_heads):
    """Runs of tokens that end inside documents and inside padding, values and gradients."""
    x, w, bias, dy, segments = draw(**sizes)
    options = dict(segment_ids=segments, activation=activation, unit_heads=unit_heads)
    dy = dy.astype(x.dtype)
    want = outputs_and_gradients(
        *(a if a is None else a.astype(jnp.float32) for a in (x, w, bias, dy)), **options
    )
    calls = request.getfixturevalue("on_tpu")
    got = outputs_and_gradients(x, w, bias, dy, **options)
    assert calls == [("convolution", x.shape)]
    for name, a, b in zip(("y", "dx", "dw", "dbias"), got, want, strict=True):
        if b is not None:
            bound = 4e-3 if x.dtype == jnp.bfloat16 else 1e-5
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b), name


def test_a_convolution_goes_on_from_a_cache(on_tpu):
    x, w, _, _, segments = draw(T=420, packed=True)
    convolve = jax.jit(ops.short_convolution)
    whole, last = convolve(x, w, segment_ids=segments)
    first, then = slice(260), slice(260, None)
    _, cache = convolve(x[:, first], w, segment_ids=segments[:, first])
    rest, tail = convolve(x[:, then], w, cache=cache, segment_ids=segments[:, then])
    assert [shape for _, shape in on_tpu] == [x.shape, (1, 260, 128), (1, 163, 128)]
    np.testing.assert_allclose(rest, whole[:, then], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(tail, last)


def test_no_races_and_nothing_read_before_it_is_written(races_found):
    """Both kernels on two simulated cores whose memory begins as NaN."""
    simulator = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
    )
    x, w, bias, dy, _ = draw(B=2, T=300, bias=True)
    reach = jnp.minimum(jnp.arange(300), 3)[None].repeat(2, 0)

    @jax.jit
    def convolved(x, w, bias, dy):
        call = functools.partial(
            convolution.short_convolution, reach_BT=reach, activation="silu", interpret=simulator
        )
        y, pull = jax.vjp(call, x, w, bias)
        return y, *pull(dy)

    want = outputs_and_gradients(x, w, bias, dy)
    for a, b in zip(convolved(x, w, bias, dy), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    token = RULES["gated_delta_rule"].draw(1, B=2, T=1, H=1, G=2, K=8, V=8)
    inputs = [jnp.asarray(token[n]) for n in oracle.NAMES]
    got = jax.jit(functools.partial(decode.core, scale=8**-0.5, interpret=simulator))(*inputs)
    want = oracle.recurrence(token)
    oracle.assert_close(dict(zip("oS", got, strict=True)), {n: want[n] for n in "oS"})
    assert not races_found()

"""The convolution in Pallas' GPU simulator, and when `ops.short_convolution` takes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastweights import ops
from fastweights.ops import kernels
from fastweights.ops.mosaic_gpu import convolution, support


def draw(B=1, T=150, D=128, W=4, *, bias=False, packed=False):
    """x, taps, bias, cotangent and segment ids: padding in documents and at the end, if packed."""
    rng = np.random.default_rng(T + W)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    segments = None
    if packed:
        cuts = rng.choice(np.arange(1, T), size=8, replace=False)
        ids = np.cumsum(np.isin(np.arange(T), cuts))[None].repeat(B, 0) + 1
        ids[:, 5:9] = 0
        ids[:, T - 3 :] = 0
        segments = jnp.asarray(ids)
    single = functools.partial(normal, dtype=jnp.float32)
    return normal(B, T, D), single(W, D), single(D) if bias else None, normal(B, T, D), segments


@pytest.fixture
def on_hopper(monkeypatch):
    """Kernel calls run in the simulator, on a Hopper GPU that is none; returns the shapes."""
    shapes = []

    def simulated(x_BTD, *args, **options):
        shapes.append(x_BTD.shape)
        return real(x_BTD, *args, **options, simulate=True)

    real = convolution.short_convolution
    monkeypatch.setattr(convolution, "short_convolution", simulated)
    monkeypatch.setattr(support, "on_hopper", lambda: True)
    kernels.say_once.cache_clear()
    return shapes


def outputs_and_gradients(x, w, bias, dy, **options):
    y, pull = jax.vjp(lambda *a: ops.short_convolution(*a, **options)[0], x, w, bias)
    return y, *pull(dy.astype(y.dtype))


@pytest.mark.parametrize(
    ("dims", "activation", "unit_heads"),
    [
        (dict(), "silu", 0),
        (dict(B=2, T=128, D=256, bias=True, packed=True), "silu", 128),
        (dict(T=200, W=3, bias=True, packed=True), None, 64),
        (dict(B=2, D=64), "silu", 32),
        (dict(D=192, bias=True, packed=True), "silu", 0),
        (dict(T=130, W=1), None, 128),
    ],
    ids=str,
)
def test_kernels_match_the_sum_of_taps(on_hopper, races_found, dims, activation, unit_heads):
    x, w, bias, dy, segments = draw(**dims)
    options = dict(segment_ids=segments, activation=activation, unit_heads=unit_heads)
    if segments is not None:
        x = jnp.where(segments[..., None] != 0, x, jnp.nan)
    got = outputs_and_gradients(x, w, bias, dy, **options)
    assert on_hopper == [x.shape]
    with pytest.warns(UserWarning, match="bfloat16"):
        want = outputs_and_gradients(x.astype(jnp.float32), w, bias, dy, **options)
    assert len(on_hopper) == 1
    # Heads of 32 are scaled behind the kernel, from what it rounded.
    of_sums = 4e-3 if unit_heads == 32 else 1e-6
    for name, a, b, bound in zip(
        ("y", "dx", "dw", "dbias"), got, want, (4e-3, 4e-3, of_sums, of_sums), strict=True
    ):
        if b is not None:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b), name
    assert not races_found()


def test_a_call_that_goes_on_from_a_cache_takes_the_kernel_too(on_hopper):
    x, w, _, _, segments = draw(T=200, packed=True)
    whole, last = ops.short_convolution(x, w, segment_ids=segments)
    _, cache = ops.short_convolution(x[:, :40], w, segment_ids=segments[:, :40])
    rest, tail = ops.short_convolution(x[:, 40:], w, cache=cache, segment_ids=segments[:, 40:])
    assert on_hopper == [x.shape, (1, 163, 128)]  # 40 tokens are no loss without the kernel
    # The simulator may round a sum the other way.
    np.testing.assert_allclose(rest, whole[:, 40:], rtol=1e-2, atol=1e-4)
    np.testing.assert_array_equal(tail, last)


@pytest.mark.parametrize(
    ("dims", "reason"), [(dict(D=100), "a device has 100"), (dict(W=9), "these are 9")], ids=str
)
def test_what_the_kernel_does_not_take_runs_without_and_says_so_once(
    on_hopper, recwarn, dims, reason
):
    x, w, *_ = draw(**dims)
    with pytest.warns(UserWarning, match=f"short_convolution: runs as XLA code, .*{reason}"):
        ops.short_convolution(x, w)
    ops.short_convolution(x, w)
    assert not on_hopper and not recwarn.list

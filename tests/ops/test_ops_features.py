"""Short convolution, rotary embedding, feature maps and document numbering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastweights import ops

WIDTH = 4


def conv_arrays(T, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (2, T, 3), "w": (WIDTH, 3), "cache": (2, WIDTH - 1, 3), "dy": (2, T, 3)}
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def one_by_one(a, ids, cached):
    """Output before the activation and final cache, one real token after the other."""
    taps = a["w"].astype(np.float64)
    y = np.zeros(a["x"].shape)
    caches = []
    for b in range(2):
        start = a["cache"][b] if cached else np.zeros((WIDTH - 1, 3))
        past, before = list(start.astype(np.float64)), None
        for t in range(a["x"].shape[1]):
            if ids[b, t] == 0:
                continue
            if before not in (None, ids[b, t]):
                past = [np.zeros(3)] * (WIDTH - 1)
            before = ids[b, t]
            past = [*past[-(WIDTH - 1) :], a["x"][b, t].astype(np.float64)]
            y[b, t] = np.sum(taps * np.asarray(past[-WIDTH:]), axis=0)
        caches.append(past[-(WIDTH - 1) :])
    return y, np.asarray(caches)


def silu(y):
    return y / (1 + np.exp(-y))


# Rows of 12 tokens. Padding at the ends only: cached and uncached calls agree on it.
IDS = {
    "one_document": np.ones((2, 12)),
    "boundaries": np.repeat([[3, 1, 3, 2]], 2, 0).repeat((5, 1, 2, 4), axis=1),
    "left_padding": np.asarray([[0] * 5 + [1] * 7, [0] * 11 + [6]]),
    "right_padding": np.asarray([[1] * 2 + [2] * 5 + [0] * 5, [1] + [0] * 11]),
    "nothing_real": np.asarray([[0] * 12, [1] * 12]),
}
INTERIOR = np.asarray([[1, 0, 1, 0, 0, 0, 0, 1, 2, 0, 2, 0], [0, 3, 3, 0, 4, 0, 0, 4, 4, 0, 0, 4]])


@pytest.mark.parametrize("cached", (False, True))
@pytest.mark.parametrize("layout", IDS)
def test_convolution_in_documents(layout, cached):
    a, ids = conv_arrays(12), IDS[layout].astype(np.int32)
    a["x"][ids == 0] = np.nan
    cache = a["cache"] if cached else None
    y, tail = ops.short_convolution(a["x"], a["w"], cache=cache, segment_ids=ids, activation=None)
    want, want_tail = one_by_one(a, ids, cached)
    np.testing.assert_allclose(y, want, atol=1e-6)
    np.testing.assert_allclose(tail, want_tail, atol=0)


def test_convolution_skips_interior_padding_with_a_cache():
    a, ids = conv_arrays(12), INTERIOR.astype(np.int32)
    a["x"][ids == 0] = np.nan
    y, tail = ops.short_convolution(a["x"], a["w"], cache=a["cache"], segment_ids=ids)
    want, want_tail = one_by_one(a, ids, True)
    np.testing.assert_allclose(y, silu(want), atol=1e-6)
    np.testing.assert_allclose(tail, want_tail, atol=0)


def test_convolution_takes_interior_padding_as_zeros_without_a_cache():
    a, ids = conv_arrays(12), INTERIOR.astype(np.int32)
    zeroed = a | {"x": np.where(ids[:, :, None] == 0, 0, a["x"])}
    index, _ = ops.find_documents(jnp.asarray(ids))
    a["x"][ids == 0] = np.nan
    y, tail = ops.short_convolution(a["x"], a["w"], segment_ids=ids, activation=None)
    want = one_by_one(zeroed, np.asarray(index) + 1, False)[0]
    np.testing.assert_allclose(y, np.where(ids[:, :, None] == 0, 0, want), atol=1e-6)
    np.testing.assert_allclose(tail, one_by_one(a, ids, False)[1], atol=0)


@pytest.mark.parametrize("length", (1, 2, 3, 9))
def test_convolution_in_pieces_equals_one_run(length):
    a = conv_arrays(12)
    whole, tail = ops.short_convolution(a["x"], a["w"], cache=a["cache"])
    ones = np.ones((2, 12), np.int32)
    np.testing.assert_allclose(whole, silu(one_by_one(a, ones, True)[0]), atol=1e-6)
    first, cache = ops.short_convolution(a["x"][:, :length], a["w"], cache=a["cache"])
    second, cache = ops.short_convolution(a["x"][:, length:], a["w"], cache=cache)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-6)
    np.testing.assert_array_equal(cache, tail)
    np.testing.assert_array_equal(tail, a["x"][:, -3:])


@pytest.mark.parametrize("cached", (False, True))
def test_convolution_gradients_stay_in_their_document(cached):
    """Against the transpose of the linear map, document by document; NaN cotangents at padding."""
    a, ids = conv_arrays(12), IDS["boundaries"].astype(np.int32).copy()
    ids[:, 9:] = 0
    a["x"][ids == 0] = a["dy"][ids == 0] = np.nan

    def call(x, w, cache):
        options = dict(cache=cache if cached else None, segment_ids=ids, activation=None)
        return ops.short_convolution(x, w, **options)[0]

    dx, dw, dcache = jax.vjp(call, a["x"], a["w"], a["cache"])[1](jnp.asarray(a["dy"]))
    want_x, want_w = np.zeros(a["x"].shape), np.zeros(a["w"].shape)
    want_cache = np.zeros(a["cache"].shape)
    for start, end in ((0, 5), (5, 6), (6, 8), (8, 9)):
        for t in range(start, end):
            for i in range(WIDTH):
                source = t - WIDTH + 1 + i
                dy = a["dy"][:, t].astype(np.float64)
                if source >= start:
                    want_x[:, source] += a["w"][i] * dy
                    want_w[i] += np.sum(a["x"][:, source] * dy, 0)
                elif start == 0 and cached:
                    want_cache[:, source + WIDTH - 1] += a["w"][i] * dy
                    want_w[i] += np.sum(a["cache"][:, source + WIDTH - 1] * dy, 0)
    np.testing.assert_allclose(dx, want_x, atol=1e-6)
    np.testing.assert_allclose(dw, want_w, atol=2e-6)
    np.testing.assert_allclose(dcache, want_cache, atol=1e-6)


@pytest.mark.parametrize("layout", ("one_document", "left_padding"))
def test_convolution_adds_its_bias_before_the_activation(layout):
    a, ids = conv_arrays(12), IDS[layout].astype(np.int32)
    bias = np.asarray([0.5, -1.0, 2.0], np.float32)
    y, _ = ops.short_convolution(a["x"], a["w"], bias, segment_ids=ids)
    want = silu(one_by_one(a, ids, False)[0] + bias)
    np.testing.assert_allclose(y, np.where(ids[:, :, None] == 0, 0, want), atol=1e-6)
    slope = jax.grad(
        lambda b: jnp.sum(ops.short_convolution(a["x"], a["w"], b, activation=None)[0])
    )
    np.testing.assert_allclose(slope(bias), 24, rtol=1e-6)


def test_convolution_sums_in_float32():
    x = jnp.asarray([[[256.0], [1.0], [-256.0]]], jnp.bfloat16)
    y, cache = ops.short_convolution(x, jnp.ones((3, 1), jnp.bfloat16), activation=None)
    assert y.dtype == cache.dtype == jnp.bfloat16
    assert y[0, 2, 0] == 1


def test_documents():
    ids = jnp.asarray([[0, 3, 3, 0, 3, 1, 0, 0, 3, 3], [5, 6, 6, 5, 0, 5, 7, 0, 0, 0]])
    index, valid = ops.find_documents(ids)
    want = [[0, 0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]]
    np.testing.assert_array_equal(index, want)
    np.testing.assert_array_equal(valid, np.asarray(ids) != 0)


@pytest.mark.parametrize(
    ("fraction", "asked", "turned"), ((1.0, 8, 8), (0.5, 4, 4), (0.25, 2, 2), (0.375, 3, 4))
)
def test_rotary_turns_pairs_of_halves(fraction, asked, turned):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 6, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 5000, (2, 6)).astype(np.int32)
    got = ops.rotary(x, positions, theta=1000.0, fraction=fraction)
    half = turned // 2
    pairs = x[..., :half] + 1j * x[..., half:turned]
    angle = positions[:, :, None, None] * 1000.0 ** (-2 * np.arange(half) / asked)
    pairs = pairs * np.exp(1j * angle)
    want = np.concatenate([pairs.real, pairs.imag, x[..., turned:]], axis=-1)
    # float32 angles of up to 5000 radians are good to 5000 * 2^-24.
    np.testing.assert_allclose(got, want, atol=2e-3)
    np.testing.assert_array_equal(got[..., turned:], x[..., turned:])
    near = ops.rotary(x, positions % 8, theta=1000.0, fraction=fraction)
    np.testing.assert_allclose(np.linalg.norm(near, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


def test_rotary_scores_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)

    def score(t, s):
        turn = {"theta": 100.0, "fraction": 1.0}
        at = [jnp.full((1, 1), p, jnp.int32) for p in (t, s)]
        return float(jnp.sum(ops.rotary(q, at[0], **turn) * ops.rotary(k, at[1], **turn)))

    np.testing.assert_allclose(score(9, 4), score(25, 20), rtol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_l2_normalize():
    x = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    x[1] = 0
    want = x / np.sqrt(np.sum(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(ops.l2_normalize(x), want, atol=1e-7)
    gradient = jax.grad(lambda x: jnp.sum(ops.l2_normalize(x)))(x)
    np.testing.assert_allclose(gradient[1], 1e3, rtol=1e-5)
    # The sum of squares overflows in float16 and loses its small terms in bfloat16.
    wide = jnp.full((1, 4096), 0.5, jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(ops.l2_normalize(wide), np.float32), 1 / 64, rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "want"),
    (
        ("identity", [-2.0, 0.0, 3.0]),
        ("elu1", [np.exp(-2.0), 1.0, 4.0]),
        ("relu", [0.0, 0.0, 3.0]),
        ("squared_relu", [0.0, 0.0, 9.0]),
        # r = (0, 0, 3, 2, 0, 0) times its neighbour, and times the entry after that.
        ("dpfp", [0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ),
)
def test_feature_maps(name, want):
    x = jnp.asarray([-2.0, 0.0, 3.0])
    phi = ops.feature_map(name, nu=2)
    np.testing.assert_allclose(phi.apply(x), want, rtol=1e-6)
    assert phi.width(3) == len(want)


def test_dpfp_pairs_each_entry_with_those_behind_it():
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    r = np.maximum(np.concatenate([x, -x], -1), 0)
    want = [r[:, i] * r[:, (i + j) % 8] for j in (1, 2, 3) for i in range(8)]
    phi = ops.feature_map("dpfp", nu=3)
    np.testing.assert_allclose(phi.apply(x), np.stack(want, -1), rtol=1e-6)
    assert phi.width(4) == 24


def test_taylor_products_are_the_series():
    q, k = np.random.default_rng(0).standard_normal((2, 50, 6)).astype(np.float32)
    phi = ops.feature_map("taylor")
    products = np.sum(phi.apply(q) * phi.apply(k), axis=-1)
    s = np.sum(q * k, axis=-1) / np.sqrt(6)
    np.testing.assert_allclose(products, 1 + s + s**2 / 2, rtol=2e-6)
    assert phi.apply(q).shape == (50, phi.width(6)) == (50, 43)


@pytest.mark.parametrize("name", ("elu1", "relu", "squared_relu", "dpfp", "taylor"))
def test_normalised_attention_equals_its_quadratic_form(name):
    q, k, v = np.random.default_rng(1).standard_normal((3, 2, 40, 3, 4)).astype(np.float32)
    phi = ops.feature_map(name, nu=2).apply
    o, (S, z) = ops.linear_attention(phi(q), phi(k), v, normalize=True, eps=1e-3, chunk_size=16)
    wide = (np.asarray(phi(x), np.float64) for x in (q, k))
    weights = np.tril(np.einsum("bihf,bjhf->bhij", *wide))
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-3)
    want = np.einsum("bhij,bjhv->bihv", weights, v)
    np.testing.assert_allclose(o, want, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(z, np.sum(np.asarray(phi(k)), axis=1), rtol=1e-5, atol=1e-5)
    assert S.shape[2] == phi(k).shape[-1]


@pytest.mark.parametrize("name", ops.FEATURE_MAPS)
def test_additive_attention_equals_the_regrouped_sum(name):
    """q_i S_i, with S_i the sum of outer products, is the sum of values weighted by q_i . k_j."""
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, 50, 2, 4)).astype(np.float32)
    phi = ops.feature_map(name).apply
    o, _ = ops.linear_attention(phi(q), phi(k), v, scale=1.0, chunk_size=16)
    wide = (np.asarray(phi(x), np.float64) for x in (q, k))
    want = np.einsum("bhij,bjhv->bihv", np.tril(np.einsum("bihf,bjhf->bhij", *wide)), v)
    np.testing.assert_allclose(o, want, rtol=1e-4, atol=1e-4)

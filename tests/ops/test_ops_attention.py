"""Softmax attention against a plain NumPy float64 loop over queries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_models
from fastweights import ops, sharding
from fastweights.ops import attention


@pytest.fixture(autouse=True, params=(False, True), ids=("whole", "blocks"))
def blocks(request, monkeypatch):
    """All queries at once, and eight at a time."""
    if request.param:
        monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 1)
        monkeypatch.setattr(attention, "MASK_AT_ONCE", 1)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", 8)
    return request.param


def arrays(seed=0, *, B=2, T=23, S=None, H=6, J=2, K=5, V=7):
    rng = np.random.default_rng(seed)
    S = T if S is None else S
    shapes = {"q": (B, T, H, K), "k": (B, S, J, K), "v": (B, S, J, V), "do": (B, T, H, V)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def oracle(x, sees_BTS, scale=None, cap=None):
    """Output and gradients when query t of row b sees the keys where sees_BTS is True."""
    x = {name: np.nan_to_num(a.astype(np.float64)) for name, a in x.items()}
    heads, kv_heads, key_dim = x["q"].shape[2], x["k"].shape[2], x["q"].shape[3]
    scale = key_dim**-0.5 if scale is None else scale
    out = {"o": np.zeros_like(x["do"])} | {f"d{n}": np.zeros_like(x[n]) for n in "qkv"}
    for b, t, s in (
        (b, t, np.flatnonzero(row)) for b, rows in enumerate(sees_BTS) for t, row in enumerate(rows)
    ):
        for h in range(heads if len(s) else 0):
            j = h // (heads // kv_heads)
            q, k, v, do = x["q"][b, t, h], x["k"][b, s, j], x["v"][b, s, j], x["do"][b, t, h]
            logits, slope = scale * k @ q, scale
            if cap is not None:
                slope = scale * (1 - np.tanh(logits / cap) ** 2)
                logits = cap * np.tanh(logits / cap)
            p = np.exp(logits)
            p /= p.sum()
            dp = v @ do
            dlogit = slope * p * (dp - p @ dp)
            out["o"][b, t, h] = p @ v
            out["dq"][b, t, h] = dlogit @ k
            out["dk"][b, s, j] += dlogit[:, None] * q
            out["dv"][b, s, j] += p[:, None] * do
    return out


def check(x, sees_BTS, scale=None, **options):
    @jax.jit
    def run(x, options):
        def call(q, k, v):
            return ops.softmax_attention(q, k, v, scale=scale, **fixed, **options)

        o, vjp = jax.vjp(call, x["q"], x["k"], x["v"])
        return {"o": o} | dict(zip(("dq", "dk", "dv"), vjp(x["do"]), strict=True))

    fixed = {name: options.pop(name) for name in ("window", "logit_cap") if name in options}
    got = run(x, options)
    for name, want in oracle(x, sees_BTS, scale, fixed.get("logit_cap")).items():
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=2e-6, err_msg=name)


def causal(x, window=None):
    t, s = np.arange(x["q"].shape[1])[:, None], np.arange(x["k"].shape[1])[None]
    sees = (s <= t) & (t - s < (window or 10**9))
    return np.broadcast_to(sees, (x["q"].shape[0], *sees.shape))


@pytest.mark.parametrize("kv_heads", (1, 2, 3, 6))
def test_grouped_heads(kv_heads):
    x = arrays(J=kv_heads)
    check(x, causal(x))


def test_value_dim_below_key_dim_and_scale():
    x = arrays(K=8, V=3)
    check(x, causal(x), scale=0.3)


@pytest.mark.parametrize("window", (1, 2, 8, 100))
def test_window_counts_the_current_token(window):
    x = arrays()
    check(x, causal(x, window), window=window)


# An id that returns is a new document; 0 is padding and lies everywhere.
SEGMENTS = np.asarray(
    [
        [0, 0, 0, 4, 4, 4, 4, 4, 2, 4, 4, 4, 0, 4, 4, 4, 9, 9, 9, 9, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ],
    np.int32,
)


def packed_sees(window=None):
    """Pairs within a document, counted over its real tokens, token by token."""
    sees = np.zeros((2, 23, 23), bool)
    for b, row in enumerate(SEGMENTS):
        document = []
        for t, segment in enumerate(row):
            if segment == 0:
                continue
            if document and row[document[-1]] != segment:
                document = []
            document.append(t)
            sees[b, t, document[-(window or 1000) :]] = True
    return sees


@pytest.mark.parametrize("cap", (0.3, 5.0))
@pytest.mark.parametrize("window", (None, 4))
def test_logit_cap_bends_scores_before_the_mask(window, cap):
    x = arrays()
    check(x, causal(x, window), window=window, logit_cap=cap)


def test_logit_cap_never_goes_to_cudnn(monkeypatch):
    """As on a GPU that would take the call; without a cap it is refused here, on a CPU."""
    monkeypatch.setattr(attention, "_cudnn_takes", lambda *_: True)
    x = [jnp.asarray(arrays()[name]) for name in "qkv"]
    with pytest.raises(Exception, match=r"(?i)cudnn"):
        ops.softmax_attention(*x)
    assert np.all(np.isfinite(ops.softmax_attention(*x, logit_cap=1.0)))


@pytest.fixture
def given_to_cudnn(monkeypatch):
    """Shapes of queries, and of masks by head and query (None for none); XLA does the work."""
    queries, masks, original = [], [], jax.nn.dot_product_attention

    def stand_in(q, *x, mask, implementation, **options):
        assert implementation == "cudnn"
        queries.append(q.shape)
        masks.append(None if mask is None else mask.shape[1:3])
        return original(q, *x, mask=mask, implementation="xla", **options)

    def start():
        monkeypatch.setattr(attention, "_cudnn_takes", lambda *_: True)
        monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
        return queries, masks

    return start


def packed_loss(ids, *x):
    return jnp.sum(jnp.sin(ops.softmax_attention(*x, segment_ids=ids)))


@pytest.mark.parametrize("heads", (6, 1))
@pytest.mark.parametrize("ids", (SEGMENTS, np.ones_like(SEGMENTS)), ids=("packed", "whole"))
def test_rows_of_one_document_need_no_mask_on_a_gpu(
    given_to_cudnn, monkeypatch, ids, blocks, heads
):
    """The choice at run time; values and gradients. A mask is of some queries at a time, and of
    all heads in short rows."""
    if heads == 1:
        monkeypatch.setattr(attention, "MASK_OF_HEADS", 1)
    x = [jnp.asarray(arrays()[name]) for name in "qkv"]
    run = jax.value_and_grad(functools.partial(packed_loss, jnp.asarray(ids)), (0, 1, 2))
    want = run(*x)
    _, masks = given_to_cudnn()
    got = run(*x)
    assert set(masks) == {None, (heads, 8 if blocks else SEGMENTS.shape[1])}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), got, want)


def test_models_side_by_side_choose_once_whether_they_need_masks(given_to_cudnn):
    """Under vmap a choice a member would run both ways for all."""
    x = [jnp.stack([arrays(seed)[name] for seed in range(2)]) for name in "qkv"]
    ids = jnp.stack([jnp.asarray(SEGMENTS), jnp.ones_like(SEGMENTS)])
    run = jax.vmap(jax.value_and_grad(packed_loss, (1, 2, 3)))
    want = run(ids, *x)
    given_to_cudnn()
    assert "cond[" in str(jax.make_jaxpr(run)(ids, *x))
    got = run(ids, *x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), got, want)


@pytest.mark.parametrize(("tensor", "ids"), ((2, None), (4, SEGMENTS)), ids=("plain", "packed"))
def test_on_a_mesh_cudnn_is_given_a_devices_own_rows_and_heads(given_to_cudnn, tensor, ids):
    """Left to the compiler, each device did the backward pass of the rows of all. Two key heads are
    no reason for four devices to do all heads."""
    x = [jnp.asarray(arrays(H=8)[name]) for name in "qkv"]
    run = jax.jit(jax.value_and_grad(functools.partial(packed_loss, ids), (0, 1, 2)))
    want = run(*x)
    queries, _ = given_to_cudnn()
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, tensor=tensor, sequence=-1))
    with jax.set_mesh(mesh):
        got = run(*x)
    assert {(rows, heads) for rows, _, heads, _ in queries} == {(1, 8 // tensor)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), got, want)


@pytest.mark.parametrize("window", (None, 1, 3))
@pytest.mark.parametrize("cap", (None, 0.5))
def test_packed_documents_with_nan_in_padding(window, cap):
    x = arrays(1)
    for a in x.values():
        a[SEGMENTS == 0] = np.nan
    check(x, packed_sees(window), segment_ids=SEGMENTS, window=window, logit_cap=cap)


@pytest.mark.parametrize(("window", "cap"), ((None, None), (4, None), (4, 0.5)))
def test_cache_slots(window, cap):
    """Three new tokens after a ring of ten slots, two of them empty and full of NaN."""
    x = arrays(2, T=3, S=10)
    kv_positions = np.asarray([[8, 9, 10, 3, 4, 5, 6, 7, 11, 12], range(10)], np.int32)
    kv_ids = np.ones((2, 10), np.int32)
    kv_ids[0, 5] = kv_ids[1, 9] = 0
    q_positions = np.asarray([[8, 9, 10], [4, 5, 6]], np.int32)
    x["k"][kv_ids == 0] = x["v"][kv_ids == 0] = np.nan
    back = q_positions[:, :, None] - kv_positions[:, None, :]
    sees = (back >= 0) & (back < (window or 1000)) & (kv_ids[:, None, :] == 1)
    check(
        x,
        sees,
        window=window,
        logit_cap=cap,
        kv_segment_ids=kv_ids,
        q_positions=q_positions,
        kv_positions=kv_positions,
    )


@pytest.mark.parametrize(("block", "cap"), ((4, None), (4, 0.5), (100, None)))
def test_blocks_of_a_cache(block, cap):
    """Blocks that do not tile the slots, two documents, padding, and slots not written yet."""
    x = arrays(5, T=5, S=15)
    first = 8
    kv_ids = np.asarray([[1] * 4 + [2] * 9 + [0] * 2, [0] * 3 + [1] * 7 + [2] * 3 + [0] * 2])
    ids = kv_ids[:, first : first + 5]
    ids[1, 2] = kv_ids[1, first + 2] = 0
    x["q"][ids == 0] = np.nan
    seen = np.arange(15)[None] <= first + np.arange(5)[:, None]
    sees = seen[None] & (ids[:, :, None] == kv_ids[:, None]) & (ids != 0)[:, :, None]

    @jax.jit
    def run(q, k, v, do, first):
        def call(q, k, v):
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            fixed = dict(document_BT=ids, slot_document_BS=kv_ids, logit_cap=cap, block=block)
            return ops.cached_attention(q, k, v, first=first, **fixed)

        o, vjp = jax.vjp(call, q, k, v)
        return {"o": o} | dict(zip(("dq", "dk", "dv"), vjp(do), strict=True))

    for name, want in oracle(x, sees, cap=cap).items():
        got = run(x["q"], x["k"], x["v"], x["do"], first)[name]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6, err_msg=name)


def test_ids_of_queries_and_keys_are_compared():
    x = arrays(3, T=3, S=6)
    q_ids = np.asarray([[1, 2, 2], [5, 5, 0]], np.int32)
    kv_ids = np.asarray([[1, 1, 2, 0, 2, 2], [5, 0, 0, 0, 0, 0]], np.int32)
    q_positions = np.full((2, 3), 4, np.int32)
    sees = (q_ids[:, :, None] == kv_ids[:, None]) & (kv_ids[:, None] > 0)
    sees &= np.arange(6)[None, None] <= 4
    check(x, sees, segment_ids=q_ids, kv_segment_ids=kv_ids, q_positions=q_positions)


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("cap", (None, 0.5))
def test_bfloat16(cap, packed):
    """Rounded inputs, float32 logits: as good as the rounding of weights and output."""
    x = {name: jnp.asarray(a, jnp.bfloat16) for name, a in arrays().items()}
    ids = SEGMENTS if packed else None

    @jax.jit
    def run(x):
        def call(q, k, v):
            return ops.softmax_attention(q, k, v, logit_cap=cap, segment_ids=ids)

        o, vjp = jax.vjp(call, x["q"], x["k"], x["v"])
        return {"o": o} | dict(zip(("dq", "dk", "dv"), vjp(x["do"]), strict=True))

    wide = {name: np.asarray(a, np.float32) for name, a in x.items()}
    got, want = run(x), oracle(wide, packed_sees() if packed else causal(x), cap=cap)
    for name, a in got.items():
        assert a.dtype == jnp.bfloat16
        error = np.asarray(a, np.float64) - want[name]
        assert np.sqrt(np.mean(error**2)) <= 1e-2 * np.sqrt(np.mean(want[name] ** 2)), name


@pytest.mark.parametrize("cap", (None, 0.5))
def test_transforms(cap):
    """vmap, checkpoint inside a scan, part of the gradient, and a second run to the bit."""
    x = {name: jnp.asarray(arrays()[name]) for name in "qkv"}

    def loss(x):
        return jnp.sum(jnp.sin(ops.softmax_attention(x["q"], x["k"], x["v"], logit_cap=cap)))

    def scanned(x):
        body = jax.checkpoint(lambda total, share: (total + share * loss(x), None))
        return jax.lax.scan(body, 0.0, jnp.asarray([0.25, 0.75]))[0]

    run = tiny_models.quick_jit(jax.grad(loss))
    want, again = run(x), run(x)
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x)
    mapped = jax.tree.map(lambda a: a[0], tiny_models.quick_jit(jax.vmap(jax.grad(loss)))(many))
    alone = tiny_models.quick_jit(jax.grad(lambda k: loss(x | {"k": k})))(x["k"])
    jax.tree.map(np.testing.assert_array_equal, again, want)
    for got in (mapped, tiny_models.quick_jit(jax.grad(scanned))(x), want | {"k": alone}):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6), got, want)


def test_no_tokens():
    x = arrays(T=0)
    assert ops.softmax_attention(x["q"], x["k"], x["v"]).shape == (2, 0, 6, 7)


def test_blocks_spare_the_memory_of_the_logits(blocks):
    x = arrays(B=1, T=256, H=2, J=1, K=8, V=8)
    loss = jax.grad(lambda q, k, v: jnp.sum(ops.softmax_attention(q, k, v)), (0, 1, 2))
    compiled = jax.jit(loss).lower(*(x[name] for name in "qkv")).compile()
    memory: Any = compiled.memory_analysis()
    used = memory.temp_size_in_bytes
    logits = 4 * 2 * 256 * 256
    assert used < logits / 2 if blocks else used >= logits


def test_blocks_sum_gradients_of_keys_unrounded(blocks):
    """Equal parts of a sum in bfloat16 would stop growing."""
    x = arrays(B=1, T=512, H=1, J=1, K=4, V=4)
    q, k, v = (jnp.asarray(x[name], jnp.bfloat16) for name in "qkv")
    ones = jnp.zeros_like(q), jnp.zeros_like(k)
    dv = jax.jit(jax.grad(lambda v: jnp.sum(ops.softmax_attention(*ones, v).astype(float))))(v)
    want = np.cumsum(1 / np.arange(1, 513)[::-1])[::-1]
    np.testing.assert_allclose(np.asarray(dv, np.float32)[0, :, 0, 0], want, rtol=5e-3)

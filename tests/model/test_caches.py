"""Prefill and decode through caches give what one full run gives, wherever the text is split.

Everything in float64, so that the tolerance leaves room for no mistake.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_models
from fastweights import model

T = 10
PACKED = np.array([1, 1, 1, 1, 7, 7, 7, 1, 1, 1], np.int32)
PATTERNS = [(letter, 1) for letter in "AWLDGKNMS"]
# Two scanned groups and a tail, and what the letters make of each other's padding.
PATTERNS += [("GA", 5), ("WMS", 4)]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def build(pattern, num_layers, **options):
    kinds = dict(dtype="float64", param_dtype="float64")
    cfg = tiny_models.config(pattern, num_layers, **kinds, **options)
    graphdef, _, _ = model.abstract_model(cfg)
    params = tiny_models.noisy_params(cfg)

    @tiny_models.quick_jit
    def run(tokens_BT, segment_ids_BT, cache):
        lm = model.bind(graphdef, params)
        return lm(tokens_BT, segment_ids_BT=segment_ids_BT, cache=cache)

    return run, model.bind(graphdef, params)


def close(actual, expected, pattern):
    # Softmax attention takes its logits in float32 whatever the inputs are.
    atol = 2e-6 if set(pattern) & set("AW") else 1e-9
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def place(rows, side):
    """Rows of different lengths in one array of width T, zeros on the other side."""
    out = np.zeros((len(rows), T), np.int32)
    for padded, row in zip(out, rows, strict=True):
        if len(row):
            padded[slice(T - len(row), T) if side == "left" else slice(len(row))] = row
    return out


def gather(logits, ids):
    """The logits of the real tokens of each row."""
    return [np.asarray(row)[real] for row, real in zip(logits, ids != 0, strict=True)]


@pytest.mark.parametrize(("pattern", "num_layers"), PATTERNS)
def test_split_equals_full_run(pattern, num_layers):
    """Each row splits at another token; padding fills up both calls, on either side.

    A call continues the cached document, so packed rows are split inside documents only. Rows of
    one document are also continued token by token.
    """
    run, lm = build(pattern, num_layers)
    tokens = np.asarray(tiny_models.tokens((T,)))
    single = np.ones(T, np.int32)
    cases = [(single, s) for s in range(T + 1)] + [(PACKED, s) for s in (1, 2, 3, 5, 6, 8, 9)]
    both, _ = run(np.stack([tokens, tokens]), np.stack([single, PACKED]), None)
    full = {ids.tobytes(): row for ids, row in zip((single, PACKED), np.asarray(both), strict=True)}

    for sides in (("left", "right"), ("right", "left")):
        cache = lm.init_cache(len(cases), 3 * T)
        parts = []
        for half, side in enumerate(sides):
            cut = [slice(s, None) if half else slice(s) for _, s in cases]
            ids = place([ids[c] for (ids, _), c in zip(cases, cut, strict=True)], side)
            logits, cache = run(place([tokens[c] for c in cut], side), ids, cache)
            parts.append(gather(logits, ids))
            if not half:
                prefilled = cache
        for (ids, _), one, two in zip(cases, *parts, strict=True):
            close(np.concatenate([one, two]), full[ids.tobytes()], pattern)

    # Rows that are through with their tokens, and the packed ones, take padding.
    splits = np.array([s if ids is single else T for ids, s in cases])
    for i in range(T):
        at = np.minimum(splits + i, T - 1)
        real = splits + i < T
        logits, prefilled = run(tokens[at][:, None], real.astype(np.int32)[:, None], prefilled)
        close(np.asarray(logits)[real, 0], full[single.tobytes()][at[real]], pattern)


def test_calls_without_segment_ids():
    """Whole tokens only, one or several at a time: every letter in one model."""
    run, lm = build("AWLDGKNMS", 9, mlp="none")
    tokens = np.asarray(tiny_models.tokens((2, T)))
    expected, no_cache = run(tokens, None, None)
    assert no_cache is None
    cache, start = lm.init_cache(2, T), 0
    for size in (4, 1, 4, 1):
        logits, cache = run(tokens[:, start : start + size], None, cache)
        close(logits, expected[:, start : start + size], "A")
        start += size


@pytest.mark.parametrize("letter", "AWLDGKNMS")
def test_cache_is_fixed_in_size_and_type(letter):
    """A cache goes back in as it came out; only full attention's grows with max_length."""
    run, lm = build(letter, 1)
    cache = lm.init_cache(2, T, jnp.bfloat16)
    _, after = jax.eval_shape(run, tiny_models.tokens((2, 4)), None, cache)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (cache, after)]
    assert kinds[0] == kinds[1]
    longer = jax.tree.map(jnp.size, lm.init_cache(2, 2 * T))
    same = longer == jax.tree.map(jnp.size, lm.init_cache(2, T))
    assert same == (letter != "A")

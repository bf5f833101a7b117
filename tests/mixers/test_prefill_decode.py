"""Every mixer around a chunk's edge: prefill, then decode or one longer continuation.

Padding holds NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_models

T, D = 67, 12
SPLITS = np.array([0, 1, 3, 63, 64, 65])


@pytest.mark.parametrize("letter", "AWLDGKNMS")
def test_any_split_equals_one_run(letter):
    """Row by row another split, so that padding stands on the right and then on the left."""
    # Softmax attention takes its logits in float32 whatever the inputs are.
    tolerance = dict(rtol=0, atol=2e-6 if letter in "AW" else 1e-10)
    options = {} if letter in "AW" else {"chunk_size": 64}
    with jax.enable_x64(True):
        mixer = tiny_models.mixer(letter, D, np.float64, np.float64, **options)
        call = tiny_models.jitted(mixer)
        x_TD = np.random.default_rng(0).standard_normal((T, D))
        full, _ = call(x_TD[None])
        cache = mixer.init_cache(len(SPLITS), 2 * T, np.float64)
        place = np.arange(T)
        ids = (place < SPLITS[:, None]).astype(np.int32)
        x = np.where(ids[..., None] != 0, x_TD, np.nan)
        y, filled = call(x, segment_ids_BT=ids, cache=cache)
        parts = [np.asarray(row)[:split] for row, split in zip(y, SPLITS, strict=True)]

        # The rest in one call, pushed to the right.
        late = 1 - ids
        y, _ = call(np.where(late[..., None] != 0, x_TD, np.nan), segment_ids_BT=late, cache=filled)
        for part, row, split in zip(parts, y, SPLITS, strict=True):
            whole = np.concatenate([part, np.asarray(row)[split:]])
            np.testing.assert_allclose(whole, full[0], **tolerance)

        for i in range(T - SPLITS[-1]):
            y, filled = call(x_TD[SPLITS + i][:, None], cache=filled)
            np.testing.assert_allclose(y[:, 0], full[0][SPLITS + i], **tolerance)


@pytest.mark.parametrize("letter", "AWLDGKNMS")
def test_a_call_without_rows_or_tokens_changes_nothing(letter):
    """Its cache comes back as it was, and the output has no element."""
    mixer = tiny_models.mixer(letter, D)
    graphdef, state = nnx.split(mixer)
    params = nnx.to_pure_dict(state)

    @tiny_models.quick_jit
    def run(params, x, ids, cache):
        """With and without ids and cache, in one program."""
        mixer = nnx.merge(graphdef, params)
        kinds = [(i, c) for i in (None, ids) for c in (None, cache)]
        return [mixer(x, segment_ids_BT=i, cache=c) for i, c in kinds]

    for rows, length in ((0, 5), (2, 0)):
        cache = mixer.init_cache(rows, 8, jnp.float32)
        x, ids = jnp.zeros((rows, length, D)), jnp.ones((rows, length), jnp.int32)
        found = run(params, x, ids, cache)
        assert [after is None for _, after in found] == [True, False, True, False]
        for y, after in found:
            assert y.shape == (rows, length, D)
            if after is not None and length == 0:
                jax.tree.map(np.testing.assert_array_equal, after, cache)


@pytest.mark.parametrize("letter", "AWLDGKNMS")
def test_decode_writes_into_a_donated_cache(letter):
    mixer = tiny_models.mixer(letter, D)
    cache = mixer.init_cache(2, 8, np.float32)
    graphdef, state = nnx.split(mixer)
    params, x = nnx.to_pure_dict(state), jnp.ones((2, 1, D))

    def step(cache, params, x):
        return nnx.merge(graphdef, params)(x, cache=cache)

    want = jax.jit(step)(cache, params, x)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    compiled = jax.jit(step, donate_argnums=0).lower(cache, params, x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == size
    got = compiled(cache, params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))

"""The attention caches' own rules: overflow, what a window keeps, positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_models
from fastweights.errors import UserError
from fastweights.mixers.attention import token_positions

D = 12


def inputs(length):
    return jax.random.normal(jax.random.key(0), (2, length, D))


def test_more_tokens_than_slots_is_refused():
    mixer = tiny_models.mixer("A", D)
    with pytest.raises(UserError, match=r"brings 5 tokens but the attention cache has 4 slots"):
        tiny_models.apply(mixer, inputs(5), cache=mixer.init_cache(2, 4, jnp.float32))


def test_running_past_the_last_slot_is_loud():
    mixer = tiny_models.mixer("A", D)
    call = tiny_models.jitted(mixer)
    y, cache = call(inputs(3), cache=mixer.init_cache(2, 4, jnp.float32))
    y, cache = call(inputs(1), cache=cache)
    assert np.isfinite(y).all()
    y, cache = call(inputs(1), cache=cache)
    assert np.isnan(y).all()


def test_window_cache_keeps_the_last_real_tokens():
    mixer = tiny_models.mixer("W", D, conv_size=0, rope_fraction=0, window=3)
    cache = mixer.init_cache(2, 1, jnp.float32)
    ids = jnp.array([[1, 0, 1, 1, 0, 2], [0, 1, 0, 0, 0, 0]])
    x = inputs(6)
    _, cache = tiny_models.apply(mixer, x, segment_ids_BT=ids, cache=cache)
    keys = (x @ mixer.qkv.k.kernel[...])[:, :, None, :]
    np.testing.assert_array_equal(cache["slot_document"], [[1, 1, 2], [0, 0, 1]])
    np.testing.assert_allclose(cache["k"][0], keys[0, jnp.array([2, 3, 5])], rtol=1e-5)
    np.testing.assert_allclose(cache["k"][1, 2], keys[1, 1], rtol=1e-5)


def test_token_positions_count_real_tokens_of_each_document():
    ids = jnp.array([[0, 5, 5, 0, 5, 2, 2, 5], [3, 3, 1, 0, 0, 1, 0, 0]])
    positions, following = token_positions(ids, jnp.array([10, 0]))
    real = np.asarray(ids) != 0
    np.testing.assert_array_equal(np.asarray(positions)[0][real[0]], [10, 11, 12, 0, 1, 0])
    np.testing.assert_array_equal(np.asarray(positions)[1][real[1]], [0, 1, 0, 1])
    np.testing.assert_array_equal(following, [1, 2])


@pytest.mark.parametrize("letter", "AW")
def test_given_positions_turn_queries_and_keys(letter):
    """Shifted positions change nothing (rotation is relative); stretched ones do."""
    mixer = tiny_models.mixer(letter, D, rope_fraction=1.0)
    call = tiny_models.jitted(mixer)
    x = inputs(5)
    counted = jnp.broadcast_to(jnp.arange(5)[None], (2, 5))
    plain, shifted, stretched = (
        call(x, positions_BT=p)[0] for p in (counted, counted + 7, 3 * counted)
    )
    np.testing.assert_allclose(plain, call(x)[0], atol=1e-6)
    np.testing.assert_allclose(plain, shifted, atol=1e-5)
    assert np.abs(plain - stretched).max() > 1e-3


@pytest.mark.parametrize("letter", "AW")
def test_cache_goes_on_from_given_positions(letter):
    mixer = tiny_models.mixer(letter, D)
    call = tiny_models.jitted(mixer)
    x, positions = inputs(5), jnp.array([[4, 5, 6, 7, 8]] * 2)
    cache = mixer.init_cache(2, 8, jnp.float32)
    _, cache = call(x[:, :4], positions_BT=positions[:, :4], cache=cache)
    np.testing.assert_array_equal(cache["position"], [8, 8])
    y, _ = call(x[:, 4:], cache=cache)
    np.testing.assert_allclose(y, call(x, positions_BT=positions)[0][:, 4:], atol=1e-5)


@pytest.mark.parametrize("letter", "AW")
def test_logit_cap_holds_through_the_cache(letter):
    """Prefill and decode of a model whose cap matters."""
    x = inputs(5)
    capped = tiny_models.mixer(letter, D, logit_cap=0.1)
    call = tiny_models.jitted(capped)
    full, _ = call(x)
    free, _ = tiny_models.apply(tiny_models.mixer(letter, D, logit_cap=0.0), x)
    assert np.abs(full - free).max() > 1e-2
    cache, parts = capped.init_cache(2, 5, jnp.float32), []
    for piece in (x[:, :3], x[:, 3:4], x[:, 4:]):
        y, cache = call(piece, cache=cache)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, atol=1e-5)

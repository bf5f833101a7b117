"""Packed documents in every mixer: each as if alone, through projections and short convolution.

Outputs and all gradients, in float64 and with slow decay: a fast one would hide what leaks from one
document into the next.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_models

D, T, CHUNK = 12, 40, 16
# Documents of one row each: boundaries at the first, last and middle token of a chunk and around
# its edge, single tokens in a row, a document that spans chunks.
LAYOUTS = (
    (1, 39),
    (39, 1),
    (8, 17, 15),
    (16, 16, 8),
    (15, 2, 23),
    (10, 1, 1, 1, 1, 26),
    (5, 33, 2),
)
# Padding in front of each row and behind it.
MARGINS = ((0, 0), (3, 0), (0, 5), (2, 1), (0, 0), (17, 0), (0, 18))
WIDTH = T + 18


def slow(path, leaf):
    """Decays of about a thousandth a token, whatever the mixer calls their rates and steps."""
    return jnp.full_like(leaf, {"A_log": -6.0, "log_dt": -5.0}[path[-1].key])


def mixer_and_params(letter):
    options = {} if letter in "AW" else {"chunk_size": CHUNK}
    mixer = tiny_models.mixer(letter, D, np.float64, np.float64, **options)
    graphdef, state = nnx.split(mixer)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: slow(path, x) if path[-1].key in ("A_log", "log_dt") else x,
        nnx.to_pure_dict(state),
    )
    return graphdef, params


def answer(graphdef, params, x, weights, ids):
    """Outputs, and the gradients of their weighted sum in parameters and inputs."""

    @tiny_models.quick_jit
    def run(params, x, weights, ids):
        def total(params, x):
            y, _ = nnx.merge(graphdef, params)(x, segment_ids_BT=ids)
            return jnp.sum(jnp.where(weights != 0, y * weights, 0.0)), y

        (_, y), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(params, x)
        return y, *gradients

    return jax.tree.map(np.asarray, run(params, x, weights, ids))


@pytest.mark.parametrize("letter", "AWLDGKNMS")
def test_documents_of_a_row_are_apart(letter):
    rng = np.random.default_rng(0)
    x, weights = (rng.standard_normal((len(LAYOUTS), T, D)) for _ in range(2))
    rows, row_weights = np.zeros((2, len(LAYOUTS), WIDTH, D))
    ids = np.zeros((len(LAYOUTS), WIDTH), np.int32)
    apart, apart_weights, places = [], [], []
    for i, (lengths, (front, _)) in enumerate(zip(LAYOUTS, MARGINS, strict=True)):
        rows[i, front : front + T], row_weights[i, front : front + T] = x[i], weights[i]
        ids[i, front : front + T] = np.repeat(np.arange(len(lengths)) % 2 + 1, lengths)
        for start, end in itertools.pairwise(np.cumsum([0, *lengths])):
            # Nothing comes before a document here, and it sees nothing of the zeros behind it.
            for whole, part in ((x, apart), (weights, apart_weights)):
                part.append(np.zeros((WIDTH, D)))
                part[-1][: end - start] = whole[i, start:end]
            places.append((i, slice(front + start, front + end)))

    with jax.enable_x64(True):
        graphdef, params = mixer_and_params(letter)
        y, dparams, dx = answer(graphdef, params, rows, row_weights, ids)
        alone = answer(graphdef, params, np.stack(apart), np.stack(apart_weights), None)
        # What stands in padding is nobody's business, in the gradient of x either.
        assert np.all(dx[ids == 0] == 0)

    # Softmax attention takes its logits in float32 whatever the inputs are.
    tolerance = dict(rtol=0, atol=1e-5 if letter in "AW" else 1e-9)
    for j, (i, place) in enumerate(places):
        length = place.stop - place.start
        for got, want in ((y, alone[0]), (dx, alone[2])):
            np.testing.assert_allclose(got[i, place], want[j, :length], **tolerance)
    for path, want in jax.tree_util.tree_leaves_with_path(alone[1]):
        got = dparams
        for key in path:
            got = got[key.key]
        scale = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got / scale, want / scale, err_msg=str(path), **tolerance)


@pytest.mark.parametrize("letter", "AWLDGKNMS")
def test_nan_in_padding_reaches_no_token(letter):
    """Nor the cache: a row of NaN beside the tokens is a row of zeros beside them."""
    rng = np.random.default_rng(1)
    ids = np.array([[0] * 3 + [1] * 9, [1] * 7 + [0] * 5, [2, 0, 0, 2, 0, 2, 2, 0, 2, 2, 0, 2]])
    x = rng.standard_normal((3, 12, D)).astype(np.float32)
    mixer = tiny_models.mixer(letter, D)
    call = tiny_models.jitted(mixer)
    cache = mixer.init_cache(3, 24, jnp.float32)
    outs = []
    for fill in (0.0, np.nan):
        padded = np.where(ids[..., None] != 0, x, np.float32(fill))
        kinds = dict(segment_ids_BT=ids.astype(np.int32))
        plain, _ = call(padded, **kinds)
        y, filled = call(padded, cache=cache, **kinds)
        # Keys of padding stay in their slots, where no query looks.
        after, _ = call(x[:, :1], cache=filled)
        outs.append((plain[ids != 0], y[ids != 0], after))
    assert np.all(np.isfinite(outs[1][2]))
    jax.tree.map(np.testing.assert_array_equal, *outs)

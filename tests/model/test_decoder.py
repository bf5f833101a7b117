"""A document given back from the stream at its last token alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_models
from fastweights import config as config_lib
from fastweights import evals, model
from fastweights.data import DataConfig
from fastweights.decoder import PositionDecoder, position_codes
from fastweights.errors import UserError
from fastweights.ops import segments

D = 6
# Padding in front, inside and behind; an id that comes back.
IDS = np.array([[0, 3, 3, 0, 3, 5, 5, 3, 0], [2, 2, 2, 2, 2, 2, 2, 2, 2], [0] * 9], np.int32)
LAST = [[4, 4, 4, 4, 4, 6, 6, 7, 7], [8] * 9, [0] * 9]
CONFIG = tiny_models.config("GA", 2, mlp="none", decoder="positions")


@pytest.fixture(scope="module")
def decoder():
    kinds = dict(dtype=jnp.float32, param_dtype=jnp.float32, norm=dict(eps=1e-6))
    kinds["norm"]["param_dtype"] = jnp.float32
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: PositionDecoder(D, rngs=nnx.Rngs(0), **kinds))
    )
    return tiny_models.jitted(nnx.merge(graphdef, tiny_models.fill(nnx.to_pure_dict(state))))


def test_the_last_token_of_each_document_is_found():
    assert segments.last_of_document(jnp.asarray(IDS)).tolist() == LAST


def test_codes_by_hand():
    codes = position_codes(jnp.array([[0, 3]]), 5)
    slow, slowest = 3 * 10_000**-0.5, 3 * 10_000**-1.0
    by_hand = [np.sin([3.0, slow, slowest]), np.cos([3.0, slow])]
    np.testing.assert_allclose(codes[0, 0], [0, 0, 0, 1, 1])
    np.testing.assert_allclose(codes[0, 1], np.concatenate(by_hand), rtol=1e-6)


def test_all_but_last_token_and_position_is_nobodys_business(decoder):
    """Whatever else the stream holds; and from one vector each position gives something else."""
    x = np.random.default_rng(0).standard_normal((3, 9, D)).astype(np.float32)
    wild = np.full_like(x, np.nan)
    np.put_along_axis(
        wild, np.array(LAST)[..., None], np.take_along_axis(x, np.array(LAST)[..., None], 1), 1
    )
    out = np.asarray(decoder(x, IDS, None))
    np.testing.assert_array_equal(out, decoder(wild, IDS, None))
    assert np.isfinite(out).all()
    assert len(np.unique(out[1].round(4), axis=0)) == 9
    moved = np.asarray(decoder(x + 1.0, IDS, None))
    assert (np.abs(moved - out).max(axis=-1) > 1e-3)[IDS != 0].all()


def test_packed_documents_are_given_back_as_in_rows_of_their_own():
    params, graphdef = tiny_models.noisy_params(CONFIG), model.abstract_model(CONFIG)[0]
    run = tiny_models.quick_jit(
        lambda t, s, p: model.bind(graphdef, params)(t, segment_ids_BT=s, positions_BT=p)[0]
    )
    tokens = np.array(tiny_models.tokens((3, 8)))
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
    tokens[1, :3], tokens[2, :4] = tokens[0, :3], tokens[0, 3:7]
    logits = np.asarray(run(tokens, ids, None))
    np.testing.assert_allclose(logits[1, :3], logits[0, :3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits[2, :4], logits[0, 3:7], rtol=1e-4, atol=1e-5)
    places = np.where(ids == 2, np.arange(8) - 3, np.arange(8))
    np.testing.assert_array_equal(run(tokens, ids, places)[ids != 0], logits[ids != 0])
    # An early token reaches every answer of its document, through the last one.
    tokens[0, 0] = (tokens[0, 0] + 1) % tiny_models.VOCAB
    moved = np.abs(np.asarray(run(tokens, ids, None)) - logits)[0].max(axis=-1)
    assert (moved[:3] > 1e-3).all() and (moved[3:7] < 1e-5).all()


def test_data_and_decoder_must_belong_together():
    fields = ["data.kind=compression", "data.length=32", "model.decoder=positions"]
    config = config_lib.load("tests/tiny.py", fields)
    assert config.data.answers(None) == 31
    for model_fields, told in (
        (
            dict(model=dataclasses.replace(config.model, decoder="none")),
            "decoder is 'none' but data.kind is 'compression'",
        ),
        (dict(data=DataConfig()), "decoder is 'positions' but data.kind is 'mqar'"),
        (dict(data=DataConfig(kind="text")), "decoder is 'positions' but data.kind is 'text'"),
    ):
        with pytest.raises(UserError, match=told):
            dataclasses.replace(config, **model_fields)


def test_what_is_asked_at_once_has_no_age():
    with pytest.raises(UserError, match="'compression', which asks for all tokens at once"):
        evals.check_fits("age", DataConfig(kind="compression"))

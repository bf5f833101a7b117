"""Published models give here what they give elsewhere: logits, caches, tokens and gradients."""

import collections
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import published
from fastweights import interop

SHORT = 77


@pytest.fixture(params=published.PUBLISHED, ids=lambda folder: folder.name, scope="module")
def case(request):
    return published.read(request.param)


def test_logits_and_loss(case):
    tokens = case.reference["input_ids"]
    (loss, logits), _ = case.train(case.params, tokens, np.ones_like(tokens))
    published.close(logits, case.reference["logits"])
    np.testing.assert_allclose(loss, case.reference["ce_loss_first64"], rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_a_padded_row(case, side):
    tokens, mask = (case.reference[f"{side}pad_{name}"] for name in ("input_ids", "mask"))
    (_, logits), _ = case.train(case.params, tokens, mask)
    published.close(logits[0], case.reference["logits"][0])
    published.close(logits[1][mask[1] == 1], case.reference[f"{side}pad_logits_row1"])
    assert mask[1].sum() == SHORT


# Several published tensors are one array in the memory of the program that the norms are of.
JOINED = (
    (r"[qkv]_conv1d", "conv1d"),
    (r"experts\.\d+\.(gate|up)_proj\.weight", "experts.gate_up_proj"),
    (r"experts\.\d+\.down_proj\.weight", "experts.down_proj"),
    ("attention_layer_norm", "input_layernorm"),
    ("feedforward_layer_norm", "post_attention_layernorm"),
)


def test_norms_of_gradients(case):
    tokens = case.reference["input_ids"]
    _, gradients = case.train(case.params, tokens, np.ones_like(tokens))
    gradient_of = interop.tensors_of(gradients, case.source.rows())
    squares = collections.Counter()
    for name, (_, full) in case.source.published.items():
        for pattern, joined in JOINED:
            full = re.sub(pattern, joined, full)
        squares[full] += float(np.sum(np.square(gradient_of(name), dtype=np.float64)))
    want = json.loads(str(case.reference["grad_norms"]))
    assert squares.keys() == want.keys()
    for name, norm in want.items():
        np.testing.assert_allclose(squares[name] ** 0.5, norm, rtol=1e-3, err_msg=name)


def test_caches_and_what_follows_from_them(case):
    prefix, tokens = int(case.reference["cache_prefix_len"]), case.reference["input_ids"]
    tokens = np.concatenate([tokens, tokens[:1]])  # the batch of three that all cached calls have
    _, cache = case.call(case.init_cache(3), tokens[:, :prefix])
    for i, ours in enumerate(published.layers(cache, case.config.layout)):
        stored = {
            name: case.reference[f"cacheP_{name}_{i}"]
            for name in ("conv", "rec", "keys", "values")
            if f"cacheP_{name}_{i}" in case.reference
        }
        if "keys" in stored:
            for name, whole in (("k", stored["keys"]), ("v", stored["values"])):
                slots = slice(published.CALL - prefix, published.CALL)
                published.close(ours[name][:2, :, slots], whole)
            continue
        state, order = ours["state"][:2], "qkv"
        if "N" in case.config.pattern:
            state, order = jnp.swapaxes(state, 2, 3), "vkq"
        published.close(state, stored["rec"])
        inputs = jnp.concatenate([ours["conv"][name][:2] for name in order], axis=-1)
        # One input more is kept there than the taps reach back to.
        published.close(inputs, stored["conv"][:, :, 1:].transpose(0, 2, 1))
    one, cache = case.call(cache, tokens[:, prefix : prefix + 1])
    rest, _ = case.call(cache, tokens[:, prefix + 1 :])
    logits = jnp.concatenate([one, rest], axis=1)[:2]
    published.close(logits, case.reference["logits"][:, prefix:])


def test_greedy_tokens_of_unequal_prompts(case):
    """A batch of two and a single prompt, side by side."""
    stored = case.reference
    prompts = np.concatenate([stored["greedy_batch_prompt"], stored["greedy_prompt"]])
    mask = np.concatenate([stored["greedy_batch_mask"], np.ones_like(stored["greedy_prompt"])])
    want = np.concatenate([stored["greedy_batch_new_tokens"], stored["greedy_new_tokens"]])
    logits, cache = case.call(case.init_cache(3), prompts, mask)
    found = []
    for _ in range(want.shape[1]):
        found.append(np.asarray(jnp.argmax(logits[:, -1], axis=-1), np.int32))
        logits, cache = case.call(cache, found[-1][:, None])
    np.testing.assert_array_equal(np.stack(found, axis=1), want)

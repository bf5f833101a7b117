"""A small Mamba-2 model computed elsewhere (transformers 5.24, float32): the same numbers here.

`data/tiny_mamba2.npz` holds its weights under their published names (bfloat16, as bits), logits,
caches after 70 tokens, and the norms of gradients. Three layers, 8 heads in 2 groups, no MLP.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_models
from fastweights import mixers, model

DATA = pathlib.Path(__file__).parent / "data" / "tiny_mamba2.npz"
LAYERS, HEADS, GROUPS, STATE, HEAD_DIM = 3, 8, 2, 16, 16
PREFIX, SHORT = 70, 77
CONFIG = model.ModelConfig(
    vocab_size=512,
    d_model=64,
    num_layers=LAYERS,
    pattern="N",
    mlp="none",
    tie_embeddings=False,
    norm_eps=1e-5,
    dtype="float32",
    mixers=mixers.MixerConfigs(
        N=mixers.Mamba2Config(
            num_heads=HEADS,
            num_qk_heads=GROUPS,
            head_dim=STATE,
            value_head_dim=HEAD_DIM,
            chunk_size=32,
        )
    ),
)
WIDTH, SHARED = HEADS * HEAD_DIM, GROUPS * STATE
# Rows of the one published input projection: gate, value x, key B, query C, step.
PARTS = np.cumsum([WIDTH, WIDTH, SHARED, SHARED])


def by_role(x, axis):
    """x, B and C of a published convolution (and its cache) as values, keys and queries."""
    return zip("vkq", np.split(x, PARTS[1:3] - WIDTH, axis=axis), strict=True)


@pytest.fixture(scope="module")
def case():
    with np.load(DATA) as stored:
        return {name: stored[name] for name in stored}


@pytest.fixture(scope="module")
def params(case):
    """The published tensors in this package's tree."""
    weights = {
        name.removeprefix("weights/"): (bits.astype(np.uint32) << 16).view(np.float32)
        for name, bits in case.items()
        if name.startswith("weights/")
    }

    def layer(i):
        t = {name.split(f".{i}.")[1]: w for name, w in weights.items() if f"layers.{i}." in name}
        gate, v, k, q, step = np.split(t["mixer.in_proj.weight"].T, PARTS, axis=1)
        qkv = {name: {"kernel": w} for name, w in (("q", q), ("k", k), ("v", v))}
        for name, taps in by_role(t["mixer.conv1d.weight"][:, 0].T, 1):
            qkv[f"conv_{name}"] = taps
        for name, bias in by_role(t["mixer.conv1d.bias"], 0):
            qkv[f"conv_bias_{name}"] = bias
        read_out = {
            "gate": {"kernel": gate},
            "norm": {"scale": t["mixer.norm.weight"].reshape(GROUPS, -1)},
            "out": {"kernel": t["mixer.out_proj.weight"].T},
        }
        rates = {"A_log": t["mixer.A_log"], "dt_bias": t["mixer.dt_bias"]}
        mixer = {"qkv": qkv, "read_out": read_out, "step": {"proj": {"kernel": step}} | rates}
        # Zero-centred here.
        return {"mixer": mixer | {"D": t["mixer.D"]}, "mixer_norm": {"scale": t["norm.weight"] - 1}}

    layers = jax.tree.map(lambda *x: jnp.stack(x), *(layer(i) for i in range(LAYERS)))
    return {
        "embedding": jnp.asarray(weights["backbone.embeddings.weight"]),
        "groups": {"layer_0": layers},
        "final_norm": {"scale": jnp.asarray(weights["backbone.norm_f.weight"] - 1)},
        "head": jnp.asarray(weights["lm_head.weight"].T),
    }


def forward(params, tokens, ids=None, cache=None):
    graphdef, _, _ = model.abstract_model(CONFIG)
    return model.bind(graphdef, params)(tokens, segment_ids_BT=ids, cache=cache)


run = tiny_models.quick_jit(forward)


def close(actual, expected, tolerance=1e-4):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_the_tree_is_the_models(params):
    _, shapes, _ = model.abstract_model(CONFIG)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)


def test_logits(params, case):
    close(run(params, case["input_ids"])[0], case["logits"])


@pytest.mark.parametrize("side", ("left", "right"))
def test_logits_of_a_padded_row(params, case, side):
    """Row 1 cut short, with other rows' tokens as padding."""
    length = case["input_ids"].shape[1]
    place = slice(length - SHORT, None) if side == "left" else slice(SHORT)
    tokens, ids = case["input_ids"][::-1].copy(), np.ones((2, length), np.int32)
    tokens[1, place], ids[1] = case["input_ids"][1, :SHORT], 0
    ids[1, place] = 1
    logits, _ = run(params, tokens, ids)
    close(logits[1, place], case["logits"][1, :SHORT])


def test_caches_and_what_follows_from_them(params, case):
    graphdef, _, _ = model.abstract_model(CONFIG)
    cache = model.bind(graphdef, params).init_cache(2, 0)
    _, cache = run(params, case["input_ids"][:, :PREFIX], None, cache)
    for i in range(LAYERS):
        ours = jax.tree.map(lambda x, i=i: x[i], cache["groups"]["layer_0"])
        close(jnp.swapaxes(ours["state"], 2, 3), case[f"state_after_70/{i}"])
        for name, inputs in by_role(case[f"conv_after_70/{i}"], 1):
            # One tap more is kept there.
            close(ours["conv"][name], inputs[:, :, 1:].transpose(0, 2, 1))
    one, cache = run(params, case["input_ids"][:, PREFIX : PREFIX + 1], None, cache)
    rest, _ = run(params, case["input_ids"][:, PREFIX + 1 :], None, cache)
    close(jnp.concatenate([one, rest], axis=1), case["logits"][:, PREFIX:])


def test_loss_and_norms_of_gradients(params, case):
    tokens = case["input_ids"][:, :64]

    @tiny_models.quick_jit
    def loss_and_gradients(params):
        def loss(params):
            log_p = jax.nn.log_softmax(forward(params, tokens)[0][:, :-1])
            return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

        return jax.value_and_grad(loss)(params)

    loss, gradients = loss_and_gradients(params)
    close(loss, case["ce_loss_first64"], 1e-5)
    layers = gradients["groups"]["layer_0"]

    def norm(i, *parts):
        return np.sqrt(sum(np.sum(np.square(part[i])) for part in parts))

    mixer = layers["mixer"]
    qkv, read_out, step = mixer["qkv"], mixer["read_out"], mixer["step"]
    projections = [qkv[name]["kernel"] for name in "qkv"]
    ours = {
        "norm.weight": [layers["mixer_norm"]["scale"]],
        "mixer.in_proj.weight": [*projections, read_out["gate"]["kernel"], step["proj"]["kernel"]],
        "mixer.conv1d.weight": [qkv[f"conv_{name}"] for name in "qkv"],
        "mixer.conv1d.bias": [qkv[f"conv_bias_{name}"] for name in "qkv"],
        "mixer.norm.weight": [read_out["norm"]["scale"]],
        "mixer.out_proj.weight": [read_out["out"]["kernel"]],
        "mixer.A_log": [step["A_log"]],
        "mixer.dt_bias": [step["dt_bias"]],
        "mixer.D": [mixer["D"]],
    }
    got = {
        f"backbone.layers.{i}.{name}": norm(i, *parts)
        for name, parts in ours.items()
        for i in range(LAYERS)
    }
    outer = {"backbone.embeddings": "embedding", "lm_head": "head"}
    got |= {f"{name}.weight": np.linalg.norm(gradients[key]) for name, key in outer.items()}
    got["backbone.norm_f.weight"] = np.linalg.norm(gradients["final_norm"]["scale"])
    want = {n.removeprefix("grad_norms/"): x for n, x in case.items() if n.startswith("grad_norms")}
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, err_msg=name)

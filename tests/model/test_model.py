"""The stack as a whole: starts, scan against loop, packed rows, precision, remat, config."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_models
from fastweights import model
from fastweights.errors import UserError

ALL = ("AWLDGKNMS", 11)  # every letter in a scanned group, and a tail


def loss_fn(cfg):
    """Mean next-token loss as a function of (params, tokens)."""
    graphdef, _, _ = model.abstract_model(cfg)

    def loss(params, tokens):
        logits, _ = model.bind(graphdef, params)(tokens)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

    return loss


@functools.cache
def compiled(cfg):
    """Logits of a config's models; equal shapes compile once for all tests here."""
    graphdef, _, _ = model.abstract_model(cfg)
    return tiny_models.quick_jit(lambda p, t, s: model.bind(graphdef, p)(t, segment_ids_BT=s)[0])


def run(cfg, params, tokens, segment_ids=None):
    return np.asarray(compiled(cfg)(params, tokens, segment_ids))


@pytest.mark.parametrize(("pattern", "mlp"), [("AWLDGKNMS", "none"), ("A", "swiglu")])
def test_fresh_parameters(pattern, mlp):
    """One init of every letter, and of the MLP: tree, loss, and a gradient for all of it."""
    cfg = tiny_models.config(pattern, len(pattern), mlp=mlp, tie_embeddings=False)
    _, shapes, axes = model.abstract_model(cfg)
    params = tiny_models.init(cfg)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (params, shapes)]
    assert kinds[0] == kinds[1]
    ranks = jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple))
    assert ranks == jax.tree.map(lambda x: x.ndim, shapes)

    tokens = tiny_models.tokens((4, 12))
    loss, grads = tiny_models.quick_jit(jax.value_and_grad(loss_fn(cfg)))(params, tokens)
    assert abs(loss - np.log(tiny_models.VOCAB)) < 0.3
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        # Layer by layer where layers are stacked, so that one dead layer is found.
        for layer in np.asarray(grad) if path[0].key == "groups" else [np.asarray(grad)]:
            assert np.isfinite(layer).all() and np.any(layer != 0), jax.tree_util.keystr(path)


def test_initial_scales():
    """Variance 1/fan_in, less for what writes into the stream; every copy of a group differs."""
    cfg = tiny_models.config("D", 8, d_model=64, mlp_dim=128)
    params = tiny_models.init(cfg)
    layer = params["groups"]["layer_0"]
    for kernel, fan_in, scale in (
        (layer["mixer"]["qkv"]["q"]["kernel"], 64, 1.0),
        (layer["mlp"]["up"]["kernel"], 64, 1.0),
        (layer["mlp"]["down"]["kernel"], 128, 0.25),
        (layer["mixer"]["read_out"]["out"]["kernel"], 16, 0.25),
    ):
        assert np.std(kernel) == pytest.approx(scale * fan_in**-0.5, rel=0.05)
        assert len(np.unique(np.asarray(kernel)[:, 0, 0])) == 8
    assert np.std(params["embedding"]) == pytest.approx(0.5 * 64**-0.5, rel=0.1)


def test_scan_and_tail_equal_a_plain_loop():
    """Two scanned groups and a tail against five unrolled layers with the same parameters."""
    scanned = tiny_models.config("LG", 5)
    loop = tiny_models.config("LGLGLG", 5)
    assert not loop.layout.num_groups and scanned.layout.num_groups == 2
    params = tiny_models.noisy_params(scanned)
    layers = {"layer_4": params["tail"]["layer_0"]}
    for n in range(2):
        for i in range(2):
            layers[f"layer_{2 * n + i}"] = jax.tree.map(
                lambda x, n=n: x[n], params["groups"][f"layer_{i}"]
            )
    unrolled = {name: params[name] for name in ("embedding", "final_norm")} | {"tail": layers}
    tokens = tiny_models.tokens((2, 9))
    np.testing.assert_allclose(
        run(scanned, params, tokens), run(loop, unrolled, tokens), rtol=1e-4, atol=1e-4
    )


def test_packed_documents_are_apart_and_padding_is_nothing():
    """Each document of a packed row as in a row of its own, whatever stands in the padding."""
    cfg = tiny_models.config(*ALL)
    params = tiny_models.noisy_params(cfg)
    ids = np.array([0, 3, 3, 3, 0, 3, 5, 3, 3, 0, 0, 9], np.int32)
    tokens = np.asarray(tiny_models.tokens((12,)))
    documents = [[1, 2, 3, 5], [6], [7, 8], [11]]
    rows, row_ids = np.zeros((6, 12), np.int32), np.zeros((6, 12), np.int32)
    rows[:2], row_ids[:2] = tokens, ids
    rows[1, ids == 0] = tokens[ids == 0][::-1] + 1
    for i, places in enumerate(documents, start=2):
        rows[i, : len(places)], row_ids[i, : len(places)] = tokens[places], 1
    # Padding inside a document is a gap for the short convolution, so keep it in place there.
    rows[2, :5], row_ids[2, :5] = tokens[1:6], ids[1:6]
    logits = run(cfg, params, jnp.asarray(rows % tiny_models.VOCAB), row_ids)
    np.testing.assert_allclose(logits[1][ids != 0], logits[0][ids != 0], atol=1e-6)
    for i, places in enumerate(documents, start=2):
        alone = logits[i][row_ids[i] != 0]
        np.testing.assert_allclose(alone, logits[0][places], rtol=1e-3, atol=1e-4)
    assert np.abs(logits[0][11] - logits[0][8]).max() > 1e-3


def test_no_token_sees_a_later_one():
    cfg = tiny_models.config(*ALL)
    params, tokens = tiny_models.noisy_params(cfg), tiny_models.tokens((1, 12))
    changed = tokens.at[0, 7].set((tokens[0, 7] + 1) % tiny_models.VOCAB)
    # Six rows with ids, as above, so that the program is the same.
    rows = jnp.concatenate([tokens, changed] * 3)
    one, two = run(cfg, params, rows, np.ones(rows.shape, np.int32))[:2]
    np.testing.assert_allclose(one[:7], two[:7], atol=1e-6)
    assert np.all(np.abs(one[7:] - two[7:]).max(axis=-1) > 1e-4)


def test_bfloat16_is_finite_and_close_to_float32():
    tokens = tiny_models.tokens((2, 12))
    wide = tiny_models.config("GWLDKNMS", 8)
    narrow = tiny_models.config("GWLDKNMS", 8, dtype="bfloat16")
    assert model.ModelConfig(8, 8, 1, "G").dtype == "bfloat16"
    params = tiny_models.noisy_params(wide)
    expected, actual = run(wide, params, tokens), run(narrow, params, tokens)
    assert actual.dtype == np.float32
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert 1e-5 < error < 0.05
    graphdef, _, _ = model.abstract_model(narrow)
    h, _ = jax.eval_shape(lambda p: model.bind(graphdef, p).hidden(tokens), params)
    assert h.dtype == jnp.bfloat16


def test_remat_changes_memory_and_nothing_else():
    """Bytes kept for the backward pass fall by policy; loss and gradients stay.

    Gradients are compared where nothing is kept; training is with "dots" in `test_step`.
    """
    tokens = tiny_models.tokens((2, 16))
    params = tiny_models.noisy_params(tiny_models.config("LA", 3))
    kept, results = {}, {}
    for remat in model.REMAT_POLICIES:
        loss = loss_fn(tiny_models.config("LA", 3, remat=remat))
        _, pullback = jax.eval_shape(
            lambda p, loss=loss: jax.vjp(lambda q: loss(q, tokens), p), params
        )
        kept[remat] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))
        if remat in ("full", "none"):
            results[remat] = tiny_models.quick_jit(jax.value_and_grad(loss))(params, tokens)
    assert kept["full"] < kept["names"] < kept["none"]
    assert kept["full"] < kept["dots"] < kept["none"]
    for a, e in zip(
        jax.tree.leaves(results["full"]), jax.tree.leaves(results["none"]), strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-5)


def test_tokens_outside_the_vocabulary_are_loud():
    cfg = tiny_models.config("G", 1, mlp="none")
    tokens = jnp.array([[0, 1], [tiny_models.VOCAB, 0], [0, -1]])
    logits = run(cfg, tiny_models.noisy_params(cfg), tokens)
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all() and np.isnan(logits[2, 1]).all()


def test_ids_of_padding_are_nobodys_business():
    """Any id, even outside the vocabulary where logits would be NaN: the same gradients."""
    cfg = tiny_models.config("AM", 2)
    graphdef, _, _ = model.abstract_model(cfg)
    ids = np.array([[0, 0, 1, 1, 1, 2, 2, 0], [4, 4, 4, 4, 4, 4, 0, 0]], np.int32)
    tokens = np.where(ids != 0, tiny_models.tokens(ids.shape), 0)

    @tiny_models.quick_jit
    def gradients(params, tokens):
        def loss(params):
            logits, _ = model.bind(graphdef, params)(tokens, segment_ids_BT=ids)
            return jnp.sum(jnp.where(ids[..., None] != 0, jnp.sin(logits), 0.0))

        return jax.grad(loss)(params)

    params = tiny_models.noisy_params(cfg)
    zeros, wild = (gradients(params, np.where(ids != 0, tokens, fill)) for fill in (0, -1))
    jax.tree.map(np.testing.assert_array_equal, zeros, wild)


def test_tied_head_is_the_embedding():
    tied = tiny_models.config("L", 1, mlp="none")
    untied = tiny_models.config("L", 1, mlp="none", tie_embeddings=False)
    params, tokens = tiny_models.noisy_params(tied), tiny_models.tokens((1, 5))
    assert "head" not in params
    with_head = params | {"head": params["embedding"].T}
    np.testing.assert_allclose(
        run(untied, with_head, tokens), run(tied, params, tokens), rtol=1e-5, atol=1e-5
    )


def test_runs_without_the_graph_mode_of_nnx():
    cfg, tokens = tiny_models.config("GA", 3), tiny_models.tokens((1, 5))
    params = tiny_models.noisy_params(cfg)
    expected = run(cfg, params, tokens)
    with nnx.set_graph_mode(False):
        assert jax.tree.map(jnp.shape, tiny_models.noisy_params(cfg)) == jax.tree.map(
            jnp.shape, params
        )
        np.testing.assert_array_equal(run(cfg, params, tokens), expected)


@pytest.mark.parametrize(
    ("d_model", "mlp", "mlp_dim", "width"),
    [(48, "swiglu", 0, 128), (768, "swiglu", 0, 2048), (48, "swiglu", 50, 50), (48, "none", 50, 0)],
)
def test_mlp_width(d_model, mlp, mlp_dim, width):
    assert model.ModelConfig(8, d_model, 1, "G", mlp=mlp, mlp_dim=mlp_dim).mlp_width == width


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (dict(vocab_size=0), r"vocab_size is 0; give an integer of at least 1"),
        (dict(d_model=-1), r"d_model is -1"),
        (dict(mlp_dim=-1), r"mlp_dim is -1"),
        (dict(num_layers=0), r"num_layers is 0"),
        (dict(pattern="GX"), r"unknown letter 'X'"),
        (dict(mlp="relu"), r"mlp is 'relu'; choose one of swiglu, none"),
        (dict(dtype="fp8"), r"dtype is 'fp8'; choose one of bfloat16"),
        (dict(param_dtype="bf16"), r"param_dtype is 'bf16'; choose one of bfloat16"),
        (dict(remat="half"), r"remat is 'half'; choose one of none, full, dots, names"),
        (dict(norm_eps=0.0), r"norm_eps is 0.0; give a positive number"),
        (dict(decoder="positon"), r"decoder is 'positon'; choose one of none, positions"),
        (dict(norm="rms"), r"norm is 'rms'; choose one of centred, plain"),
        (dict(post_norm="AX"), r"post_norm is 'AX'; give letters out of A, W"),
    ],
)
def test_bad_configs_are_refused(overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        tiny_models.config(**overrides)


def test_float64_without_x64_is_refused():
    with pytest.raises(UserError, match="JAX_ENABLE_X64"):
        model.abstract_model(tiny_models.config(dtype="float64"))

"""Every mixer against its published equations, written out in NumPy token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_models
from fastweights.mixers.gated_delta_net import LogDecay
from fastweights.mixers.kimi_delta_attention import ChannelLogDecay
from fastweights.mixers.mamba2 import Mamba2Config, Step

D, T = 12, 7
# float32 runs against float64 equations; layers divide by norms of small vectors.
TOLERANCE = dict(rtol=2e-4, atol=2e-5)


def parameters(module, wrap=lambda x: np.asarray(x, np.float64)):
    """A module's parameters as a nested dict, in float64 NumPy."""
    return jax.tree.map(wrap, nnx.to_pure_dict(nnx.split(module)[1]))


def inputs():
    return np.random.default_rng(1).standard_normal((T, D))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)


def project(p, x, cfg):
    """q, k, v as [T, heads, dim], through the causal convolution if there is one."""
    out = []
    for name in "qkv":
        y = x @ p["qkv"][name]["kernel"]
        if cfg.conv_size:
            taps = p["qkv"][f"conv_{name}"]
            past = np.concatenate([np.zeros((len(taps) - 1, y.shape[1])), y])
            bias = p["qkv"].get(f"conv_bias_{name}", 0)
            y = silu(bias + sum(taps[i] * past[i : i + T] for i in range(len(taps))))
        out.append(y)
    return out


def features(name, x):
    if name == "elu1":
        return np.where(x > 0, x + 1, np.exp(x))
    if name == "squared_relu":
        return np.maximum(x, 0) ** 2
    if name == "dpfp":
        r = np.maximum(np.concatenate([x, -x], -1), 0)
        return np.concatenate([r * np.roll(r, -j, -1) for j in (1, 2)], -1)
    if name == "taylor":
        x = x / x.shape[-1] ** 0.25
        pairs = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1) / np.sqrt(2)
        return np.concatenate([np.ones_like(x[..., :1]), x, pairs], -1)
    return x


def low_rank(p, x):
    return x @ p["down"]["kernel"] @ p["up"]["kernel"]


def recurrent_by_hand(letter, p, x, cfg):
    q, k, v = project(p, x, cfg)
    q = q.reshape(T, cfg.qk_heads, -1)
    k = k.reshape(T, cfg.qk_heads, -1)
    v = v.reshape(T, cfg.num_heads, -1)
    q, k = (features(getattr(cfg, "feature_map", "identity"), y) for y in (q, k))
    if letter in "GK" or getattr(cfg, "l2_norm", False):
        q, k = (y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6) for y in (q, k))
    gates = p.get("decay", p.get("step"))
    written, scale = v, 1 if letter == "N" else q.shape[-1] ** -0.5
    decay = np.ones((T, cfg.num_heads, 1))
    if letter in "GN":
        step = np.log1p(np.exp(x @ gates["proj"]["kernel"] + gates["dt_bias"]))
        if letter == "N":
            step = np.clip(step, *cfg.time_step_limit)
            written = step[..., None] * v
        decay = np.exp(-np.exp(gates["A_log"]) * step)[..., None]
    if letter == "K":
        a = low_rank(gates["proj"], x).reshape(T, cfg.num_heads, cfg.head_dim)
        step = np.log1p(np.exp(a + gates["dt_bias"]))
        decay = np.exp(-np.exp(gates["A_log"])[:, None] * step)
    if letter in "DGK":
        beta = sigmoid(x @ p["beta"]["proj"]["kernel"]) * (2 if cfg.allow_neg_eigval else 1)
    o = np.zeros_like(v)
    for j in range(cfg.num_heads):
        h = j // (cfg.num_heads // cfg.qk_heads)
        S, z = np.zeros((q.shape[-1], v.shape[-1])), np.zeros(q.shape[-1])
        for t in range(T):
            S = decay[t, j][:, None] * S
            write = written[t, j]
            if letter in "DGK":
                write = beta[t, j] * (write - S.T @ k[t, h])
            S, z = S + np.outer(k[t, h], write), z + k[t, h]
            if letter == "L" and cfg.normalize:
                o[t, j] = S.T @ q[t, h] / (z @ q[t, h])
            else:
                o[t, j] = scale * S.T @ q[t, h]
    if letter == "N":
        y = (o + p["D"][:, None] * v).reshape(T, -1)
        if cfg.output_gate:
            y = y * silu(x @ p["read_out"]["gate"]["kernel"])
        y = rms(y.reshape(T, cfg.qk_heads, -1)) * p["read_out"]["norm"]["scale"]
        return y.reshape(T, -1) @ p["read_out"]["out"]["kernel"]
    y = rms(o) * p["read_out"]["norm"]["scale"]
    if cfg.output_gate and letter == "K":
        y = y * sigmoid(low_rank(p["read_out"]["gate"], x)).reshape(y.shape)
    elif cfg.output_gate:
        y = y * silu(x @ p["read_out"]["gate"]["kernel"]).reshape(y.shape)
    return y.reshape(T, -1) @ p["read_out"]["out"]["kernel"]


def rotate(x, cfg):
    """Pairs (m, m + R/2) of the first R channels, x [T, heads, dim]."""
    R = round(cfg.head_dim * cfg.rope_fraction)
    out = x.copy()
    for m in range(R // 2):
        angle = np.arange(T)[:, None] * cfg.rope_theta ** (-2 * m / R)
        one, two = x[..., m], x[..., m + R // 2]
        out[..., m] = one * np.cos(angle) - two * np.sin(angle)
        out[..., m + R // 2] = two * np.cos(angle) + one * np.sin(angle)
    return out


def attention_by_hand(letter, p, x, cfg):
    q, k, v = project(p, x, cfg)
    q = q.reshape(T, cfg.num_heads, -1)
    k, v = (y.reshape(T, cfg.kv_heads, -1) for y in (k, v))
    if cfg.qk_norm:
        q = rms(q) * (1 + p["q_norm"]["scale"])
        k = rms(k) * (1 + p["k_norm"]["scale"])
    q, k = rotate(q, cfg), rotate(k, cfg)
    o = np.zeros_like(q)
    for i in range(cfg.num_heads):
        j = i // (cfg.num_heads // cfg.kv_heads)
        for t in range(T):
            first = max(0, t + 1 - cfg.window) if letter == "W" else 0
            logits = k[first : t + 1, j] @ q[t, i] / np.sqrt(cfg.head_dim)
            if cfg.logit_cap:
                logits = cfg.logit_cap * np.tanh(logits / cfg.logit_cap)
            weights = np.exp(logits - logits.max())
            o[t, i] = weights / weights.sum() @ v[first : t + 1, j]
    if cfg.output_gate:
        o = o * sigmoid(x @ p["gate"]["kernel"]).reshape(o.shape)
    return o.reshape(T, -1) @ p["out"]["kernel"]


VARIANTS = [
    ("A", {}),
    ("A", dict(qk_norm=False, output_gate=False, rope_fraction=0, num_kv_heads=0, conv_size=4)),
    ("A", dict(rope_fraction=1.0, rope_theta=100.0)),
    ("A", dict(logit_cap=0.5)),
    ("W", {}),
    ("W", dict(window=1, qk_norm=True, output_gate=True)),
    ("W", dict(window=100, conv_size=0)),
    ("L", {}),
    ("L", dict(normalize=False, num_qk_heads=1, output_gate=False)),
    ("L", dict(normalize=False, feature_map="identity", conv_size=0)),
    ("L", dict(feature_map="taylor", head_dim=3)),
    ("L", dict(normalize=False, feature_map="squared_relu")),
    ("D", {}),
    ("D", dict(feature_map="dpfp", dpfp_nu=2)),
    ("D", dict(allow_neg_eigval=False, conv_size=2, num_qk_heads=1, value_head_dim=3)),
    ("D", dict(feature_map="elu1", output_gate=False)),
    ("G", {}),
    ("G", dict(allow_neg_eigval=True, num_qk_heads=0, output_gate=False)),
    ("G", dict(conv_size=0, num_heads=3, num_qk_heads=1)),
    ("K", {}),
    ("K", dict(allow_neg_eigval=True, num_qk_heads=0, output_gate=False, conv_size=0)),
    ("N", {}),
    ("N", dict(num_qk_heads=1, output_gate=False, time_step_limit=(0.0, float("inf")))),
    ("N", dict(conv_size=0, num_qk_heads=4, time_step_limit=(0.7, 1.0))),
]


@pytest.mark.parametrize(("letter", "options"), VARIANTS)
def test_layer_equals_its_equations(letter, options):
    mixer = tiny_models.mixer(letter, D, **options)
    x = inputs()
    by_hand = attention_by_hand if letter in "AW" else recurrent_by_hand
    actual, _ = tiny_models.apply(mixer, jnp.asarray(x[None], jnp.float32))
    expected = by_hand(letter, parameters(mixer), x, mixer.config)
    np.testing.assert_allclose(actual[0], expected, **TOLERANCE)


@pytest.mark.parametrize("letter", "AWLDGKN")
def test_bfloat16_parameters_leave_gates_in_float32(letter):
    mixer = tiny_models.mixer(letter, D, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    leaves = jax.tree_util.tree_leaves_with_path(parameters(mixer, jnp.asarray))
    wide = {"/".join(key.key for key in path) for path, x in leaves if x.dtype == jnp.float32}
    gates = {"decay/A_log", "decay/dt_bias"}
    steps = {"step/A_log", "step/dt_bias", "D"}
    expected = {"G": gates, "K": gates, "N": steps}.get(letter, set())
    assert wide == expected | (set() if letter in "AW" else {"read_out/norm/scale"})
    cache = mixer.init_cache(1, 4, jnp.bfloat16)
    x = jnp.asarray(inputs()[None, :4], jnp.bfloat16)
    y, after = tiny_models.apply(mixer, x, cache=cache)
    assert y.dtype == jnp.bfloat16
    states = jax.tree.leaves(after["state"]) if letter not in "AW" else []
    assert all(x.dtype == jnp.float32 for x in states)


@pytest.mark.parametrize("letter", "GKN")
def test_decays_start_slow_and_fast(letter):
    kinds = dict(dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    gates = {
        "G": lambda: LogDecay(D, 512, **kinds),
        "K": lambda: ChannelLogDecay(D, 512, 2, **kinds),
        "N": lambda: Step(D, Mamba2Config(num_heads=512), **kinds),
    }[letter]()
    assert gates.dt_bias[...].shape == ((512, 2) if letter == "K" else (512,))
    rate = np.exp(gates.A_log[...])
    step = np.asarray(jax.nn.softplus(gates.dt_bias[...]))
    assert 0.01 <= rate.min() < 0.5 and 15.5 < rate.max() <= 16
    assert 1e-3 * 0.999 <= step.min() < 1.2e-3 and 0.08 < step.max() <= 0.1001
    assert abs(np.median(np.log(step)) - np.log(1e-2)) < 0.3  # log-uniform

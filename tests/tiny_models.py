"""Small models for tests, with every option of every mixer somewhere in use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastweights import mixers, model
from fastweights.mixers.experts import ExpertsConfig

VOCAB = 16

MIXERS = mixers.MixerConfigs(
    A=mixers.AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=8, rope_fraction=0.5, qk_norm=True, output_gate=True
    ),
    W=mixers.WindowAttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=8, window=3, logit_cap=2.0, conv_size=3
    ),
    L=mixers.LinearAttentionConfig(num_heads=2, head_dim=8, value_head_dim=4, normalize=True),
    D=mixers.DeltaNetConfig(num_heads=2, head_dim=8, conv_size=0, allow_neg_eigval=True),
    G=mixers.GatedDeltaNetConfig(
        num_heads=4, num_qk_heads=2, head_dim=8, value_head_dim=4, chunk_size=16
    ),
    K=mixers.KimiDeltaAttentionConfig(
        num_heads=2, num_qk_heads=1, head_dim=8, value_head_dim=4, chunk_size=16
    ),
    N=mixers.Mamba2Config(
        num_heads=4, num_qk_heads=2, head_dim=8, value_head_dim=4, time_step_limit=(0.0, 0.8)
    ),
    S=mixers.S4Config(d_state=4, chunk_size=16),
    M=mixers.MambaConfig(d_state=3, expand=2, conv_size=3, dt_rank=2, chunk_size=16),
)

# The second layer keeps its one MLP.
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, dim=8, shared_dim=12, dense_layers=(1,))


def config(pattern="GA", num_layers=2, **overrides) -> model.ModelConfig:
    """A float32 model of width 16."""
    defaults = dict(vocab_size=VOCAB, d_model=16, mlp_dim=16, dtype="float32", mixers=MIXERS)
    return model.ModelConfig(pattern=pattern, num_layers=num_layers, **(defaults | overrides))


def replace_mixer(letter: str, **options) -> mixers.MixerConfigs:
    """`MIXERS` with some options of one letter changed."""
    changed = dataclasses.replace(getattr(MIXERS, letter), **options)
    return dataclasses.replace(MIXERS, **{letter: changed})


def tokens(shape, seed=1):
    """Random token ids."""
    return jax.random.randint(jax.random.key(seed), shape, 0, VOCAB)


def init(cfg: model.ModelConfig, seed=0):
    """Initial parameters, jitted: many times faster than op by op."""
    return quick_jit(lambda key: model.init_params(cfg, key))(jax.random.key(seed))


def fill(shapes, seed=0):
    """Parameters without zeros or constants that could hide a mistake.

    Drawn by NumPy: compiling a random draw for each shape would take most of the tests' time.
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape)
        is_matrix = path[-1].key == "kernel"
        value = noise * leaf.shape[-2] ** -0.5 if is_matrix else 0.4 + 0.3 * noise
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def noisy_params(cfg: model.ModelConfig, seed=0):
    """`fill` for a whole model."""
    return fill(model.abstract_model(cfg)[1], seed)


def mixer(letter: str, d_model: int, dtype=jnp.float32, param_dtype=jnp.float32, **options):
    """One mixer of `MIXERS` with some options changed, its parameters by `fill`."""
    cls, _ = mixers.MIXERS[letter]
    cfg = getattr(replace_mixer(letter, **options), letter)

    def build():
        kinds = dict(dtype=dtype, param_dtype=param_dtype, norm_eps=1e-6)
        return cls(d_model, cfg, rngs=nnx.Rngs(0), **kinds)

    graphdef, state = nnx.split(nnx.eval_shape(build))
    return nnx.merge(graphdef, fill(nnx.to_pure_dict(state)))


def jitted(module):
    """An NNX module as a function under `quick_jit`: calls of equal shapes compile once."""
    graphdef, state = nnx.split(module)
    params = nnx.to_pure_dict(state)
    run = quick_jit(lambda p, a, k: nnx.merge(graphdef, p)(*a, **k))
    return lambda *args, **kwargs: run(params, args, kwargs)


def apply(module, *args, **kwargs):
    """Calls an NNX module once; see `jitted` for more calls."""
    return jitted(module)(*args, **kwargs)


def quick_jit(f, **kwargs):
    """`jax.jit` that spends little on optimising code which runs once."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0}, **kwargs)

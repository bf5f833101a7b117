"""The TPU kernels compile for every generation within its VMEM, and training takes them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tiny
from fastweights import config as config_lib
from fastweights import sharding, targets
from fastweights.ops.mosaic_tpu import convolution, decode, rule, support
from fastweights.training import optim
from fastweights.training.state import make_blueprint
from fastweights.training.step import compile_step

TARGETS = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}
BF16, F32 = jnp.bfloat16, jnp.float32


@functools.cache
def mesh(target):
    """Of one device that only the compiler knows."""
    return jax.sharding.Mesh(np.array(targets.find(TARGETS[target]).devices[:1]), ("device",))


def of(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def rules(H=8, G=8, K=128, V=128, dtype=BF16, gated=True, delta=True, packed=False, grad=True,
          **options):  # fmt: skip
    """The rule and its gradient: two kernels, or the forward one alone."""
    B, T = 8, 4096  # too large to lie in VMEM
    gate = of(B, T, G, dtype=F32)
    inputs = (of(B, T, H, K, dtype=dtype),) * 2 + (of(B, T, G, V, dtype=dtype),)
    inputs += (gate if gated else None, gate if delta else None, of(B, G, K, V, dtype=F32))
    document = of(B, T, dtype=jnp.int32) if packed else None

    def call(inputs, document):
        def core(*inputs):
            return rule.core(*inputs, document, scale=0.1, **options)

        if not grad:
            return core(*inputs)
        out, pull = jax.vjp(core, *inputs)
        return pull(out)

    return call, (inputs, document)


def token(H=8, G=8, K=128, V=128, dtype=BF16, gated=True, delta=True):
    B, gate = 4, of(4, 1, G, dtype=F32)
    inputs = (of(B, 1, H, K, dtype=dtype),) * 2 + (of(B, 1, G, V, dtype=dtype),)
    inputs += (gate if gated else None, gate if delta else None, of(B, G, K, V, dtype=F32))
    return functools.partial(decode.core, scale=0.1), inputs


def convolved(taps=4, bias=False, dtype=BF16, **options):
    def call(x, w, bias, reach):
        def core(x, w, bias):
            return convolution.short_convolution(x, w, bias, reach, **options)

        out, pull = jax.vjp(core, x, w, bias)
        return pull(out)

    wide = of(1024, dtype=F32) if bias else None
    x, w = of(2, 1024, 1024, dtype=dtype), of(taps, 1024, dtype=F32)
    return call, (x, w, wide, of(2, 1024, dtype=jnp.int32))


EVERYWHERE = [
    (rules, dict()),
    (rules, dict(packed=True, grad=False)),
    (token, dict()),
    (convolved, dict(activation="silu", unit=128)),
]
VARIANTS = [(target, *variant) for target in TARGETS for variant in EVERYWHERE]
VARIANTS += [
    ("tpu7x", rules, dict(H=16, G=16, packed=True)),
    ("v6e", rules, dict(gated=False)),
    ("v5p", rules, dict(delta=False)),
    ("v6e", rules, dict(gated=False, delta=False)),
    ("v5e", rules, dict(H=2, G=8)),
    ("v6e", rules, dict(H=1, G=9, K=64, V=64, packed=True)),
    ("v5p", rules, dict(H=16, G=16, dtype=F32)),
    ("tpu7x", rules, dict(H=16, G=16, chunk_size=128)),
    ("tpu7x", rules, dict(K=256, V=256)),
    ("tpu7x", rules, dict(K=256, V=256, dtype=F32)),
    ("v5e", token, dict(H=2, K=64, V=64, dtype=F32)),
    ("v6e", token, dict(K=256, V=256, gated=False)),
    ("v5p", token, dict(K=72, delta=False)),
    ("v5e", convolved, dict(taps=8, bias=True, activation=None, dtype=F32)),
]


def compiled(target, call, arguments):
    where = mesh(target)
    everywhere = NamedSharding(where, PartitionSpec())
    with jax.sharding.use_abstract_mesh(where.abstract_mesh):
        jitted = jax.jit(call, in_shardings=everywhere, out_shardings=everywhere)
        return jitted.lower(*arguments).compile()


def vmem(text):
    """Bytes that each kernel of a compiled program uses."""
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
    used = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"'
    name = r"((?:rule|convolution)_[a-z]+)"
    return {re.search(name, call)[1]: int(re.search(used, call)[1]) for call in calls}


@pytest.mark.parametrize(
    ("target", "kernel", "options"),
    VARIANTS,
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_compiles_within_vmem(capsys, target, kernel, options):
    used = vmem(compiled(target, *kernel(**options)).as_text())
    both = options.get("grad", True)
    names = {
        rules: {"rule_forward", "rule_backward"} if both else {"rule_forward"},
        token: {"rule_decode"},
        convolved: {"convolution_backward"},
    }
    with capsys.disabled():
        sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in used.items())
        print(f"\n{target} {options}: {sizes} of VMEM")
    assert names[kernel] <= set(used)
    assert max(used.values()) <= support.VMEM_LIMIT


def test_a_hybrid_trains_with_the_kernels(recwarn):
    """Two layers on four devices, rows by heads: both passes of the rule and of the convolution."""
    sizes = ("model.d_model=256", "model.mlp_dim=256", "model.vocab_size=256", "data.length=256")
    heads = ("G.num_heads=4", "G.num_qk_heads=2", "G.head_dim=128", "A.head_dim=64")
    config = config_lib.load(
        tiny.__file__, ["model.dtype=bfloat16", *sizes, *(f"model.mixers.{x}" for x in heads)]
    )
    cut = sharding.make_mesh(
        sharding.MeshConfig(data=2, tensor=2), targets.find(TARGETS["v5p"]).devices[:4]
    )
    tx = optim.make_optimizer(config.optim, config.steps)
    text = compile_step(config, make_blueprint(config.model, tx, cut), tx, cut).as_text()
    for name in ("rule_forward", "rule_backward", "convolution_backward"):
        assert name in text
    assert not [str(w.message) for w in recwarn.list if "runs as XLA code" in str(w.message)]

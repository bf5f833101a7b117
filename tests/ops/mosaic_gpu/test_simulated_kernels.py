"""The Hopper kernels in Pallas' GPU simulator against the float64 recurrence, at small sizes.

What the simulator cannot show, register operands and the substitution's own instructions, is left
to `scripts/check_kernels.py` on a GPU; copies, barriers, rings, masks and the algebra are here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ops_oracle
from fastweights.ops.mosaic_gpu import rule

BOUNDS = dict.fromkeys(("o", "S"), 5e-3)
BOUNDS |= dict.fromkeys(("dq", "dk", "dv", "dinitial_state"), 8e-3)
BOUNDS |= dict.fromkeys(("dg", "dbeta"), 2e-2)
# Keys alike and no decay: storing bfloat16 between the kernels is the limit.
ALIKE = dict.fromkeys(("o", "S", "dq", "dk", "dv", "dinitial_state"), 1.2e-2)
ALIKE |= dict.fromkeys(("dg", "dbeta"), 4e-2)


def draw(T, *, heads=(1, 1), dims=(64, 64), decay=-0.1, cosine=0.0, without=()):
    """Inputs whose q, k, v and do are exactly bfloat16."""
    (H, G), (K, V) = heads, dims
    x = ops_oracle.random_inputs(0, B=1, T=T, H=H, G=G, K=K, V=V, g_mean=decay)
    if cosine:
        mean = np.random.default_rng(1).standard_normal((1, 1, H, K))
        k = np.sqrt(1 - cosine) * x["k"] + np.sqrt(cosine) * mean / np.linalg.norm(mean)
        x["k"] = k / np.linalg.norm(k, axis=-1, keepdims=True)
        x["beta"] = np.full_like(x["beta"], 0.95)
    for name in ("q", "k", "v", "do"):
        x[name] = np.asarray(jnp.asarray(x[name], jnp.bfloat16), np.float32)
    return {name: a for name, a in x.items() if name not in without}


def simulate(x, lengths=None, pieces=None):
    """What `ops_oracle` returns, from the kernels."""
    names = ("q", "k", "v", "g", "beta", "initial_state")
    kinds = {"q": jnp.bfloat16, "k": jnp.bfloat16, "v": jnp.bfloat16}
    inputs = [jnp.asarray(x[n], kinds.get(n, jnp.float32)) if n in x else None for n in names]
    document = None
    if lengths is not None:
        document = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths)[None], jnp.int32)

    def run(*inputs):
        scale = x["q"].shape[-1] ** -0.5
        return rule.core(*inputs, document, scale=scale, pieces=pieces, simulate=True)

    (o, S), pull = jax.vjp(run, *inputs)
    gradients = pull((jnp.asarray(x["do"], o.dtype), jnp.asarray(x["dS"])))
    out = {f"d{n}": d for n, d in zip(names, gradients, strict=True) if d is not None}
    return {"o": o, "S": S, **out}


def check(got, want, bounds=BOUNDS):
    for name, reference in want.items():
        error = np.asarray(got[name], np.float64) - reference
        relative = np.sqrt(np.mean(error**2) / np.mean(reference**2))
        assert relative <= bounds[name], f"{name}: {relative:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (dict(T=100, heads=(1, 2), dims=(60, 64)), None),
        (dict(T=64, dims=(128, 128), without=("g",)), None),
        (dict(T=130, dims=(256, 64)), None),
        (dict(T=192, decay=-0.01), 3),
        (dict(T=192, decay=-1.0), 3),
        (dict(T=192, decay=-0.01, without=("beta",)), 3),
    ],
    ids=["odd length, shared heads", "delta rule", "wide keys", "exact pieces", "tails", "sums"],
)
def test_kernels_match_the_recurrence(options, pieces):
    x = draw(**options)
    check(simulate(x, pieces=pieces), ops_oracle.recurrence(x))


@pytest.mark.slow
@pytest.mark.parametrize("without", [(), ("beta",)], ids=["delta", "no delta"])
def test_documents_in_a_row_do_not_mix(without):
    """Boundaries at a chunk's first, last and middle token, and documents of one token."""
    lengths = [30, 1, 32, 1, 64, 22]
    x = draw(T=150, decay=-0.01, without=without)
    check(simulate(x, lengths), ops_oracle.packed(x, lengths))


@pytest.mark.slow
def test_stored_inverse_keeps_its_column_sums():
    """Keys alike and no decay: rounding A entry by entry would miss these bounds by half."""
    x = draw(T=256, decay=-1e-6, cosine=0.99)
    check(simulate(x), ops_oracle.recurrence(x), ALIKE)


@pytest.mark.slow
@pytest.mark.parametrize("without", [(), ("beta",)], ids=["delta", "no delta"])
def test_the_gradient_of_a_strong_decay_keeps_its_digits(without):
    """What a token writes and reads of itself is 1e5 times all that such decays leave."""
    x = draw(T=100, without=without)
    x["g"] = -12.0 + np.clip(x["g"], -1.0, 0.0)
    check(simulate(x), ops_oracle.recurrence(x))


@pytest.mark.slow
def test_a_tiny_beta_keeps_its_gradient():
    """dbeta divides by beta^2, so no rounding of other rows may reach a row whose beta is tiny."""
    x = draw(T=100, heads=(1, 2), dims=(60, 64))
    x["beta"][:, 7::20] = 2e-5
    got, want = simulate(x)["dbeta"], ops_oracle.recurrence(x)["dbeta"]
    check({"dbeta": got[:, 7::20]}, {"dbeta": want[:, 7::20]})


@pytest.mark.slow
def test_no_data_races(races_found):
    """Packed, in pieces, forward and backward, with the simulator's race detector on."""
    simulate(draw(T=256), [100, 156], pieces=2)
    assert not races_found()

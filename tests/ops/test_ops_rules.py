"""Recurrent rules: cases computed elsewhere, closed forms, and the normaliser."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ops_oracle as oracle
import tiny_models
from fastweights import ops
from ops_family import RULES

CASES = pathlib.Path(__file__).parent / "data" / "gdn_op_reference.npz"


@pytest.mark.parametrize(
    "case",
    (
        "random",
        "no_decay",
        "no_decay_repeated_keys",
        "extreme_decay",
        "beta2",
        "zero_rows",
        "short_L3",
        "exact_128",
        "k_scale_tiny",
    ),
)
def test_stored_cases(case):
    """Nine cases computed elsewhere in float64, with the L2 norm of q and k as part of the rule."""
    with np.load(CASES) as stored:
        x = {name.split("/")[1]: stored[name] for name in stored if name.startswith(f"{case}/")}

    @tiny_models.quick_jit
    def stored_case(x):
        def call(q, k, *rest):
            unit = (ops.l2_normalize(q), ops.l2_normalize(k))
            return ops.gated_delta_rule(*unit, *rest[:3], initial_state=rest[3])

        names = ("q", "k", "v", "g", "beta", "S0")
        (o, S), vjp = jax.vjp(call, *(x[name] for name in names))
        gradients = vjp((x["do"], x["dS"]))
        return {"o": o, "S": S} | {f"d{n}": a for n, a in zip(names, gradients, strict=True)}

    got = stored_case(x)
    oracle.assert_close(got, {name: x[name].astype(np.float64) for name in got})


def test_a_decay_per_head_equals_its_quadratic_form():
    """Mamba-2's dual: causal scores times e^(G_i - G_j), without any state."""
    x = RULES["gated_linear_attention"].draw(1, T=40)
    arrays = (x[name] for name in ("q", "k", "v", "g"))
    o, _ = ops.gated_linear_attention(*arrays, scale=1.0, chunk_size=16)
    q, k = (np.repeat(x[name].astype(np.float64), 2, axis=2) for name in "qk")
    total = np.cumsum(x["g"].astype(np.float64), axis=1).transpose(0, 2, 1)
    decay = np.tril(np.exp(np.minimum(total[..., :, None] - total[..., None, :], 0)))
    scores = np.einsum("bigk,bjgk->bgij", q, k) * decay
    want = np.einsum("bgij,bjgv->bigv", scores, x["v"])
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ("chunked", "reference"))
def test_normalised_linear_attention(implementation):
    x = RULES["linear_attention"].draw(15, T=130)
    x["q"], x["k"] = np.abs(x["q"]), np.abs(x["k"])
    z = np.abs(x["initial_state"][..., 0])
    dz = x["dS"][..., 1]
    eps = 1e-3

    @tiny_models.quick_jit
    def got(x, z, dz):
        def call(q, k, v, S, z):
            return ops.linear_attention(
                q,
                k,
                v,
                normalize=True,
                eps=eps,
                initial_state=(S, z),
                implementation=implementation,
            )

        (o, state), vjp = jax.vjp(call, x["q"], x["k"], x["v"], x["initial_state"], z)
        return o, state, vjp((x["do"], (x["dS"], dz)))

    o, (S, z_out), (dq, dk, dv, dS, dz_in) = got(x, z, dz)

    # One more value channel that is always 1, and the quotient's gradient by hand.
    wide = {name: a.astype(np.float64) for name, a in x.items()}
    wide["v"] = np.concatenate([wide["v"], np.ones((2, 130, 4, 1))], -1)
    wide["initial_state"] = np.concatenate([wide["initial_state"], z[..., None]], -1)
    wide["dS"] = np.concatenate([wide["dS"], dz[..., None]], -1)
    wide["do"] = np.zeros((2, 130, 4, 8))
    sums = oracle.recurrence(wide, scale=1.0)["o"]
    weight = sums[..., -1:] + eps
    dweight = -np.sum(x["do"] * sums[..., :-1], -1, keepdims=True) / weight**2
    wide["do"] = np.concatenate([x["do"] / weight, dweight], -1)
    want = oracle.recurrence(wide, scale=1.0)
    oracle.assert_close(
        {"o": o, "S": S, "z": z_out, "dq": dq, "dk": dk, "dv": dv, "dS": dS, "dz": dz_in},
        {
            "o": sums[..., :-1] / weight,
            "S": want["S"][..., :-1],
            "z": want["S"][..., -1],
            "dq": want["dq"],
            "dk": want["dk"],
            "dv": want["dv"][..., :-1],
            "dS": want["dinitial_state"][..., :-1],
            "dz": want["dinitial_state"][..., -1],
        },
    )


def test_normalised_padding_without_eps_is_zero():
    x = jax.tree.map(jnp.asarray, oracle.random_inputs(15, T=20))
    segment_ids = jnp.where(jnp.arange(20)[None] < 5, 0, 1) * jnp.ones((2, 1), jnp.int32)

    def loss(q, k, v):
        options = dict(normalize=True, eps=0.0, segment_ids=segment_ids)
        return jnp.sum(ops.linear_attention(jnp.abs(q), jnp.abs(k), v, **options)[0] ** 2)

    run = tiny_models.quick_jit(jax.value_and_grad(loss, (0, 1, 2)))
    value, gradients = run(x["q"], x["k"], x["v"])
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(a)) and not np.any(a[:, :5]) for a in gradients)

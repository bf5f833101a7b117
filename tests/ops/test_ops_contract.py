"""What the recurrent rules promise beside their numbers: dtypes, transforms, memory, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ops_oracle as oracle
from fastweights import ops

NAMES = ("q", "k", "v", "g", "beta")


def inputs(T=20, **options):
    x = oracle.random_inputs(1, T=T, **options)
    return {name: jnp.asarray(x[name]) for name in (*NAMES, "initial_state")}


def total(x, **options):
    """A scalar that feels every output."""
    options = {"chunk_size": 16, "implementation": "chunked"} | options
    state = x.get("initial_state")
    o, S = ops.gated_delta_rule(*(x[n] for n in NAMES), initial_state=state, **options)
    return jnp.sum(jnp.sin(o.astype(S.dtype))) + jnp.sum(jnp.sin(S))


def close(got, want, tolerance=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want
    )


@pytest.mark.parametrize("rule", ("gated_delta_rule", "kimi_delta_rule"))
def test_float64_stays_float64(rule):
    with jax.enable_x64(True):
        x = oracle.random_inputs(2, T=40, channels=rule == "kimi_delta_rule")
        x = {name: a.astype(np.float64) for name, a in x.items()}
        for implementation in ("chunked", "reference"):

            @jax.jit
            def run(x, implementation=implementation):
                def call(x):
                    return getattr(ops, rule)(
                        *(x[n] for n in NAMES),
                        initial_state=x["initial_state"],
                        implementation=implementation,
                    )

                names = (*NAMES, "initial_state")
                (o, S), vjp = jax.vjp(call, {name: x[name] for name in names})
                (d,) = vjp((x["do"], x["dS"]))
                return {"o": o, "S": S} | {f"d{name}": d[name] for name in names}

            got = run(x)
            assert all(a.dtype == jnp.float64 for a in got.values())
            oracle.assert_close(got, oracle.recurrence(x), 1e-12)


@pytest.mark.parametrize(
    ("implementation", "rule"),
    (
        ("chunked", "gated_delta_rule"),
        ("scan", "gated_delta_rule"),
        ("reference", "gated_delta_rule"),
        ("chunked", "kimi_delta_rule"),
        ("scan", "kimi_delta_rule"),
        ("reference", "kimi_delta_rule"),
    ),
)
def test_bfloat16(implementation, rule):
    """Rounded inputs, float32 inside: as good as the output's own rounding."""
    x = oracle.random_inputs(3, T=130, channels=rule == "kimi_delta_rule")
    x = {n: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for n, a in x.items()}

    @jax.jit
    def run(x):
        def call(q, k, v, g, beta, S):
            return getattr(ops, rule)(
                q, k, v, g, beta, initial_state=S, implementation=implementation
            )

        narrow = [x[name].astype(jnp.bfloat16) for name in ("q", "k", "v")]
        (o, S), vjp = jax.vjp(call, *narrow, x["g"], x["beta"], x["initial_state"])
        d = vjp((x["do"].astype(jnp.bfloat16), x["dS"]))
        names = (*NAMES, "initial_state")
        return {"o": o, "S": S} | {f"d{n}": a for n, a in zip(names, d, strict=True)}

    got, want = run(x), oracle.recurrence(x)
    assert got["o"].dtype == got["dq"].dtype == jnp.bfloat16
    assert got["S"].dtype == got["dg"].dtype == got["dbeta"].dtype == jnp.float32
    oracle.assert_close(got, want, 1e-2)
    for name in ("dg", "dbeta"):
        a, b = np.ravel(got[name]), np.ravel(want[name])
        assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
    # Never rounded to 16 bits on the way: far better than bfloat16 could be.
    gates = ("dg", "dbeta", "S")
    oracle.assert_close({n: got[n] for n in gates}, {n: want[n] for n in gates}, 1e-5)


@pytest.mark.parametrize("implementation", ("chunked", "scan", "reference", "auto"))
def test_no_initial_state_is_zero_state(implementation):
    x = inputs()
    zeros = x | {"initial_state": jnp.zeros_like(x["initial_state"])}
    del x["initial_state"]
    options = {"implementation": implementation}
    got = jax.jit(jax.grad(functools.partial(total, **options)))(x)
    want = jax.jit(jax.grad(functools.partial(total, **options)))(zeros)
    close(got, {name: want[name] for name in x})


def test_no_tokens():
    x = inputs(T=0)
    o, S = ops.gated_delta_rule(*(x[n] for n in NAMES), initial_state=x["initial_state"])
    assert o.shape == x["v"].shape
    assert np.array_equal(S, x["initial_state"])


def test_one_token_is_one_update_without_a_loop():
    x = inputs(T=1)
    jaxpr = str(jax.make_jaxpr(lambda x: total(x, implementation="auto"))(x))
    assert "while" not in jaxpr and "scan" not in jaxpr
    close(total(x, implementation="auto"), total(x, implementation="reference"))


@pytest.mark.parametrize("split", (1, 16, 37))
def test_prefill_then_decode_equals_one_run(split):
    x = inputs(T=40)
    run = jax.jit(functools.partial(ops.gated_delta_rule, chunk_size=16))
    whole, S_whole = run(*(x[n] for n in NAMES), initial_state=x["initial_state"])
    o, S = run(*(x[n][:, :split] for n in NAMES), initial_state=x["initial_state"])
    parts = [o]
    for t in range(split, 40):
        o, S = run(*(x[n][:, t : t + 1] for n in NAMES), initial_state=S)
        parts.append(o)
    close(jnp.concatenate(parts, axis=1), whole)
    close(S, S_whole)


def test_vmap():
    many = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), inputs())
    got = jax.jit(jax.vmap(jax.grad(total)))(many)
    one = jax.jit(jax.grad(total))
    want = [one(jax.tree.map(lambda a, i=i: a[i], many)) for i in range(2)]
    close(got, jax.tree.map(lambda *a: jnp.stack(a), *want))


def test_checkpoint():
    x = inputs()
    close(jax.jit(jax.grad(jax.checkpoint(total)))(x), jax.jit(jax.grad(total))(x))


def test_scan_over_layers_equals_a_loop():
    x = inputs(T=20, H=2, G=2, K=4, V=4)
    layers = jnp.asarray([0.5, 1.0, 1.5])

    def layer(v, factor):
        rest = (x["q"], x["k"], v, x["g"], factor * x["beta"])
        return v + ops.gated_delta_rule(*rest, chunk_size=16)[0]

    def scanned(v):
        body = jax.checkpoint(lambda v, factor: (layer(v, factor), None))
        return jnp.sum(jax.lax.scan(body, v, layers)[0] ** 2)

    def looped(v):
        for factor in layers:
            v = layer(v, factor)
        return jnp.sum(v**2)

    close(jax.jit(jax.grad(scanned))(x["v"]), jax.jit(jax.grad(looped))(x["v"]), 1e-4)


@pytest.mark.parametrize("name", (*NAMES, "initial_state"))
def test_gradient_of_one_input_alone(name):
    x = inputs()
    alone = jax.jit(jax.grad(lambda a: total(x | {name: a})))(x[name])
    close(alone, jax.jit(jax.grad(total))(x)[name])


def test_gradient_through_the_state_alone():
    x = inputs()

    def last(x):
        return jnp.sum(
            ops.gated_delta_rule(*(x[n] for n in NAMES), initial_state=x["initial_state"])[1] ** 2
        )

    gradients = jax.jit(jax.grad(last))(x)
    assert not np.any(gradients["q"])
    assert all(np.any(gradients[name][:, 0]) for name in ("k", "v", "g", "beta"))


def test_memory_grows_linearly():
    def temporary(length):
        x = jax.eval_shape(functools.partial(inputs, T=length, B=1, H=1, G=1, K=32, V=32))
        step = jax.jit(jax.value_and_grad(functools.partial(total, chunk_size=64)))
        return step.lower(x).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(2048), temporary(8192)
    assert large < 4.5 * small
    # What a token costs at most: a few copies of its inputs, its share of states and inverse.
    assert large < 8192 * 4 * 1000


def test_a_decay_per_head_equals_its_quadratic_form():
    """Mamba-2's dual: causal scores times e^(G_i - G_j), without any state."""
    x = {n: np.asarray(a, np.float64) for n, a in inputs(T=40).items()}
    o, _ = ops.gated_linear_attention(
        *(jnp.asarray(x[n], jnp.float32) for n in ("q", "k", "v", "g")), scale=1.0, chunk_size=16
    )
    q, k = (np.repeat(x[n], 2, axis=2) for n in "qk")
    total = np.cumsum(x["g"], axis=1).transpose(0, 2, 1)
    decay = np.tril(np.exp(np.minimum(total[..., :, None] - total[..., None, :], 0)))
    scores = np.einsum("bigk,bjgk->bgij", q, k) * decay
    close(o, np.einsum("bgij,bjgv->bigv", scores, x["v"]), 1e-5)

"""What every recurrent rule promises beside its numbers: it goes through all of JAX's transforms.

Case 19 of the list in `test_edge_cases.py`. Each transform is held to the plain gradient.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ops_family as family
import ops_oracle as oracle
import tiny_models
from ops_family import EACH, RULES

# The forms with a gradient of their own, where there are any.
PARALLEL = {name: "scan" if RULES[name].letter == "S" else "chunked" for name in EACH}


def inputs(name, T=20):
    return jax.tree.map(jnp.asarray, family.inputs_of(name, RULES[name].draw(1, T=T)))


def total(x, name, **options):
    """A scalar that feels every output."""
    options = {"chunk_size": 16, "implementation": PARALLEL[name]} | options
    o, S = family.call(name, x, **options)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(S))


@functools.cache
def gradient(name):
    return tiny_models.quick_jit(jax.grad(functools.partial(total, name=name)))


@functools.cache
def plain(name):
    return gradient(name)(inputs(name))


def close(got, want, tolerance=2e-5):
    def compare(a, b):
        scale = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)

    jax.tree.map(compare, got, want)


@pytest.mark.parametrize("name", EACH)
def test_vmap(name):
    x = inputs(name)
    tokens = RULES[name].tokens
    many = {n: jnp.stack([a, 0.5 * a]) if n in tokens else a for n, a in x.items()}
    axes = {n: 0 if n in tokens else None for n in x}
    value = functools.partial(total, name=name)
    got = tiny_models.quick_jit(jax.vmap(jax.grad(value), (axes,)))(many)
    half = {n: 0.5 * a if n in tokens else a for n, a in x.items()}
    want = (plain(name), gradient(name)(half))
    close(got, jax.tree.map(lambda *a: jnp.stack(a), *want))


@pytest.mark.parametrize("name", EACH)
def test_checkpoint_inside_a_scan_over_layers(name):
    """Three layers of one op, recomputed in the backward pass, against a plain loop."""
    x, source = inputs(name), "x" if RULES[name].letter in "MS" else "v"
    factors = jnp.asarray([0.5, 1.0, 1.5])

    def layer(a, factor):
        rest = x | {source: factor * a}
        return a + family.call(name, rest, chunk_size=16, implementation=PARALLEL[name])[0]

    def scanned(a):
        body = jax.checkpoint(lambda a, factor: (layer(a, factor), None))
        return jnp.sum(jax.lax.scan(body, a, factors)[0] ** 2)

    def looped(a):
        for factor in factors:
            a = layer(a, factor)
        return jnp.sum(a**2)

    one, two = (tiny_models.quick_jit(jax.grad(f))(x[source]) for f in (scanned, looped))
    close(one, two, 1e-4)


@pytest.mark.parametrize("name", EACH)
def test_gradient_of_some_inputs_alone(name):
    """Every second one, so that a rule's gradient is asked for in part."""
    x = inputs(name)
    some = {n: a for i, (n, a) in enumerate(x.items()) if i % 2}

    def value(some, x):
        return total(x | some, name)

    close(tiny_models.quick_jit(jax.grad(value))(some, x), {n: plain(name)[n] for n in some})


@pytest.mark.parametrize("name", EACH)
def test_gradient_through_the_state_alone(name):
    """The last token feels it too, and what only reads feels nothing."""
    x = inputs(name)

    def last(x):
        options = {"chunk_size": 16, "implementation": PARALLEL[name]}
        return jnp.sum(family.call(name, x, **options)[1] ** 2)

    gradients = tiny_models.quick_jit(jax.grad(last))(x)
    reads = {"q", "D"} | ({"C"} if RULES[name].letter in "MS" else set())
    for n, a in gradients.items():
        assert np.any(a) == (n not in reads), n
        if n in RULES[name].tokens - reads:
            assert np.all(np.any(np.asarray(a)[:, [0, -1]], axis=-1)), n


STARTS = [("gated_delta_rule", form) for form in ("chunked", "scan", "reference")]
STARTS += [("selective_scan", "chunked"), ("selective_scan", "scan"), ("state_space", "scan")]


@pytest.mark.parametrize(("name", "implementation"), STARTS)
def test_no_initial_state_is_zero_state(name, implementation):
    x = RULES[name].draw(1, T=20)
    want = family.recurrence(name, x | {"initial_state": np.zeros_like(x["initial_state"])})
    del x["initial_state"], want["dinitial_state"]
    oracle.assert_close(family.run(name, x, implementation=implementation), want)


@pytest.mark.parametrize("name", EACH)
def test_one_token_is_one_update_without_a_loop(name):
    x = inputs(name, T=1)
    value = functools.partial(total, name=name)
    jaxpr = str(jax.make_jaxpr(functools.partial(value, implementation="auto"))(x))
    assert "while" not in jaxpr and "scan[" not in jaxpr
    close(value(x, implementation="auto"), value(x, implementation="reference"))


@pytest.mark.parametrize("name", EACH)
def test_decode_updates_a_donated_state_in_place(name):
    x = inputs(name, T=1)
    state = x.pop("initial_state")

    def step(state, x):
        return family.call(name, x | {"initial_state": state})

    want = jax.jit(step)(state, x)
    compiled = jax.jit(step, donate_argnums=0).lower(state, x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == state.nbytes
    close(compiled(state, x), want, 1e-6)
    assert state.is_deleted()


@pytest.mark.parametrize("name", EACH)
def test_runs_are_equal_to_the_bit(name):
    again = gradient(name)(inputs(name))
    jax.tree.map(np.testing.assert_array_equal, again, plain(name))


CUTS = [(name, True) for name in EACH]
CUTS += [("gated_delta_rule", False), ("selective_scan", False)]


@pytest.mark.parametrize(("name", "stateful"), CUTS)
def test_rows_and_heads_may_be_cut_over_a_mesh(name, stateful):
    """Rows over one axis, heads or channels over the other; parameters of a channel with it."""
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("rows", "heads"))
    rule, x = RULES[name], inputs(name)
    matrix = name in family.MATRIX

    def spec(n):
        if n in rule.tokens:
            # Mamba's maps B and C serve all channels.
            return P("rows", None, "heads" if matrix or n in ("x", "dt") else None)
        if n == "initial_state":
            return P("rows", "heads")
        return P("heads")

    if not stateful:
        del x["initial_state"]
    specs = {n: spec(n) for n in x}

    def local(x):
        return family.call(name, x, chunk_size=16, implementation=PARALLEL[name])

    out = (P("rows", None, "heads"), P("rows", "heads"))
    cut = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out)

    def value(x):
        o, S = cut(x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(S))

    want = plain(name) if stateful else gradient(name)(x)
    close(tiny_models.quick_jit(jax.grad(value))(x), want)

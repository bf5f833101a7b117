"""Edges where implementations of these rules have gone wrong, each a named test.

Every one holds values and all gradients to the token-by-token float64 answer: within 1e-5 in
float32, 1e-2 in bfloat16.

case                                      test
1   lengths that are no whole chunks      test_length_off_the_chunk
2   no tokens, nothing between documents  test_no_tokens, test_packing.py::test_rows_of_padding_...
3   strong decay                          test_gates, test_steps, test_states_that_forget_at_once
4   no decay at all                       test_gates[no_decay], test_no_decay_is_the_rule_without
5   identical and near-identical keys     test_writes, in 16 bits test_edges_in_bfloat16
6   no write, exact overwrite             test_writes[no_write], test_a_full_write_replaces_...
7   strengths up to 2                     test_writes[reflections], test_identical_keys_reflected
8   zero keys and queries                 test_writes[zero_keys...], test_zero_keys_under_the_norm
9   documents inside chunks               test_packing.py::test_packed_documents_equal_...
10  documents and short convolutions      mixers/test_packed_rows.py, test_ops_features.py
11  initial states in packed rows         test_packing.py::test_packed_..., test_input_checks.py
12  final states behind padding           test_packing.py::test_padding_with_nan_changes_nothing
13  grouped heads                         test_shapes.py::test_value_heads_..., test_groups_...
14  odd head dims                         test_shapes.py::test_head_dims
15  bfloat16                              test_shapes.py::test_bfloat16, mixers/test_gate_gradients
16  more than 2^31 numbers                test_shapes.py::test_no_index_spans_a_whole_array
17  prefill and decode, chunk sizes       mixers/test_prefill_decode.py, test_shapes::test_chunk_...
18  context parallelism                   not part of this package yet
19  transforms, donation, determinism     test_ops_contract.py, mixers/test_prefill_decode.py
20  NaN in padding and empty slots        test_packing.py::test_padding_..., test_ops_attention.py

Softmax attention has its own oracle, in `test_ops_attention.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ops_edges as edges
import ops_family as family
import ops_oracle as oracle
import tiny_models
from fastweights import ops
from ops_family import DELTA, EACH, FORMS, GATED, RULES

LENGTHS = (1, 15, 63, 64, 65, 200)
# All rules are cut into chunks alike: one at all lengths, the others where it tells most.
OFF_THE_CHUNK = [
    (name, next(iter(RULES[name].forms)), length)
    for name in EACH
    for length in (LENGTHS if name == "gated_delta_rule" else (1, 65, 200))
]
OFF_THE_CHUNK += [
    (name, form, length)
    for name, form in FORMS
    for length in (1, 65)
    if (name, form, length) not in OFF_THE_CHUNK and form != "chunked_in_groups"
]
OFF_THE_CHUNK += [(name, "scan", 65) for name in ("state_space_zoh", "state_space_bilinear")]


@pytest.mark.parametrize(("name", "form", "length"), OFF_THE_CHUNK)
def test_length_off_the_chunk(name, form, length):
    x = RULES[name].draw(length, T=length)
    family.check(name, x, **RULES[name].forms[form])


@pytest.mark.parametrize("name", EACH)
def test_no_tokens(name):
    x = RULES[name].draw(T=0)
    o, S = family.call(name, family.inputs_of(name, x))
    assert o.shape == x["do"].shape
    np.testing.assert_array_equal(S, x["initial_state"])


PARALLEL = ("chunked", "scan")


@pytest.mark.parametrize("implementation", PARALLEL)
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("edge", edges.GATES, ids=lambda f: f.__name__)
def test_gates(edge, name, implementation):
    family.check(name, edges.edited(name, edge), implementation=implementation)


@pytest.mark.parametrize("name", GATED)
def test_huge_decay_has_exactly_no_gradient(name):
    got = family.run(name, edges.edited(name, edges.one_huge_decay), implementation="chunked")
    assert np.all(got["dg"][:, 70] == 0)


def no_step(x):
    x["dt"][:, 10:90] = 0


def fast_rates(x):
    x["A"] *= 1000


def one_huge_step(x):
    x["dt"][:, 70] = 1e6
    x["x"][:, 70] = 1e-6


def no_rate(x):
    x["A"][:] = 0


@pytest.mark.parametrize("implementation", ("chunked", "auto", "scan"))
@pytest.mark.parametrize(
    "edge", (no_step, fast_rates, one_huge_step, no_rate), ids=lambda f: f.__name__
)
def test_steps(edge, implementation):
    family.check(
        "selective_scan", edges.edited("selective_scan", edge), implementation=implementation
    )


def fast_poles(x):
    x["A"] = x["A"].imag * 1j - 300.0 * np.linspace(1, 4, 4)[:, None].astype(np.float32)


@pytest.mark.parametrize("name", ("state_space", "state_space_zoh"))
def test_states_that_forget_at_once(name):
    family.check(name, edges.edited(name, fast_poles), implementation="scan")


WITHOUT_DECAY = {
    "gated_delta_rule": "delta_rule",
    "kimi_delta_rule": "delta_rule",
    "gated_linear_attention": "linear_attention",
}


@pytest.mark.parametrize("implementation", (*PARALLEL, "reference"))
@pytest.mark.parametrize("name", WITHOUT_DECAY)
def test_no_decay_is_the_rule_without(name, implementation):
    x = edges.edited(name, edges.no_decay, 16)
    got = family.run(name, x, implementation=implementation)
    del x["g"]
    want = family.recurrence(WITHOUT_DECAY[name], x)
    oracle.assert_close({n: got[n] for n in want}, want)


@pytest.mark.parametrize("implementation", (*PARALLEL, "reference"))
def test_equal_channels_are_one_decay(implementation):
    x = RULES["gated_delta_rule"].draw(17)
    want = family.recurrence("gated_delta_rule", x)
    x["g"] = np.broadcast_to(x["g"][..., None], (*x["g"].shape, 5))
    got = family.run("kimi_delta_rule", x, implementation=implementation)
    oracle.assert_close(got | {"dg": np.sum(got["dg"], axis=-1)}, want)


@pytest.mark.parametrize("implementation", PARALLEL)
@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("edge", edges.WRITES, ids=lambda f: f.__name__)
def test_writes(edge, name, implementation):
    family.check(name, edges.edited(name, edge), implementation=implementation)


IN_BFLOAT16 = [(edge, name) for edge in edges.GATES for name in GATED]
IN_BFLOAT16 += [(edge, name) for edge in edges.WRITES for name in DELTA]


@pytest.mark.parametrize(
    ("edge", "name"), IN_BFLOAT16, ids=lambda part: getattr(part, "__name__", part)
)
def test_edges_in_bfloat16(edge, name):
    x, wide = family.narrowed(name, edges.edited(name, edge))
    got = family.run(name, x, implementation="chunked")
    oracle.assert_close(got, family.recurrence(name, wide), 1e-2)


@pytest.mark.parametrize(("beta", "tolerance"), ((1.9, 5e-5), (2.0, 2e-4)))
@pytest.mark.parametrize("implementation", PARALLEL)
@pytest.mark.parametrize("name", DELTA)
def test_identical_keys_reflected(name, implementation, beta, tolerance):
    """Towards beta = 2 one key's memory flips at every token and hardly fades.

    An explicit float32 inverse, entries up to 2, can do no better: rounding each of its 64 x 64
    entries moves a value by about 1e-5, and the state keeps all of it.
    """
    x = edges.edited(name, edges.identical_keys)
    x["beta"] = np.float32(beta) * x["beta"]
    family.check(name, x, tolerance, implementation=implementation)


@pytest.mark.parametrize("implementation", (*PARALLEL, "reference"))
@pytest.mark.parametrize("name", ("gated_delta_rule", "kimi_delta_rule"))
def test_no_write_only_decays(name, implementation):
    x = edges.edited(name, edges.no_write, 18, g_mean=-0.01)
    got = family.run(name, x, implementation=implementation)
    total = np.sum(x["g"].astype(np.float64), axis=1)
    factor = np.exp(total if name == "kimi_delta_rule" else total[..., None])[..., None]
    np.testing.assert_allclose(got["S"], factor * x["initial_state"], rtol=2e-6)
    assert not np.any(got["dv"]) and np.all(got["dbeta"] != 0)


@pytest.mark.parametrize("implementation", (*PARALLEL, "reference"))
@pytest.mark.parametrize("name", DELTA)
def test_a_full_write_replaces_the_old_value(name, implementation):
    """One unit key again and again at beta = 1: each token reads back its own value."""
    x = edges.edited(name, edges.identical_keys)
    x["q"] = x["k"]
    got, scale = family.run(name, x, implementation=implementation), x["k"].shape[-1] ** -0.5
    read = np.einsum("bgk,bgkv->bgv", np.repeat(x["k"][:, -1], 2, axis=1), got["S"])
    wide = x["v"].astype(np.float64)
    oracle.assert_close({"o": got["o"], "S": read}, {"o": scale * wide, "S": wide[:, -1]})


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_zero_keys_under_the_norm(dtype):
    """l2_normalize of a zero is zero and has a finite gradient: no NaN around an empty token."""
    x = RULES["gated_delta_rule"].draw(5, T=70)
    edges.zero_keys_and_queries(x)

    @tiny_models.quick_jit
    def gradients(x):
        def value(q, k):
            unit = (ops.l2_normalize(a.astype(dtype)) for a in (q, k))
            arrays = x | dict(zip("qk", unit, strict=True))
            return jnp.sum(family.call("gated_delta_rule", arrays)[0].astype(jnp.float32) ** 2)

        return jax.grad(value, (0, 1))(x["q"], x["k"])

    dq, dk = gradients(family.inputs_of("gated_delta_rule", x))
    assert np.all(np.isfinite(dq)) and np.all(np.isfinite(dk))
    # A zero key under a query that is not: its gradient is of the size 1 / sqrt(eps).
    assert np.abs(dk[:, 10:15]).max() > 10 * np.abs(dk[:, 20:]).max()

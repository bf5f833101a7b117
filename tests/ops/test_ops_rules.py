"""Recurrent rules: values and all gradients against the token-by-token float64 oracle."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ops_oracle as oracle
import tiny_models
from fastweights import ops

RULES = {
    "gated_delta_rule": (ops.gated_delta_rule, ("q", "k", "v", "g", "beta")),
    "kimi_delta_rule": (ops.kimi_delta_rule, ("q", "k", "v", "g", "beta")),
    "delta_rule": (ops.delta_rule, ("q", "k", "v", "beta")),
    "gated_linear_attention": (ops.gated_linear_attention, ("q", "k", "v", "g")),
    "linear_attention": (ops.linear_attention, ("q", "k", "v")),
}
# The two within-chunk algorithms, with all their inputs.
GATED = ("gated_delta_rule", "kimi_delta_rule")
LENGTHS = (1, 15, 63, 64, 65, 200)
CASES = pathlib.Path(__file__).parent / "data" / "gdn_op_reference.npz"


@functools.partial(tiny_models.quick_jit, static_argnames=("rule", "implementation", "chunk_size"))
def run(x, segment_ids=None, *, rule, implementation="chunked", chunk_size=64):
    """Output, final state and the gradients of everything for the cotangents do and dS."""
    function, names = RULES[rule]

    def call(arrays):
        return function(
            *(arrays[name] for name in names),
            initial_state=arrays["initial_state"],
            segment_ids=segment_ids,
            implementation=implementation,
            chunk_size=chunk_size,
        )

    arrays = {name: x[name] for name in (*names, "initial_state")}
    (o, S), vjp = jax.vjp(call, arrays)
    (gradients,) = vjp((x["do"].astype(o.dtype), x["dS"].astype(S.dtype)))
    return {"o": o, "S": S, **{f"d{name}": a for name, a in gradients.items()}}


def make_inputs(rule, seed, **options):
    x = oracle.random_inputs(seed, channels=rule == "kimi_delta_rule", **options)
    names = (*RULES[rule][1], "initial_state", "do", "dS")
    return {name: x[name] for name in names}


def check(x, rule="gated_delta_rule", tolerance=1e-5, **options):
    oracle.assert_close(run(x, rule=rule, **options), oracle.recurrence(x), tolerance)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_chunked_at_every_length(rule, length):
    check(make_inputs(rule, length, T=length), rule)


@pytest.mark.parametrize("length", (1, 65, 200))
@pytest.mark.parametrize("rule", RULES)
def test_associative_scan(rule, length):
    check(make_inputs(rule, length, T=length), rule, implementation="scan")


@pytest.mark.parametrize("length", (1, 65))
@pytest.mark.parametrize("rule", RULES)
def test_reference(rule, length):
    check(make_inputs(rule, length, T=length), rule, implementation="reference")


def strong_decay(x):
    x["g"] = np.random.default_rng(1).uniform(-100, -20, x["g"].shape)


def strong_and_mild_decay(x):
    strong = np.random.default_rng(1).uniform(size=x["g"].shape) < 0.5
    x["g"] = np.where(strong, -45.0, x["g"])


def one_huge_decay(x):
    x["g"][:, 70] = -1e6


def no_decay(x):
    x["g"] = np.zeros_like(x["g"])


def identical_keys(x):
    x["k"][:] = x["k"][:, :1]
    x["g"] = np.zeros_like(x["g"])
    x["beta"] = np.ones_like(x["beta"])


def identical_keys_overwritten(x):
    identical_keys(x)
    x["beta"] = 1.5 * x["beta"]


def orthogonal_reflections(x):
    x["g"] = np.zeros_like(x["g"])
    x["beta"] = np.full_like(x["beta"], 2.0)


def near_identical_keys(x):
    keys = x["k"][:, :1] + 0.05 * x["k"]
    x["k"] = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    x["beta"] = np.full_like(x["beta"], 0.95)


def no_write(x):
    x["beta"] = np.zeros_like(x["beta"])


def zero_keys_and_queries(x):
    x["k"][:, 10:20] = 0
    x["q"][:, 15:90] = 0


EDGES = (
    strong_decay,
    strong_and_mild_decay,
    one_huge_decay,
    no_decay,
    identical_keys,
    identical_keys_overwritten,
    orthogonal_reflections,
    near_identical_keys,
    no_write,
    zero_keys_and_queries,
)


@pytest.mark.parametrize("implementation", ("chunked", "scan"))
@pytest.mark.parametrize("rule", GATED)
@pytest.mark.parametrize("edge", EDGES, ids=lambda f: f.__name__)
def test_edge(edge, rule, implementation):
    x = make_inputs(rule, 3)
    edge(x)
    x = {name: a.astype(np.float32) for name, a in x.items()}
    check(x, rule, implementation=implementation)


@pytest.mark.parametrize(("beta", "tolerance"), ((1.9, 5e-5), (2.0, 2e-4)))
@pytest.mark.parametrize("implementation", ("chunked", "scan"))
@pytest.mark.parametrize("rule", GATED)
def test_identical_keys_reflected(rule, implementation, beta, tolerance):
    """Towards beta = 2 one key's memory flips at every token and hardly fades.

    An explicit float32 inverse, entries up to 2, can do no better: rounding each of its 64 x 64
    entries moves a value by about 1e-5, and the state keeps all of it.
    """
    x = make_inputs(rule, 3)
    identical_keys(x)
    x["beta"] = beta * x["beta"]
    check(x, rule, tolerance=tolerance, implementation=implementation)


@pytest.mark.parametrize("rule", GATED)
def test_huge_decay_has_exactly_no_gradient(rule):
    x = make_inputs(rule, 3)
    one_huge_decay(x)
    assert np.all(run(x, rule=rule)["dg"][:, 70] == 0)


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

    @jax.jit
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


@pytest.mark.parametrize(
    ("rule", "value_heads"),
    [("gated_delta_rule", heads) for heads in (1, 3, 4)] + [("kimi_delta_rule", 3)],
)
def test_value_heads_per_key_head(rule, value_heads):
    """Ratio 2 with two key heads is what all other tests run."""
    check(make_inputs(rule, 5, T=70, B=1, H=1, G=value_heads, K=3, V=4), rule)


@pytest.mark.parametrize(
    ("rule", "chunk_size"),
    [("gated_delta_rule", size) for size in (16, 32, 128, 256)]
    + [("kimi_delta_rule", size) for size in (16, 256)],
)
def test_chunk_size_changes_nothing(rule, chunk_size):
    check(make_inputs(rule, 7), rule, chunk_size=chunk_size)


# Chunks of 16 make several groups of chunks of these rows, chunks of 64 a single one.
FORMS = {
    "chunked": {"implementation": "chunked"},
    "chunked_in_groups": {"implementation": "chunked", "chunk_size": 16},
    "scan": {"implementation": "scan"},
    "reference": {"implementation": "reference"},
}
# Documents of a row of 200 tokens.
LAYOUTS = {
    "first_token": (1, 199),
    "last_token": (199, 1),
    "mid_chunk": (30, 70, 100),
    "chunk_edges": (64, 64, 72),
    "around_an_edge": (63, 2, 135),
    "length_one_in_a_row": (40, 1, 1, 1, 1, 156),
    "across_whole_chunks": (10, 180, 10),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", GATED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_equal_separate_runs(layout, rule, form):
    # Slow decay, or a leak from one document into the next would drown in rounding.
    x = make_inputs(rule, 11, g_mean=-1e-3)
    ids = np.repeat(np.arange(len(LAYOUTS[layout])) % 2 + 1, LAYOUTS[layout])
    segment_ids = np.broadcast_to(ids, (2, 200)).astype(np.int32)
    got = run(x, segment_ids, rule=rule, **FORMS[form])
    oracle.assert_close(got, oracle.packed(x, LAYOUTS[layout]))


@pytest.mark.parametrize("rule", RULES)
def test_packed_documents_in_every_rule(rule):
    x = make_inputs(rule, 12, g_mean=-1e-3)
    lengths = (40, 1, 90, 69)
    segment_ids = np.broadcast_to(np.repeat((7, 2, 7, 9), lengths), (2, 200)).astype(np.int32)
    oracle.assert_close(run(x, segment_ids, rule=rule), oracle.packed(x, lengths))


@pytest.mark.parametrize("rule", GATED)
def test_gate_at_a_document_start_has_exactly_no_gradient(rule):
    x = make_inputs(rule, 11)
    segment_ids = np.broadcast_to(np.repeat((1, 2, 3), (30, 34, 136)), (2, 200)).astype(np.int32)
    dg = run(x, segment_ids, rule=rule)["dg"]
    assert np.all(dg[:, [30, 64]] == 0)
    assert np.all(dg[:, 0] != 0)


# True at padding, for rows of 200 tokens.
PADDINGS = {
    "left": np.arange(200) < 70,
    "right": np.arange(200) >= 130,
    "interior": (np.arange(200) % 7 == 3) | ((np.arange(200) > 60) & (np.arange(200) < 135)),
    "all_but_one": np.arange(200) != 64,
}


def put(compact, padded_BT, fill):
    """Spreads arrays over real tokens onto rows with padding."""
    full = np.full((compact.shape[0], padded_BT.shape[0], *compact.shape[2:]), fill, np.float32)
    full[:, ~padded_BT] = compact
    return full


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", GATED)
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_with_nan_changes_nothing(padding, rule, form):
    padded_T = PADDINGS[padding]
    real = int(np.sum(~padded_T))
    lengths = (real,) if real == 1 else (real // 3, real - real // 3)
    x = make_inputs(rule, 13, T=real, g_mean=-1e-2)
    ids = np.where(padded_T, 0, 1)
    ids[~padded_T] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    segment_ids = np.broadcast_to(ids, (2, 200)).astype(np.int32)
    states = ("initial_state", "dS")
    full = {n: a if n in states else put(a, padded_T, np.nan) for n, a in x.items()}
    got = run(full, segment_ids, rule=rule, **FORMS[form])
    want = oracle.packed(x, lengths)
    want = {n: a if n in ("S", "dinitial_state") else put(a, padded_T, 0) for n, a in want.items()}
    oracle.assert_close(got, {name: a.astype(np.float64) for name, a in want.items()})
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert np.all(np.asarray(got[name])[:, padded_T] == 0), name


@pytest.mark.parametrize("rule", GATED)
def test_rows_of_padding_alone_pass_the_state_through(rule):
    x = make_inputs(rule, 14)
    got = run(x, np.zeros((2, 200), np.int32), rule=rule)
    assert np.array_equal(got["S"], x["initial_state"])
    assert np.array_equal(got["dinitial_state"], x["dS"])
    assert not np.any(got["o"])


@pytest.mark.parametrize("implementation", ("chunked", "scan", "reference"))
def test_without_decay_channels_are_the_delta_rule(implementation):
    x = make_inputs("kimi_delta_rule", 16)
    no_decay(x)
    got = run(x, rule="kimi_delta_rule", implementation=implementation)
    del x["g"]
    want = oracle.recurrence(x)
    oracle.assert_close({name: got[name] for name in want}, want)


@pytest.mark.parametrize("implementation", ("chunked", "scan", "reference"))
def test_equal_channels_are_the_gated_delta_rule(implementation):
    x = make_inputs("gated_delta_rule", 17)
    want = oracle.recurrence(x)
    x["g"] = np.broadcast_to(x["g"][..., None], (*x["g"].shape, 5))
    got = run(x, rule="kimi_delta_rule", implementation=implementation)
    got["dg"] = np.sum(got["dg"], axis=-1)
    oracle.assert_close(got, want)


@pytest.mark.parametrize("implementation", ("chunked", "scan", "reference"))
@pytest.mark.parametrize("rule", GATED)
def test_without_writes_the_state_only_decays(rule, implementation):
    x = make_inputs(rule, 18, g_mean=-0.01)
    no_write(x)
    got = run(x, rule=rule, implementation=implementation)
    total = np.sum(x["g"].astype(np.float64), axis=1)
    factor = np.exp(total if rule == "kimi_delta_rule" else total[..., None])[..., None]
    np.testing.assert_allclose(got["S"], factor * x["initial_state"], rtol=2e-6)
    assert not np.any(got["dv"]) and np.all(got["dbeta"] != 0)


@pytest.mark.parametrize("implementation", ("chunked", "reference"))
def test_normalised_linear_attention(implementation):
    x = make_inputs("linear_attention", 15, T=130)
    x["q"], x["k"] = np.abs(x["q"]), np.abs(x["k"])
    z = np.abs(x["initial_state"][..., 0])
    dz = x["dS"][..., 1]
    eps = 1e-3

    @jax.jit
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

    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(x["q"], x["k"], x["v"])
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(a)) and not np.any(a[:, :5]) for a in gradients)

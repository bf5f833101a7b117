"""Bad input to any op: one sentence that names op, argument, what was seen and what was expected.

Shapes, dtypes and options are refused while tracing (all cases run under `eval_shape`); values
where they are known, or under `checkify`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import tiny_models
from fastweights import ops
from fastweights.errors import UserError

HEADS = dict(q=(2, 20, 2, 5), k=(2, 20, 2, 5), v=(2, 20, 4, 7))
GATES = dict(g=(2, 20, 4), beta=(2, 20, 4))
INT, COMPLEX = jnp.int32, jnp.complex64
# Good arguments in their order: shapes, of float32 unless a dtype stands beside.
ARGUMENTS = {
    "gated_delta_rule": HEADS | GATES,
    "kimi_delta_rule": HEADS | GATES | dict(g=(2, 20, 4, 5)),
    "delta_rule": HEADS | dict(beta=GATES["beta"]),
    "gated_linear_attention": HEADS | dict(g=GATES["g"]),
    "linear_attention": HEADS,
    "selective_scan": dict(x=(2, 20, 6), dt=(2, 20, 6), A=(6, 4), B=(2, 20, 4), C=(2, 20, 4)),
    "state_space": dict(x=(2, 20, 4), dt=(4,)) | {n: ((4, 3), COMPLEX) for n in "ABC"},
    "softmax_attention": dict(q=(2, 20, 6, 5), k=(2, 20, 2, 5), v=(2, 20, 2, 7)),
    "short_convolution": dict(x=(2, 20, 3), w=(4, 3)),
    "rotary": dict(x=(2, 20, 2, 10), positions=((2, 20), INT)),
}
STATES = {
    "gated_delta_rule": (2, 4, 5, 7),
    "kimi_delta_rule": (2, 4, 5, 7),
    "delta_rule": (2, 4, 5, 7),
    "gated_linear_attention": (2, 4, 5, 7),
    "linear_attention": (2, 4, 5, 7),
    "selective_scan": (2, 6, 4),
    "state_space": (2, 4, 6),
}
PACKABLE = (*STATES, "softmax_attention", "short_convolution")


def array(spec):
    shape, dtype = spec if isinstance(spec[-1], type(INT)) else (spec, jnp.float32)
    return jax.ShapeDtypeStruct(shape, dtype)


def call(name, **changes):
    """Traces an op: a spec instead of an argument or as a further one, or an option's value."""
    arguments = dict(ARGUMENTS[name])
    options = {}
    for label, value in changes.items():
        if label in arguments:
            arguments[label] = value
        else:
            options[label] = value
    arrays = {n: array(v) for n, v in options.items() if isinstance(v, tuple)}
    rest = {n: v for n, v in options.items() if n not in arrays}
    return jax.eval_shape(
        lambda given, more: getattr(ops, name)(*given, **more, **rest),
        [array(spec) for spec in arguments.values()],
        arrays,
    )


BAD = [
    ("gated_delta_rule", dict(q=(2, 20, 5)), r"q must be .*\[B, T, heads, dim\].*\(2, 20, 5\)"),
    ("gated_delta_rule", dict(q=((2, 20, 2, 5), INT)), r"q must be .*floats of 16 .*int32"),
    ("gated_delta_rule", dict(v=((2, 20, 4, 7), jnp.float8_e5m2)), r"v must be .*16.*float8"),
    ("gated_delta_rule", dict(scale="x"), r"scale must be a number .* tracing, got 'x'"),
    ("gated_delta_rule", dict(segment_ids=[[1]]), r"segment_ids must be an array, got list"),
    ("gated_delta_rule", dict(k=(2, 20, 2, 6)), r"k must have .*\(2, 20, 2, 5\), got .*2, 6\)"),
    ("gated_delta_rule", dict(v=(2, 21, 4, 7)), r"v must be .*\(2, 20\).*got \(2, 21, 4, 7\)"),
    ("gated_delta_rule", dict(v=(2, 20, 3, 7)), r"3 value heads are no multiple of 2 query/key"),
    ("gated_delta_rule", dict(g=(2, 20, 2)), r"g must be .*\(2, 20, 4\), got .*\(2, 20, 2\)"),
    ("gated_delta_rule", dict(beta=(2, 20, 2)), r"beta must be .*\(2, 20, 4\), got .*\(2, 20, 2\)"),
    ("kimi_delta_rule", dict(g=(2, 20, 4)), r"g must be .*\[B, T, G, K\] = \(2, 20, 4, 5\), got"),
    (
        "linear_attention",
        dict(normalize=True, initial_state=(2, 4, 5, 7)),
        r"with normalize=True initial_state must be the pair \(S, z\)",
    ),
    ("gated_delta_rule", dict(q=(2, 20, 2, 0), k=(2, 20, 2, 0)), r"q must be .* with K >= 1, got"),
    (
        "gated_delta_rule",
        dict(initial_state=((2, 4, 5, 7), INT)),
        r"initial_state must be floating",
    ),
    ("selective_scan", dict(x=(20, 6)), r"x must be \[B, T, D\], got shape \(20, 6\)"),
    ("selective_scan", dict(dt=(2, 20, 5)), r"dt must be \[B, T, D\] = \(2, 20, 6\), got .*5\)"),
    ("selective_scan", dict(A=(5, 4)), r"A must be \[D, N\] with D = 6 .*\(5, 4\)"),
    ("selective_scan", dict(B=(2, 20, 3)), r"B must be \[B, T, N\] = \(2, 20, 4\), got .*3\)"),
    ("selective_scan", dict(B=((2, 20, 4), INT)), r"B must be floating-point, got int32"),
    ("selective_scan", dict(D=(5,)), r"D must be \[D\] = \(6,\), got \(5,\)"),
    ("state_space", dict(x=(20, 4)), r"x must be a floating-point array \[B, T, D\], got .*20, 4"),
    ("state_space", dict(dt=(3,)), r"dt must be .*\[D\] = \(4,\), got .*\(3,\)"),
    ("state_space", dict(dt=((4,), COMPLEX)), r"dt must be a floating-point array .*complex64"),
    ("state_space", dict(A=((3, 3), COMPLEX)), r"A must be \[D, P\] with D = 4 .*\(3, 3\)"),
    ("state_space", dict(B=((4, 2), COMPLEX)), r"B must be complex \[D, P\] = \(4, 3\), got"),
    ("state_space", dict(C=(4, 3)), r"C must be complex .*float32"),
    ("state_space", dict(discretization="euler"), r"unknown discretization 'euler'; choose .*zoh"),
    (
        "state_space",
        dict(P=((4, 3), COMPLEX)),
        r"low-rank part P goes with .*'bilinear', got 'zoh'",
    ),
    (
        "state_space",
        dict(implementation="convolution", segment_ids=((2, 20), INT)),
        r"convolution takes no initial_state and no segment_ids; use 'scan' or 'auto'",
    ),
    (
        "state_space",
        dict(implementation="convolution", initial_state=(2, 4, 6)),
        r"convolution takes no initial_state and no segment_ids; use 'scan' or 'auto'",
    ),
    ("softmax_attention", dict(q=(2, 20, 5)), r"q must be .*\(2, 20, 5\)"),
    ("softmax_attention", dict(k=(2, 20, 2, 4)), r"k must be .*K = 5 as in q, got \(2, 20, 2, 4\)"),
    ("softmax_attention", dict(v=(2, 20, 3, 7)), r"v must be .*\(2, 20, 2\) as in k, got"),
    (
        "softmax_attention",
        dict(k=(2, 20, 4, 5), v=(2, 20, 4, 7)),
        r"6 query heads are no multiple of 4 key heads",
    ),
    (
        "softmax_attention",
        dict(logit_cap=0.0),
        r"logit_cap must be positive .*, got 0.0 with 'auto'",
    ),
    (
        "softmax_attention",
        dict(logit_cap=2.0, implementation="cudnn"),
        r"logit_cap .* is not for implementation 'cudnn', got 2.0 with 'cudnn'",
    ),
    (
        "softmax_attention",
        dict(logit_cap=np.inf),
        r"logit_cap must be positive and finite.*got inf",
    ),
    ("softmax_attention", dict(window=0), r"window counts the current token.*at least 1, got 0"),
    ("softmax_attention", dict(window=1.5), r"window .* must be an integer of at least 1, got 1.5"),
    ("softmax_attention", dict(q=((2, 20, 6, 5), INT)), r"q must be a floating-point .*int32"),
    (
        "softmax_attention",
        dict(q=(2, 20, 6, 0), k=(2, 20, 2, 0)),
        r"q must be .* with K >= 1, got \(2, 20, 6, 0\)",
    ),
    ("softmax_attention", dict(q=(2, 3, 6, 5), segment_ids=((2, 3), INT)), r"need kv_segment_ids"),
    (
        "softmax_attention",
        dict(kv_segment_ids=(2, 20)),
        r"kv_segment_ids must be integers \[B, S\]",
    ),
    (
        "softmax_attention",
        dict(q_positions=((2, 3), INT)),
        r"q_positions must be integers of shape \(2, 20\), got",
    ),
    (
        "softmax_attention",
        dict(q_positions=(2, 20)),
        r"q_positions must be integers .* got .*float",
    ),
    ("short_convolution", dict(x=(2, 5)), r"x must be \[B, T, D\], got shape \(2, 5\)"),
    ("short_convolution", dict(w=(4, 2)), r"w must be \[W, D\] .*D = 3, got shape \(4, 2\)"),
    ("short_convolution", dict(cache=(2, 4, 3)), r"cache must be .*\(2, 3, 3\), got \(2, 4, 3\)"),
    ("short_convolution", dict(bias_D=(4,)), r"bias must be \[D\] = \(3,\), got \(4,\)"),
    ("short_convolution", dict(activation="gelu"), r"activation must be 'silu' or None, .*'gelu'"),
    ("rotary", dict(x=(2, 20, 10)), r"x must be \[B, T, H, K\], got shape \(2, 20, 10\)"),
    ("rotary", dict(positions=((2, 3), INT)), r"positions must be .*\(2, 20\), got \(2, 3\)"),
    ("rotary", dict(x=(2, 20, 3, 5), fraction=1.0), r"of head dim 5 gives 6 channels .*in pairs"),
    ("rotary", dict(fraction=0.0), r"fraction 0.0 of head dim 10 gives 0 channels .*at least 2"),
    ("rotary", dict(fraction=np.nan), r"fraction must be a finite number, got nan"),
    ("rotary", dict(theta=0.0), r"theta must be a positive finite number, got 0.0"),
    ("rotary", dict(fraction=1.25), r"fraction 1.25 of head dim 10 gives 12 channels .*at most"),
]
for _name, _state in STATES.items():
    BAD += [
        (_name, dict(chunk_size=48), r"chunk_size must be one of 16, 32, 64, 128, 256, got 48"),
        # Packed documents do not bring a state each, and a state's axes have an order.
        (
            _name,
            dict(initial_state=(5, *_state[1:])),
            rf"initial_state must .*\({_state[0]}, .*one state a row \(not a document\), got \(5, ",
        ),
        (
            _name,
            dict(initial_state=(_state[0], *_state[:0:-1])),
            rf"initial_state must have shape \({', '.join(map(str, _state))}\)",
        ),
    ]
for _name in PACKABLE:
    BAD += [
        (_name, dict(segment_ids=((2, 19), INT)), r"segment_ids must be .*\(2, 20\), got .*19\)"),
        (_name, dict(segment_ids=(2, 20)), r"segment_ids must be integers \[B, T\].* got float32"),
    ]
    if _name != "short_convolution":
        BAD += [(_name, dict(implementation="fast"), r"unknown implementation 'fast'; .*auto, .*")]


@pytest.mark.parametrize(("name", "changes", "sentence"), BAD)
def test_bad_input_is_named_while_tracing(name, changes, sentence):
    call(name)
    with pytest.raises(UserError, match=f"^{name}: .*{sentence}"):
        call(name, **changes)


def test_a_state_pair_belongs_to_the_normaliser():
    q, k, v, S = (jnp.zeros(shape) for shape in (*HEADS.values(), STATES["linear_attention"]))
    with pytest.raises(UserError, match=r"^linear_attention: .* a pair, which only normalize=True"):
        ops.linear_attention(q, k, v, initial_state=(S, S[..., 0]))


def test_a_gate_that_is_no_array_is_named():
    q, k, v = (jnp.zeros(shape) for shape in HEADS.values())
    beta: Any = 0.5
    with pytest.raises(UserError, match=r"^delta_rule: beta must be an array, got float"):
        ops.delta_rule(q, k, v, beta)


def test_a_state_that_is_no_array_is_named():
    q, k, v, S = (jnp.zeros(shape) for shape in (*HEADS.values(), STATES["linear_attention"]))
    with pytest.raises(UserError, match=r"^delta_rule: initial_state .*\(2, 4, 5, 7\).*got list"):
        ops.delta_rule(q, k, v, v[..., 0], initial_state=[S])
    with pytest.raises(UserError, match=r"^linear_attention: initial_state\[1\] is None"):
        ops.linear_attention(q, k, v, normalize=True, initial_state=(S, None))


@pytest.mark.parametrize(
    ("name", "label"), [(n, label) for n in STATES for label in ARGUMENTS[n] if label in GATES]
)
def test_a_rule_without_its_gate_is_refused(name, label):
    """Without it the recurrence would silently be another rule's."""
    arguments = [None if n == label else array(spec) for n, spec in ARGUMENTS[name].items()]
    with pytest.raises(UserError, match=f"^{name}: {label} is None; give an array"):
        jax.eval_shape(getattr(ops, name), *arguments)


@pytest.mark.parametrize(
    ("name", "nu", "sentence"),
    (
        ("cosine", 1, "^feature_map is 'cosine'; choose one of identity, elu1"),
        ("dpfp", 0, "^feature_map 'dpfp' has nu = 0; give an integer of at least 1"),
        ("dpfp", 1.5, "^feature_map 'dpfp' has nu = 1.5; give an integer of at least 1"),
    ),
)
def test_bad_feature_maps_are_named(name, nu, sentence):
    with pytest.raises(UserError, match=sentence):
        ops.feature_map(name, nu=nu)


def numbers(name, **changes):
    """Good arguments of an op: steps and strengths positive, rates and log decays negative."""
    values = {"dt": 0.1, "beta": 0.5, "g": -0.1, "A": -1.0} | changes
    return [
        jnp.full(array(spec).shape, values.get(label, 1.0), array(spec).dtype)
        for label, spec in ARGUMENTS[name].items()
    ]


@pytest.mark.parametrize("kind", (np.asarray, jnp.asarray))
@pytest.mark.parametrize("name", PACKABLE)
def test_negative_segment_ids_are_named_where_they_are_known(name, kind):
    ids = np.ones((2, 20), np.int32)
    ids[1, 3] = -2
    arrays, ids = numbers(name), kind(ids)
    with pytest.raises(UserError, match=f"^{name}: segment_ids must not be negative .*, got -2"):
        # Known while tracing too: only the arrays are traced.
        jax.eval_shape(lambda *a: getattr(ops, name)(*a, segment_ids=ids), *arrays)


VALUES = [
    ("gated_delta_rule", dict(beta=2.5), r"beta must lie in \[0, 2\], got values from 2.5 to 2.5"),
    ("kimi_delta_rule", dict(beta=-0.5), r"beta must lie in \[0, 2\], got values from -0.5"),
    ("delta_rule", dict(beta=np.nan), r"beta must lie in \[0, 2\], got values from nan"),
    ("gated_delta_rule", dict(g=0.5), r"g is a log decay and must not be positive, got .*to 0.5"),
    ("kimi_delta_rule", dict(g=0.5), r"g is a log decay and must not be positive, got .*to 0.5"),
    ("gated_linear_attention", dict(g=0.5), r"g is a log decay and must not be positive"),
    ("selective_scan", dict(dt=-0.5), r"dt must not be negative, got values from -0.5"),
    ("selective_scan", dict(A=0.5), r"A must not be positive, got values from 0.5"),
    ("state_space", dict(dt=-0.5), r"dt must not be negative, got values from -0.5"),
    ("state_space", dict(A=0.5), r"A's real part must not be positive, got values from 0.5"),
    ("gated_delta_rule", dict(ids=-3), r"segment_ids must not be negative .*, got values from -3"),
    ("short_convolution", dict(ids=-3), r"segment_ids must not be negative .*values from -3"),
]


@pytest.mark.parametrize(("name", "changes", "sentence"), VALUES)
def test_values_out_of_range_are_named_under_checkify(name, changes, sentence):
    """Jitted, and at real tokens only; without checkify nothing is raised."""

    def run(arrays, ids):
        return jax.tree.map(jnp.sum, getattr(ops, name)(*arrays, segment_ids=ids))

    good, bad = numbers(name), numbers(name, **{n: x for n, x in changes.items() if n != "ids"})
    ids = jnp.ones((2, 20), jnp.int32)
    wrong = ids.at[0, 2].set(changes.get("ids", 1))
    checked = tiny_models.quick_jit(checkify.checkify(run))
    checked(good, ids)[0].throw()
    tiny_models.quick_jit(run)(bad, wrong)
    with pytest.raises(checkify.JaxRuntimeError, match=f"^{name}: {sentence}"):
        checked(bad, wrong)[0].throw()
    per_token = {"beta", "g"} | ({"dt"} if name == "selective_scan" else set())
    if changes.keys() & per_token:
        checked(bad, jnp.zeros_like(ids))[0].throw()

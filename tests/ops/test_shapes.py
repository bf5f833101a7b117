"""Head groups, head dims, dtypes, sizes and chunks of every rule, against float64.

Cases 13 to 17 of the list in `test_edge_cases.py`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ops_family as family
import ops_oracle as oracle
from ops_family import EACH, FORMS, MATRIX, RULES

RATIOS = [("gated_delta_rule", heads) for heads in (1, 3, 4, 8)]
RATIOS += [(name, 3) for name in MATRIX if name != "gated_delta_rule"]


@pytest.mark.parametrize(("name", "value_heads"), RATIOS)
def test_value_heads_per_key_head(name, value_heads):
    """Ratio 2 with two key heads is what all other tests run."""
    sizes = dict(T=70, B=1, H=1, G=value_heads, K=3, V=4)
    family.check(name, RULES[name].draw(5, **sizes), implementation="chunked")


@pytest.mark.parametrize("name", family.GATED)
def test_groups_are_summed_before_rounding(name):
    """Eight value heads add to one key's gradient; in bfloat16 steps the sum would be worse."""
    x, wide = family.narrowed(name, RULES[name].draw(6, T=40, H=1, G=8))
    got, want = family.run(name, x, implementation="chunked"), family.recurrence(name, wide)
    for n in ("dq", "dk"):
        # One rounding: half a unit in the last of 8 bits at worst, 0.29 units in the mean.
        oracle.assert_close({n: np.asarray(got[n], np.float32)}, {n: want[n]}, 2e-3)


DIMS = {
    "gated_delta_rule": dict(H=1, G=2, K=60, V=96),
    "kimi_delta_rule": dict(H=1, G=2, K=100, V=192),
    "delta_rule": dict(H=1, G=2, K=256, V=60),
    "gated_linear_attention": dict(H=1, G=2, K=96, V=256),
    "selective_scan": dict(D=60, N=100),
    "state_space": dict(D=12, N=60),
}


@pytest.mark.parametrize("name", DIMS)
def test_head_dims(name):
    x = RULES[name].draw(7, B=1, T=40, **DIMS[name])
    family.check(name, x, **next(iter(RULES[name].forms.values())))


# Delta rule and linear attention are parts of the gated ones.
IN_BFLOAT16 = [
    (name, form)
    for name, form in FORMS
    if form == "chunked" or (form != "chunked_in_groups" and name not in MATRIX[:2])
]


@pytest.mark.parametrize(("name", "form"), IN_BFLOAT16)
def test_bfloat16(name, form):
    """Rounded inputs, float32 inside: as good as the output's own rounding."""
    rule = RULES[name]
    x, wide = family.narrowed(name, rule.draw(3, T=130))
    got, want = family.run(name, x, **rule.forms[form]), family.recurrence(name, wide)
    narrow = {"o", *(f"d{n}" for n in rule.sixteen_bit if n != "do")}
    assert all((a.dtype == jnp.bfloat16) == (n in narrow) for n, a in got.items())
    oracle.assert_close(got, want, 1e-2)
    for n in set(got) - narrow:
        a, b = np.ravel(got[n]), np.ravel(want[n])
        assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999, n
    # Never rounded to 16 bits on the way: far better than bfloat16 could be.
    oracle.assert_close(
        {n: got[n] for n in set(got) - narrow}, {n: want[n] for n in set(want) - narrow}
    )


@pytest.mark.parametrize("name", EACH[2:])
def test_float64_stays_float64(name):
    with jax.enable_x64(True):
        x = {
            n: a.astype(np.promote_types(a.dtype, np.float64))
            for n, a in RULES[name].draw(2, T=40).items()
        }
        got = family.run(name, x, **next(iter(RULES[name].forms.values())))
        assert all(a.dtype == np.float64 for a in got.values())
        oracle.assert_close(got, family.recurrence(name, x), 1e-12)


@pytest.mark.parametrize("name", EACH)
def test_no_index_spans_a_whole_array(name):
    """Far more than 2^31 numbers and 2^16 states: shapes come out, and no index is flat.

    Arrays of integers have one for each token or so, never one for each element of an input.
    """
    small = RULES[name].draw(1, B=1, T=2)
    B, T = 2**17, 2**15

    def huge(n, a):
        if n in RULES[name].tokens or n == "initial_state":
            a = a[:, :1] if n in RULES[name].tokens else a
            shape = (B, T, *a.shape[2:]) if n in RULES[name].tokens else (B, *a.shape[1:])
        else:
            shape = a.shape
        return jax.ShapeDtypeStruct(shape, a.dtype)

    x = {n: huge(n, a) for n, a in family.inputs_of(name, small).items()}
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    run = functools.partial(family.call, name)
    o, S = jax.eval_shape(run, x, ids)
    assert o.size > 2**31 and S.shape[0] * S.shape[1] > 2**16

    def total(x, ids):
        return sum(jnp.sum(a) for a in run(x, ids))

    program = str(jax.make_jaxpr(jax.grad(total))(x, ids))
    integers = re.findall(r"[iu]\d+\[([\d,]+)\]", program)
    assert max(np.prod([int(n) for n in shape.split(",")]) for shape in integers) < 2 * B * T


SIZES = [("gated_delta_rule", size) for size in (16, 32, 128, 256)]
SIZES += [(name, 16) for name in EACH if name != "gated_delta_rule"]
SIZES += [("kimi_delta_rule", 128), ("selective_scan", 256), ("state_space_zoh", 128)]


@pytest.mark.parametrize(("name", "chunk_size"), SIZES)
def test_chunk_size_changes_nothing(name, chunk_size):
    implementation = "scan" if RULES[name].letter == "S" else "chunked"
    x = RULES[name].draw(7)
    family.check(name, x, implementation=implementation, chunk_size=chunk_size)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_batch_without_rows_is_none_out(name, form):
    """Values and gradients alike: their shapes follow, with documents and without."""
    x = RULES[name].draw(9, B=1, T=20)
    by_row = (*RULES[name].tokens, "initial_state", "dS")
    x = {n: a[:0] if n in by_row else a for n, a in x.items()}
    for ids in (None, np.zeros((0, 20), np.int32)):
        out = family.run(name, x, ids, **RULES[name].forms[form])
        assert out["o"].shape == x["do"].shape and out["S"].shape == x["dS"].shape
        assert all(np.all(a == 0) for a in out.values())

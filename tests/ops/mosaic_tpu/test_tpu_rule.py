"""The recurrent rules through the TPU kernels, held to the float64 recurrence.

Through the public rules, on the edges of `ops_edges.py`; `tests/aot` has the kernels compiled for
TPUs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ops_edges as edges
import ops_family as family
import ops_oracle as oracle
from fastweights.ops.mosaic_tpu import rule
from ops_family import MATRIX, RULES

pytestmark = pytest.mark.usefixtures("on_tpu")
RULE = "gated_delta_rule"
# One size for all edges, so that each kind of inputs is compiled once; two heads read one key.
SIZES = dict(B=1, T=130, H=1, G=2)
EDGES = pytest.mark.parametrize("edge", edges.GATES + edges.WRITES, ids=lambda f: f.__name__)


@EDGES
def test_edges(edge):
    family.check(RULE, edges.edited(RULE, edge, **SIZES), implementation="pallas")


def check_in_bfloat16(x):
    """Only results that are bfloat16 themselves show it."""
    x, wide = family.narrowed(RULE, x)
    got, want = family.run(RULE, x, implementation="pallas"), family.recurrence(RULE, wide)
    rounded = {name for name in got if got[name].dtype == jnp.bfloat16}
    assert rounded == {"o", "dq", "dk", "dv"}
    for names, tolerance in ((rounded, 4e-3), (set(got) - rounded, 1e-3)):
        oracle.assert_close({n: got[n] for n in names}, {n: want[n] for n in names}, tolerance)


@EDGES
def test_edges_in_bfloat16(edge):
    """Identical keys among them."""
    check_in_bfloat16(edges.edited(RULE, edge, **SIZES))


def test_bfloat16_gradients_of_a_key_head_in_five_steps():
    """They leave the kernel in float32, a part from each step, and are rounded as a sum."""
    check_in_bfloat16(RULES[RULE].draw(1, B=1, T=20, H=1, G=5, K=130, V=140))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("delta_rule", dict(T=65)),
        ("gated_linear_attention", dict(T=65)),
        ("linear_attention", dict(T=65)),
        (RULE, dict(T=15)),
        (RULE, dict(T=64)),
        (RULE, dict(B=2, T=300)),  # two steps
        (RULE, dict(T=20, H=2, G=4)),
        (RULE, dict(T=20, G=9)),  # a key head's value heads in three steps
        (RULE, dict(T=20, K=130, V=140)),
    ],
    ids=str,
)
def test_shapes(name, sizes):
    x = RULES[name].draw(1, **(dict(B=1, H=1, G=1) | sizes))
    family.check(name, x, implementation="pallas")


@pytest.mark.parametrize("name", [n for n in MATRIX if n != "kimi_delta_rule"])
def test_packed_documents_equal_documents_apart(name):
    """Boundaries at a chunk's first, last and middle token, and documents of one token."""
    lengths = [30, 1, 32, 1, 64, 72]
    x = RULES[name].draw(2, B=1, T=200, H=1, G=1)
    segment_ids = jnp.asarray(np.repeat(np.arange(1, 7), lengths)[None])
    got = family.run(name, x, segment_ids, implementation="pallas")
    oracle.assert_close(got, family.packed(name, x, lengths))
    if "dg" in got:
        assert not np.any(got["dg"][:, np.cumsum(lengths)[:-1]])


def test_padding_with_nan_changes_nothing():
    x = RULES[RULE].draw(3, B=1, T=200, H=1, G=1)
    real = np.ones(200, bool)
    real[[*range(5), *range(60, 70), *range(190, 200)]] = False
    want = family.recurrence(
        RULE, {n: a[:, real] if n in RULES[RULE].tokens else a for n, a in x.items()}
    )
    for name in RULES[RULE].tokens:
        x[name][:, ~real] = np.nan
    segment_ids = jnp.asarray(real[None].astype(np.int32))
    got = family.run(RULE, x, segment_ids, implementation="pallas")
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not np.any(got[name][:, ~real]), name
        got[name] = got[name][:, real]
    oracle.assert_close(got, want)


@pytest.mark.parametrize("options", [dict(), dict(chunk_size=128)], ids=str)
def test_memory_is_written_before_it_is_read_and_never_raced_for(options, races_found):
    """On two simulated cores, of which memory begins as NaN; both sizes of chunks."""
    x = RULES[RULE].draw(4, B=2, T=200, H=1, G=1)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    document = jnp.asarray(np.repeat([0, 1], 100)[None].repeat(2, 0), jnp.int32)
    simulator = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
    )

    @jax.jit
    def run(*inputs):
        call = functools.partial(core, scale=5**-0.5, chunks=1, interpret=simulator, **options)
        (o, S), pull = jax.vjp(lambda *a: call(*a, document), *inputs)
        return o, S, *pull((jnp.asarray(x["do"]), jnp.asarray(x["dS"])))

    core = rule.core.__wrapped__
    got = run(*(jnp.asarray(x[n]) for n in names))
    got = dict(zip(("o", "S", *(f"d{n}" for n in names)), got, strict=True))
    oracle.assert_close(got, oracle.packed(x, [100, 100]))
    assert not races_found()

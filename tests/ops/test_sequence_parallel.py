"""Ops cut over tokens: equal to one device, forward and gradients.

Rows of 24 tokens on 8 devices, so 3 tokens a slice, with boundaries of documents at slice edges and
inside slices, padding at both, and a whole slice of padding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import ops_oracle as oracle
from fastweights import ops, sharding
from fastweights.errors import UserError
from fastweights.ops import sequence_parallel

TOKENS, DEVICES = 24, 8
# Slices of 3: an edge between documents 1 and 2; document 3 inside a slice; padding for a whole
# slice inside document 3, and before document 3's id returns as another document behind 4.
IDS = np.array(
    [
        [1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0, 0, 3, 3, 3, 4, 4, 0, 3, 3, 3, 3, 3, 3],
        [0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 0, 0, 0, 7, 7, 0],
    ]
)
RULES = {
    "delta": (ops.delta_rule, ("beta",)),
    "gated_delta": (ops.gated_delta_rule, ("g", "beta")),
    "kimi_delta": (ops.kimi_delta_rule, ("g", "beta")),
    "gated": (ops.gated_linear_attention, ("g",)),
    "linear": (ops.linear_attention, ()),
}


def cut(call, specs, out_specs):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("sequence",))
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out_specs)


def value_and_pull(call, args, cotangents):
    @jax.jit
    def both(args, cotangents):
        out, pull = jax.vjp(call, *args)
        return out, pull(cotangents)

    return both(args, cotangents)


def assert_same(got, want):
    # Complex numbers as pairs of real ones.
    parts = functools.partial(jax.tree.map, lambda x: (x.real, x.imag) if np.iscomplexobj(x) else x)
    got, want = (dict(enumerate(jax.tree.leaves(parts(tree)))) for tree in (got, want))
    # Nothing here vanishes: zeros on both sides would agree too.
    assert all(np.max(np.abs(x)) > 0.01 for x in want.values())
    oracle.assert_close(got, want)


TOKEN, WHOLE = PartitionSpec(None, "sequence"), PartitionSpec()


@pytest.mark.parametrize(
    ("name", "ids"),
    # Without documents, the two kinds of exchange are enough.
    [*[(name, IDS) for name in RULES], ("gated_delta", None), ("gated", None)],
)
def test_rules_equal_one_device(name, ids):
    rule, gates = RULES[name]
    x = oracle.random_inputs(T=TOKENS, H=1, G=2, K=3, V=4, channels=name == "kimi_delta")
    tokens = [x[key] for key in ("q", "k", "v", *gates)]

    def sliced(state, ids, *tokens):
        return sequence_parallel.run_rule(
            rule, *tokens, axis="sequence", initial_state=state, segment_ids=ids
        )

    specs = (WHOLE, None if ids is None else TOKEN, *[TOKEN] * len(tokens))
    parallel = cut(sliced, specs, (TOKEN, WHOLE))

    def one_device(state, *tokens):
        return rule(*tokens, initial_state=state, segment_ids=ids, implementation="reference")

    args, cotangents = (x["initial_state"], *tokens), (x["do"], x["dS"])
    got = value_and_pull(lambda state, *t: parallel(state, ids, *t), args, cotangents)
    assert_same(got, value_and_pull(one_device, args, cotangents))


@pytest.mark.parametrize("ids", [IDS, None], ids=["packed", "one_document"])
@pytest.mark.parametrize("taps", [3, 9])
def test_convolutions_equal_one_device(taps, ids):
    """With 9 taps, a slice of 3 tokens hears from the three before it."""
    rng = np.random.default_rng(0)
    x, dy, w, bias = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, TOKENS, 4), (2, TOKENS, 4), (taps, 4), (4,))
    )

    def sliced(ids, x, w, bias):
        return sequence_parallel.convolve(
            x, w, bias, axis="sequence", segment_ids=ids, unit_heads=2
        )

    specs = (None if ids is None else TOKEN, TOKEN, WHOLE, WHOLE)
    got = value_and_pull(functools.partial(cut(sliced, specs, TOKEN), ids), (x, w, bias), dy)
    want = value_and_pull(
        lambda *args: ops.short_convolution(*args, segment_ids=ids, unit_heads=2)[0],
        (x, w, bias),
        dy,
    )
    assert_same(got, want)


def normals(**shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def state_space(low_rank: bool):
    """Arguments of `state_space` as `S4` makes them, with steps at which states live for a row."""
    x = normals(x=(2, TOKENS, 3), C=(2, 3, 2), B=(2, 3, 2), P=(2, 3, 2), D=(3,), h=(2, 3, 4))
    A = np.broadcast_to(-0.5 + 1j * np.pi * np.arange(2), (3, 2)).astype(np.complex64)
    complexes = [A, *(x[name][0] + 1j * x[name][1] for name in ("B", "C"))]
    rest = {"D": x["D"], "initial_state": x["h"]}
    rest |= {"P": x["P"][0] + 1j * x["P"][1]} if low_rank else {}
    return (x["x"], np.array([0.02, 0.1, 0.3], np.float32), *complexes), rest


def selective_scan():
    x = normals(x=(2, TOKENS, 3), B=(2, TOKENS, 2), C=(2, TOKENS, 2), D=(3,), h=(2, 3, 2))
    dt = np.random.default_rng(1).uniform(0.01, 0.3, (2, TOKENS, 3)).astype(np.float32)
    A = -np.arange(1.0, 7.0, dtype=np.float32).reshape(3, 2) / 3
    return (x["x"], dt, A, x["B"], x["C"]), {"D": x["D"], "initial_state": x["h"]}


STATE_SPACES = {
    "selective_scan": (ops.selective_scan, selective_scan, {}, None),
    # The short form compiles in a fraction of the time.
    "low_rank": (
        ops.state_space,
        lambda: state_space(True),
        {"discretization": "bilinear", "implementation": "reference"},
        IDS,
    ),
    "diagonal": (ops.state_space, lambda: state_space(False), {}, IDS),
    "packed_selective_scan": (ops.selective_scan, selective_scan, {}, IDS),
}


def on_mesh(call, *args):
    """`call` by the public ops on a mesh whose devices hold slices of rows."""
    mesh = sharding.make_mesh(sharding.MeshConfig(data=1, sequence=DEVICES))
    with jax.set_mesh(mesh):
        return value_and_pull(call, *args)


@pytest.mark.parametrize("name", STATE_SPACES)
def test_state_spaces_equal_one_device(name):
    op, make, options, ids = STATE_SPACES[name]
    args, rest = make()

    def call(args, rest):
        return op(*args, **rest, **options, segment_ids=ids, chunk_size=16)

    cotangents = normals(y=args[0].shape, h=rest["initial_state"].shape)
    cotangents = (cotangents["y"], cotangents["h"])
    assert_same(
        on_mesh(call, (args, rest), cotangents), value_and_pull(call, (args, rest), cotangents)
    )


@pytest.mark.parametrize("ids", [IDS, None], ids=["packed", "one_document"])
@pytest.mark.parametrize(
    ("heads", "options"),
    # Eight devices take a head of 8 each, and gather keys where there are 6.
    [((8, 2), {"window": 5}), ((6, 3), {"logit_cap": 2.0}), ((6, 6), {"window": 4})],
)
def test_attention_equals_one_device(heads, options, ids):
    x = normals(
        q=(2, TOKENS, heads[0], 4), k=(2, TOKENS, heads[1], 4), v=(2, TOKENS, heads[1], 4),
        do=(2, TOKENS, heads[0], 4),
    )  # fmt: skip

    def call(q, k, v):
        return ops.softmax_attention(q, k, v, segment_ids=ids, **options)

    args = (x["q"], x["k"], x["v"])
    assert_same(on_mesh(call, args, x["do"]), value_and_pull(call, args, x["do"]))


def test_normalised_linear_attention_is_refused():
    q = jnp.ones((1, 2, 1, 2))
    with pytest.raises(UserError, match="normalize=True"):
        sequence_parallel.run_rule(ops.linear_attention, q, q, q, axis="sequence", normalize=True)

"""Every recurrent rule behind one face: inputs, a call with all gradients, float64 answers.

An input is a dict of arrays by name, `initial_state` and the cotangents `do` and `dS` among them;
an answer has `o`, `S` and a gradient `dNAME` for each input.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ops_oracle as oracle
import state_space_oracles as spaces
import tiny_models
from fastweights import ops


class Rule(NamedTuple):
    """One rule.

    Attributes:
      letter: of the mixer that it serves.
      positional, named: inputs by name, in the order of the op's arguments, and its keywords.
      draw: random inputs from (seed, **sizes).
      tokens: inputs with a token axis.
      sixteen_bit: inputs that may be rounded; gates, steps and systems stay float32.
      slow: arguments of `draw` for slow decay.
      forms: its implementations, as options.
      options: fixed ones.
      recurrence: the answer for one document per row, in NumPy; None takes "reference" in float64.
    """

    letter: str
    function: Callable
    positional: tuple[str, ...]
    draw: Callable[..., dict[str, np.ndarray]]
    tokens: frozenset[str]
    sixteen_bit: frozenset[str]
    slow: dict[str, Any]
    forms: dict[str, dict[str, Any]]
    named: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    recurrence: Callable | None = oracle.recurrence


# Chunks of 16 make several groups of chunks of the rows in use, chunks of 64 a single one.
MATRIX_FORMS = {
    "chunked": {"implementation": "chunked"},
    "chunked_in_groups": {"implementation": "chunked", "chunk_size": 16},
    "scan": {"implementation": "scan"},
    "reference": {"implementation": "reference"},
}


def _matrix_rule(letter, function, *gates, channels=False):
    names = ("q", "k", "v", *gates)

    def draw(seed=0, **sizes):
        x = oracle.random_inputs(seed, channels=channels, **sizes)
        return {name: x[name] for name in (*names, "initial_state", "do", "dS")}

    return Rule(
        letter,
        function,
        names,
        draw,
        frozenset((*names, "do")),
        frozenset(("q", "k", "v", "do")),
        dict(g_mean=-1e-3),
        MATRIX_FORMS,
    )


def _structured_rule(low_rank, discretization):
    return Rule(
        "S",
        ops.state_space,
        ("x", "dt", "A", "B", "C"),
        functools.partial(spaces.structured_inputs, low_rank=low_rank),
        frozenset(("x", "do")),
        frozenset(("x", "do")),
        dict(dt=(3e-4, 3e-2)),
        {n: {"implementation": n} for n in ("scan", "reference")},
        ("P", "D") if low_rank else ("D",),
        {"discretization": discretization},
        None,
    )


RULES = {
    "linear_attention": _matrix_rule("L", ops.linear_attention),
    "delta_rule": _matrix_rule("D", ops.delta_rule, "beta"),
    "gated_delta_rule": _matrix_rule("G", ops.gated_delta_rule, "g", "beta"),
    "kimi_delta_rule": _matrix_rule("K", ops.kimi_delta_rule, "g", "beta", channels=True),
    "gated_linear_attention": _matrix_rule("N", ops.gated_linear_attention, "g"),
    "selective_scan": Rule(
        "M",
        ops.selective_scan,
        ("x", "dt", "A", "B", "C"),
        spaces.selective_inputs,
        frozenset(("x", "dt", "B", "C", "do")),
        frozenset(("x", "B", "C", "do")),
        dict(rate=1e-2),
        {n: {"implementation": n} for n in ("chunked", "auto", "scan", "reference")},
        ("D",),
        recurrence=spaces.selective_recurrence,
    ),
    "state_space": _structured_rule(True, "bilinear"),
    "state_space_bilinear": _structured_rule(False, "bilinear"),
    "state_space_zoh": _structured_rule(False, "zoh"),
}
# One of each function, and those with a decay or an error correction for each token.
EACH = tuple(RULES)[:7]
MATRIX = EACH[:5]
GATED = ("gated_delta_rule", "kimi_delta_rule", "gated_linear_attention")
DELTA = ("delta_rule", "gated_delta_rule", "kimi_delta_rule")
# A rule with each form that it has.
FORMS = [(name, form) for name in EACH for form in RULES[name].forms]


def call(name, arrays, segment_ids=None, **options):
    """(output, final state) from a dict with at least the positional inputs."""
    rule = RULES[name]
    named = {n: arrays[n] for n in (*rule.named, "initial_state") if n in arrays}
    positional = (arrays[n] for n in rule.positional)
    return rule.function(*positional, **named, segment_ids=segment_ids, **rule.options, **options)


def inputs_of(name, x):
    """The inputs alone, without cotangents."""
    return {n: a for n, a in x.items() if n not in ("do", "dS")}


@functools.partial(
    tiny_models.quick_jit, static_argnames=("name", "implementation", "chunk_size", "eps")
)
def _run(x, segment_ids, *, name, **options):
    (o, S), vjp = jax.vjp(lambda a: call(name, a, segment_ids, **options), inputs_of(name, x))
    (gradients,) = vjp((x["do"].astype(o.dtype), x["dS"].astype(S.dtype)))
    return {"o": o, "S": S} | {f"d{n}": a for n, a in gradients.items()}


def run(name, x, segment_ids=None, **options):
    """The answer of an op; complex gradients get a last axis of two."""
    out = {n: np.asarray(a) for n, a in _run(x, segment_ids, name=name, **options).items()}
    return {n: np.stack([a.real, a.imag], -1) if np.iscomplexobj(a) else a for n, a in out.items()}


def narrowed(name, x):
    """Rounded to bfloat16 where a rule may be given that; the float32 values of the same."""
    narrow = {n: jnp.asarray(x[n], jnp.bfloat16) for n in RULES[name].sixteen_bit}
    return x | narrow, x | {n: np.asarray(a, np.float32) for n, a in narrow.items()}


def recurrence(name, x):
    """The answer for one document per row, token by token in float64."""
    if RULES[name].recurrence is not None:
        return RULES[name].recurrence(x)
    # Its values are held to dense matrices by a test of its own.
    with jax.enable_x64(True):
        wide = {n: a.astype(np.promote_types(a.dtype, np.float64)) for n, a in x.items()}
        return run(name, wide, implementation="reference")


def check(name, x, tolerance=1e-5, **options):
    """Holds an op to the recurrence."""
    oracle.assert_close(run(name, x, **options), recurrence(name, x), tolerance)


WIDTH = 200
MOST_DOCUMENTS = 6


def packed(name, x, lengths):
    """The answer for documents of these lengths in each row, every one run apart.

    The first one starts from the initial state, the last one's state is the row's, and only these
    feel their gradients. All run as rows of one batch: the first is followed by zeros, which it
    does not see; the others start from a zero state, which zeros in front leave as it is.
    """
    rows, total = x["do"].shape[:2]
    bounds = list(itertools.pairwise(np.cumsum([0, *lengths])))
    assert bounds[-1][1] == total and len(bounds) <= MOST_DOCUMENTS
    tokens = RULES[name].tokens
    if len(bounds) == 1:
        return recurrence(name, x)
    apart = dict(x)
    for n in tokens:
        apart[n] = np.zeros((MOST_DOCUMENTS, rows, WIDTH, *x[n].shape[2:]), x[n].dtype)
    places = [slice(end - start) for start, end in bounds[:1]]
    places += [slice(start - end, None) for start, end in bounds[1:]]
    for i, (start, end) in enumerate(bounds):
        for n in tokens:
            apart[n][i, :, places[i]] = x[n][:, start:end]
    for n, i in (("initial_state", 0), ("dS", len(bounds) - 1)):
        apart[n] = np.zeros((MOST_DOCUMENTS, *x[n].shape), x[n].dtype)
        apart[n][i] = x[n]
    by_row = (*tokens, "initial_state", "dS")
    flat = {n: a.reshape(-1, *a.shape[2:]) if n in by_row else a for n, a in apart.items()}
    out = recurrence(name, flat)
    for n in ("o", "S", "dinitial_state", *(f"d{n}" for n in tokens if n != "do")):
        split = out[n].reshape(MOST_DOCUMENTS, rows, *out[n].shape[1:])
        if n in ("S", "dinitial_state"):
            out[n] = split[len(bounds) - 1 if n == "S" else 0]
        else:
            out[n] = np.concatenate([split[i, :, place] for i, place in enumerate(places)], 1)
    return out

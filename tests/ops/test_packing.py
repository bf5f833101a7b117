"""Packed rows in every recurrent rule: documents never mix, padding takes no part.

Cases 9, 11, 12 and 20 of the list in `test_edge_cases.py`.
"""

import functools

import numpy as np
import pytest

import ops_family as family
import ops_oracle as oracle
from ops_family import EACH, RULES, WIDTH

# Delta rule and linear attention are parts of the gated ones: not in every form.
FORMS = [f for f in family.FORMS if f[0] not in family.MATRIX[:2] or f[1] != "chunked"]

# Documents of a row; chunks are of 64 tokens, or 16.
LAYOUTS = {
    "first_token": (1, 199),
    "last_token": (199, 1),
    "mid_chunk": (30, 70, 100),
    "chunk_edges": (64, 64, 72),
    "around_an_edge": (63, 2, 135),
    "length_one_in_a_row": (40, 1, 1, 1, 1, 156),
    "across_whole_chunks": (10, 180, 10),
}
# True at padding.
PADDINGS = {
    "left": np.arange(WIDTH) < 70,
    "right": np.arange(WIDTH) >= 130,
    "interior": (np.arange(WIDTH) % 7 == 3) | ((np.arange(WIDTH) > 60) & (np.arange(WIDTH) < 135)),
    "all_but_one": np.arange(WIDTH) != 64,
}


def rows(ids_T):
    return np.broadcast_to(ids_T, (2, WIDTH)).astype(np.int32)


@functools.cache
def packed_case(name, layout):
    """(inputs, ids, answer). Slow decay, or a leak into the next document would drown."""
    lengths = LAYOUTS[layout]
    x = RULES[name].draw(11, **RULES[name].slow)
    ids = rows(np.repeat(np.arange(len(lengths)) % 2 + 1, lengths))
    return x, ids, family.packed(name, x, lengths)


@pytest.mark.parametrize(("name", "form"), [*FORMS, ("state_space_zoh", "scan")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_equal_separate_runs(layout, name, form):
    x, ids, want = packed_case(name, layout)
    oracle.assert_close(family.run(name, x, ids, **RULES[name].forms[form]), want)


@functools.cache
def padded_case(name, padding):
    """(inputs with NaN at padding, ids, answer with zeros there)."""
    padded_T, tokens = PADDINGS[padding], RULES[name].tokens
    real = int(np.sum(~padded_T))
    lengths = (real,) if real == 1 else (real // 3, real - real // 3)
    x = RULES[name].draw(13, T=real, **RULES[name].slow)
    ids = np.zeros(WIDTH)
    ids[~padded_T] = np.repeat(np.arange(len(lengths)) + 1, lengths)

    def put(compact, fill):
        full = np.full((2, WIDTH, *compact.shape[2:]), fill, compact.dtype)
        full[:, ~padded_T] = compact
        return full

    want = family.packed(name, x, lengths)
    by_token = {"o", *(f"d{n}" for n in tokens if n != "do")}
    return (
        {n: put(a, np.nan) if n in tokens else a for n, a in x.items()},
        rows(ids),
        {n: put(a, 0) if n in by_token else a for n, a in want.items()},
        by_token,
    )


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_with_nan_changes_nothing(padding, name, form):
    x, ids, want, by_token = padded_case(name, padding)
    got = family.run(name, x, ids, **RULES[name].forms[form])
    oracle.assert_close(got, want)
    for n in by_token:
        assert np.all(got[n][:, PADDINGS[padding]] == 0), n


@pytest.mark.parametrize("name", EACH)
def test_rows_of_padding_alone_pass_the_state_through(name):
    x = RULES[name].draw(14)
    form = "scan" if RULES[name].letter == "S" else "chunked"
    size = 64 if RULES[name].letter in "GKMNS" else 16
    got = family.run(name, x, rows(0), implementation=form, chunk_size=size)
    np.testing.assert_array_equal(got["S"], x["initial_state"])
    np.testing.assert_array_equal(got["dinitial_state"], x["dS"])
    assert not np.any(got["o"])


@pytest.mark.parametrize("name", family.GATED)
def test_gate_at_a_document_start_has_exactly_no_gradient(name):
    x = RULES[name].draw(11)
    ids = rows(np.repeat((1, 2, 3), (30, 34, 136)))
    dg = family.run(name, x, ids, implementation="chunked")["dg"]
    assert np.all(dg[:, [30, 64]] == 0)
    assert np.all(dg[:, 0] != 0)

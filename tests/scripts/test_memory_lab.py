"""The four experiments show what they say."""

import itertools

import numpy as np
import pytest

import memory_lab
from fastweights.errors import UserError


def test_the_regrouped_sum_is_the_recurrence():
    assert memory_lab.regrouped_sum() < 1e-5


def test_the_delta_rule_returns_the_new_value_and_addition_a_blend():
    shares = memory_lab.overwrite()
    np.testing.assert_allclose(shares["additive"], (1, 1), atol=1e-3)
    np.testing.assert_allclose(shares["delta"], (0, 1), atol=1e-3)


def test_no_rule_escapes_the_fixed_size_and_many_random_keys_hurt_the_delta_rule_more():
    errors = memory_lab.capacity()
    for values in errors.values():
        assert values[0] < 0.05 and values[-1] > 0.2
        assert all(earlier <= later + 0.02 for earlier, later in itertools.pairwise(values))
    many = memory_lab.COUNTS.index(memory_lab.KEY_DIM)
    for additive, delta in zip(errors["additive"][many:], errors["delta"][many:], strict=True):
        assert delta > additive + 0.1


@pytest.mark.parametrize("gate", memory_lab.GATES)
def test_gates_forget_by_age_and_the_overwritten_key_is_exact(gate):
    reads = memory_lab.small_memory()[gate]
    np.testing.assert_allclose(reads["a"], (1, 0), atol=1e-5)
    # b was written two writes before the end and nothing overlaps it.
    np.testing.assert_allclose(reads["b"], (gate**2, 0), atol=1e-5)
    # Overwriting a takes half of c with it, for c lies half along a.
    np.testing.assert_allclose(reads["c"][0], gate / 2, atol=1e-5)


def test_the_command_draws(tmp_path, capsys):
    memory_lab.main(["--out", str(tmp_path / "lab.png")])
    assert "pairs lost" in capsys.readouterr().out
    assert (tmp_path / "lab.png").stat().st_size > 10_000


def test_bad_arguments_of_the_lab_are_named(tmp_path):
    with pytest.raises(UserError, match="--seed is -1; use 0 or more"):
        memory_lab.main(["--out", str(tmp_path / "lab.png"), "--seed", "-1"])
    for name, told in (("lab.foo", "can't be written"), ("", "is no picture's name")):
        with pytest.raises(UserError, match=f"--out '.*{name}' {told}.*; name a .png, .svg or"):
            memory_lab.main(["--out", str(tmp_path / name)])
    assert not list(tmp_path.iterdir())

"""The memory tables, and what the gradient of a mixer may hold at any time."""

import math

import jax
import pytest

import memory
import memory_table
import tiny_models
from fastweights import config as config_lib
from fastweights import flops
from fastweights.errors import UserError
from runs import ROOT

LINEAR = "LDGKNMS"


def shapes(jaxpr):
    """Shapes of all that a program computes, inside loops and branches too."""
    for equation in jaxpr.eqns:
        yield from (var.aval.shape for var in equation.outvars)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


def gradient_shapes(letter, length, **options):
    gradient, arguments = memory_table.mixer_gradient(letter, length, **options)
    return list(shapes(jax.make_jaxpr(gradient)(*arguments).jaxpr))


def largest(letter, length, **options):
    return max(map(math.prod, gradient_shapes(letter, length, **options)))


@pytest.mark.parametrize("letter", LINEAR)
def test_no_array_of_a_linear_mixer_grows_faster_than_its_input(letter):
    assert largest(letter, 4096) <= 4 * largest(letter, 1024)


def test_softmax_attention_is_seen_to_hold_every_pair_of_tokens():
    assert largest("A", 4096) == 16 * largest("A", 1024)


def test_mamba_never_holds_the_states_of_all_tokens():
    length, states = 1024, 16
    whole = length * 2 * memory_table.WIDTH * states
    assert largest("M", length) < whole / 4
    assert largest("M", length, implementation="scan") >= whole


@pytest.mark.parametrize("implementation", ["auto", "scan"])
def test_s4_never_holds_every_pair_of_tokens(implementation):
    length = 8192
    found = gradient_shapes("S", length, implementation=implementation)
    assert not [shape for shape in found if shape.count(length) > 1]
    assert max(map(math.prod, found)) < length * length


@pytest.mark.parametrize("letter", LINEAR)
def test_training_memory_of_a_linear_mixer(letter):
    def compile_at(length):
        gradient, arguments = memory_table.mixer_gradient(letter, length)
        return tiny_models.quick_jit(gradient).lower(*arguments).compile()

    assert memory.WIDTH == memory_table.WIDTH
    memory.assert_linear(compile_at)


def rows(size, *lengths, capsys):
    spec = f"{ROOT}/configs/qwen3_5.py:size={size}"
    memory_table.main(["cache", "--config", spec, "--lengths", *map(str, lengths)])
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_caches_of_a_published_geometry(capsys):
    found = rows("27b", 4096, 262_144, capsys=capsys)
    assert ["48 `G`", "state", "3 MiB", "144 MiB", "144 MiB"] in found
    assert ["16 `A`", "keys and values", "grows", "256 MiB", "16 GiB"] in found
    found = rows("9b", 262_144, capsys=capsys)
    assert ["", "over keys and values", "", "4.00"] in found


@pytest.mark.parametrize(
    ("size", "total"),
    [
        ("0.8b", 752_393_024),
        ("2b", 1_881_825_088),
        ("4b", 4_205_751_296),
        ("9b", 8_953_803_264),
        ("27b", 26_895_998_464),
    ],
)
def test_published_parameter_counts_and_state_sizes(size, total):
    model = config_lib.load(f"{ROOT}/configs/qwen3_5.py:size={size}").model
    assert flops.param_counts(model)["total"] == total
    heads = model.mixers.G.num_heads
    assert flops.layer_bytes(model, "G", 1)["state"] == heads * 16_384 * 4


def test_bad_requests_are_named():
    with pytest.raises(UserError, match="mixer 'A' is not one of L, D, G"):
        memory_table.main(["training", "--mixers", "A"])
    with pytest.raises(UserError, match="takes no overrides"):
        memory_table.main(["training", "--config.steps=3"])
    for table in ("training", "cache"):
        with pytest.raises(UserError, match="--lengths has 0; give numbers of tokens"):
            memory_table.main([table, "--lengths", "64", "0"])

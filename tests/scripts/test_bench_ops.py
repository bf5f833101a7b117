"""The benchmark's rules take their inputs in every form, and its table says what was measured."""

import jax
import pytest

import bench_ops
from fastweights.errors import UserError

SHAPE = (1, 32, 2, 16)


@pytest.mark.parametrize("rule", bench_ops.RULES)
def test_every_form_of_a_rule_takes_its_inputs(rule):
    inputs = bench_ops.RULES[rule].inputs(SHAPE)
    found = []
    for form in ("reference", *bench_ops.RULES[rule].forms):
        calls = bench_ops.make_calls(rule, form, 16)
        found.append([jax.tree.map(lambda x: x.shape, jax.eval_shape(f, *inputs)) for f in calls])
    assert all(shapes == found[0] for shapes in found)
    gradients = found[0][1][1]
    assert gradients == tuple(x.shape for x in inputs)


def test_the_table_is_relative_to_the_reference(capsys, monkeypatch):
    taken = iter([0.004, 0.008, 0.002, 0.002, 0.008, 0.004])
    monkeypatch.setattr(bench_ops, "seconds", lambda call, inputs: next(taken))
    bench_ops.main(["--rules", "linear_attention", "--shapes", "1x32x2x16", "--runs", "1"])
    rows = [line.split()[:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    common = ["linear_attention", "1x32x2x16"]
    assert rows == [
        [*common, "reference", "4.0", "1.0", "8.0", "1.0"],
        [*common, "chunked", "2.0", "2.0", "2.0", "4.0"],
        [*common, "scan", "8.0", "0.5", "4.0", "2.0"],
    ]


@pytest.mark.parametrize("shape", ("1x2x3", "1x0x2x8", "1x-5x2x8"))
def test_a_shape_that_is_none_is_told(capsys, shape):
    with pytest.raises(SystemExit):
        bench_ops.main(["--shapes", shape])
    assert "a shape is BxTxHxD" in capsys.readouterr().err


def test_a_benchmark_of_no_run_is_refused():
    with pytest.raises(UserError, match="--runs is 0; use 1 or more"):
        bench_ops.main(["--runs", "0"])

"""Best rate, robustness, intervals and floors, by hand."""

import numpy as np
import pytest

from fastweights import analysis, flops, sweeps
from fastweights.errors import UserError
from fastweights.tasks import MQARConfig, ParityConfig, eval_slices
from runs import TINY


def row(lr, seed, recall, error=0.0, run="pattern=GA"):
    return {
        "run": f"{run},lr={lr},seed={seed}", "status": "done", "eval": "recall", "slice": "T8_K2",
        "lr": lr, "seed": seed, "recall": recall, "error": error,
    }  # fmt: skip


def test_a_model_stands_at_the_rate_of_its_best_mean():
    rows = [row(0.1, 0, 1.0), row(0.1, 1, 0.0), row(0.2, 0, 0.6), row(0.2, 1, 0.8)]
    rows = [found | {"nll": nll} for found, nll in zip(rows, (0.0, 9.0, 1.0, 1.5), strict=True)]
    # Of a rate at which one seed of two diverged, the other's score is half; of one at which all
    # did, nothing is known but that.
    failed = {"status": "failed: not finite", "slice": "", "recall": None}
    rows += [row(0.3, 0, 0.9), {**row(0.3, 1, 0), **failed}, {**row(0.01, 0, 0), **failed}]
    rows.append({"run": "no,config", "eval": "recall", "status": "failed: no GPU"})
    (found,) = analysis.summarise(rows)
    assert (found.model, found.lr, found.seeds) == ("pattern=GA", 0.2, 2)
    assert found.score == pytest.approx(0.7) and found.nll == pytest.approx(1.25)
    assert (found.low, found.high) == pytest.approx((0.6, 0.8))
    assert found.scores == {0.01: [0.0], 0.1: [1.0, 0.0], 0.2: [0.6, 0.8], 0.3: [0.9, 0.0]}
    (found,) = analysis.summarise([row(0.3, 0, 0.0), {**row(0.1, 0, 0), **failed}])
    assert found.lr == 0.3 and found.row["status"] == "done"
    with pytest.raises(UserError, match=r"two runs of 'pattern=GA' have the learning rate 0.1"):
        analysis.summarise([*rows, row(0.1, 0, 0.5)])


def test_a_model_has_one_rate_on_all_slices():
    """The one that is best over the first eval's slices, kinds of answers left out."""

    def cell(lr, recall, **place):
        return row(lr, 0, recall, run="pattern=A,matched=state") | place

    rows = []
    for lr, (short, long, kind, beyond) in {
        0.1: (0.9, 0.1, 0.0, 0.9),
        0.2: (0.7, 0.4, 1.0, 0.2),
    }.items():
        rows += [cell(lr, short), cell(lr, long, slice="T64"), cell(lr, kind, slice="T64/old")]
        rows.append(cell(lr, beyond, slice="T128", eval="length"))
    found = analysis.summarise(rows)
    assert {s.model for s in found} == {"pattern=A"}
    assert [(s.lr, s.score) for s in found] == [(0.2, 0.7), (0.2, 0.4), (0.2, 1.0), (0.2, 0.2)]
    # Without the runs of that rate in a second eval, its own best.
    (*_, alone) = analysis.summarise([r for r in rows if r["eval"] == "recall" or r["lr"] == 0.1])
    assert (alone.eval, alone.lr) == ("length", 0.1)


def test_robustness_is_the_area_over_the_logarithm_of_the_rate():
    # 1e-3 to 1e-2 is two thirds of the range in logarithms.
    means = {1e-3: 0.0, 1e-2: 1.0, 10**-1.5: 1.0}
    assert analysis.robustness(means) == pytest.approx((2 / 3) * 0.5 + 1 / 3)
    assert analysis.robustness({1e-3: 0.4}) == 0.4


def test_the_interval_holds_seeds_and_examples():
    # Five seeds alike: only the error over examples is left, divided by sqrt(5).
    low, high = analysis.interval([0.5] * 5, [0.1] * 5)
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / 5**0.5, rel=0.1)
    low, high = analysis.interval([0.3, 0.5, 0.7], [0.0] * 3)
    assert 0.3 <= low < 0.4 and 0.6 < high <= 0.7
    assert analysis.interval([1.0], [0.1])[1] == 1.0


def test_examples_are_drawn_whole():
    right = np.random.default_rng(1).random(400) < 0.3
    error = analysis.bootstrap_error(right * 4.0, np.full(400, 4))
    # As of 400 answers, not of 1600: those of one example hang together.
    assert error == pytest.approx((0.3 * 0.7 / 400) ** 0.5, rel=0.2)


def test_the_best_cheater_stays_near_chance():
    for task in (MQARConfig(vocab_size=64, train=((16, 3, 1.0),), test=((16, 3),)), ParityConfig()):
        part = eval_slices(task)[0]
        assert 0 < analysis.best_cheater(task, part) <= 1.2 * part.chance


def test_the_cheater_knows_that_places_of_coupled_queries_tell_their_pair():
    task = MQARConfig(test=((64, 16),), query_order="coupled")
    (part,) = eval_slices(task)
    assert analysis.best_cheater(task, part) > 1.6 * part.chance


def test_points_are_made_equal_in_parameters_or_state():
    points = sweeps.grid({"model.pattern": ["A", "G"], "seed": [0]})
    for by, field in (("parameters", "model.mlp_dim"), ("state", "model.mixers.G.head_dim")):
        target = 20_000
        chosen = points if by == "parameters" else points[1:]
        made = sweeps.matched(TINY, chosen, by=by, field=field, target=target)
        for point in made:
            fields = [f"{path}={value}" for path, value in point.items()]
            config = sweeps.config_lib.load(TINY, fields)
            counts = {
                "parameters": flops.param_counts(config.model)["total"],
                "state": flops.state_bytes(config.model, config.data.length)["total"],
            }
            assert config.matched == by and abs(counts[by] / target - 1) <= 0.05
    made = sweeps.matched(TINY, points, by="parameters", field="model.mlp_dim")
    assert len({point["model.mlp_dim"] for point in made}) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(by="size", field="model.mlp_dim"), "got by='size'"),
        (dict(by="state", field="model.mlp_dim", target=10**6), "no model.mlp_dim gives the sweep"),
    ],
)
def test_what_can_not_be_matched_is_told(options, told):
    with pytest.raises(UserError, match=told):
        sweeps.matched(TINY, [{"model.pattern": "A"}], **options)

"""What scripts/plot.py makes of many runs: one point a pattern, at its best rate."""

import pytest

import plot
from fastweights.errors import UserError


def row(pattern, lr, seed, recall):
    return {
        "run": f"{pattern}-{lr}-{seed}", "status": "done", "pattern": pattern, "lr": lr,
        "seed": seed, "recall": recall, "slice": "T16_K3", "pairs": "3", "length": "16",
        "attention_share": "0.5", "state_bytes": "8", "chance": "0.3",
    }  # fmt: skip


def test_a_pattern_stands_at_its_best_mean_over_seeds_and_shows_their_spread():
    rows = [row("A", "0.1", "0", "1.0"), row("A", "0.1", "1", "0.0"),
            row("A", "0.2", "0", "0.6"), row("A", "0.2", "1", "0.8")]  # fmt: skip
    # Of a rate at which one seed diverged, which collect tells once an eval, the other is half.
    rows.append(row("A", "0.3", "0", "1.0"))
    rows += 2 * [row("A", "0.3", "1", "") | {"status": "failed: not finite", "slice": ""}]
    (point,) = plot.best_points(rows, None)
    assert (point["lr"], point["seeds"]) == (0.2, 2)
    assert (point["low"], point["recall"], point["high"]) == pytest.approx((0.6, 0.7, 0.8))


def test_runs_that_differ_in_what_the_plot_does_not_show_are_refused():
    """Such as beta's range: their mean would be taken for one over seeds."""
    one = row("D", "0.1", "0", "1.0")
    with pytest.raises(UserError, match="and 'other' have the same pattern, lr and seed"):
        plot.best_points([one, one | {"run": "other", "recall": "0.5"}], None)

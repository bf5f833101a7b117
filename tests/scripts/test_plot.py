"""What scripts/plot.py makes of many runs: one point a model, at its best rate."""

import pytest
from matplotlib import pyplot as plt

import figures
import plot
import report
from fastweights import analysis
from fastweights.errors import UserError
from runs import write_table


def row(pattern, lr, seed, recall, **changes):
    return {
        "run": f"pattern={pattern},lr={lr},seed={seed}", "status": "done", "pattern": pattern,
        "eval": "recall", "lr": lr, "seed": seed, "recall": recall, "slice": "T16_K3",
        "pairs": 3, "length": 16, "attention_share": 0.5, "state_bytes": 8, "chance": 0.3,
    } | changes  # fmt: skip


def test_a_model_stands_at_its_best_mean_over_seeds_and_shows_their_spread(tmp_path):
    rows = [row("A", 0.1, 0, 1.0), row("A", 0.1, 1, 0.0),
            row("A", 0.2, 0, 0.6), row("A", 0.2, 1, 0.8)]  # fmt: skip
    # Of a rate at which one seed diverged, which collect tells once an eval, the other is half.
    rows.append(row("A", 0.3, 0, 1.0))
    failed = {"status": "failed: not finite", "slice": ""}
    rows += [row("A", 0.3, 1, "", eval=name, **failed) for name in ("recall", "length")]
    (point,), _ = plot.read_points(write_table(tmp_path / "table.csv", *rows))
    assert (point.lr, point.seeds) == (0.2, 2)
    assert (point.low, point.score, point.high) == pytest.approx((0.6, 0.7, 0.8))


def test_the_mean_is_over_the_slices_of_all_evals_without_kinds(tmp_path):
    longer = {"eval": "length", "slice": "T64_K9", "length": 64, "pairs": 9, "state_bytes": 99}
    rows = [
        row("A", 0.1, 0, 0.9),
        row("A", 0.1, 0, 0.5, **longer),
        row("A", 0.1, 0, 0.0, slice="T16_K3/updated"),
        # Better on the first slice, worse on all: the rate is that of the best mean over them.
        row("A", 0.2, 0, 1.0),
        row("A", 0.2, 0, 0.2, **longer),
    ]
    (point,), _ = plot.read_points(write_table(tmp_path / "table.csv", *rows), "mean")
    assert (point.lr, point.score) == (0.1, pytest.approx(0.7))
    # What one sequence is kept in grows with it; told is that of the longest.
    assert point.row["state_bytes"] == 99
    (point,), _ = plot.read_points(write_table(tmp_path / "table.csv", *rows), "T64_K9")
    assert point.score == pytest.approx(0.2)


def test_a_mean_over_fewer_slices_is_no_mean(tmp_path):
    longer = {"eval": "length", "slice": "T64_K9", "length": 64, "pairs": 9}
    rows = [row("A", 0.1, 0, 0.9), row("A", 0.1, 0, 0.5, **longer), row("A", 0.1, 1, 0.9)]
    with pytest.raises(UserError, match=r"run 'pattern=A,lr=0\.1,seed=1' has no result on T64_K9"):
        plot.read_points(write_table(tmp_path / "table.csv", *rows), "mean")


def test_models_that_the_plot_cannot_tell_apart_are_refused(tmp_path):
    """Such as two ranges of beta: one would be taken for the other."""
    other = "neg=true,pattern=D,lr=0.1,seed=0"
    rows = [row("D", 0.1, 0, 1.0), row("D", 0.1, 0, 0.5, run=other)]
    table = write_table(tmp_path / "table.csv", *rows)
    with pytest.raises(UserError, match="'pattern=D' and 'neg=true,pattern=D' have the same"):
        plot.read_points(table)
    (point,), _ = plot.read_points(table, without=["neg=true"])
    assert (point.model, point.score) == ("pattern=D", 1.0)
    twice = [row("D", 0.1, 0, 1.0), row("D", 0.1, 0, 0.5, eval="length")]
    for against in plot.AGAINST:
        with pytest.raises(UserError, match="on T16_K3' are in the evals recall and length"):
            plot.read_points(
                write_table(tmp_path / "twice.csv", *twice),
                "T16_K3" if against != "length" else None,
                against=against,
            )
    with pytest.raises(UserError, match="--without 'width=' is in no run's name"):
        plot.read_points(table, without=["neg=true", "width="])


def test_sizes_of_one_pattern_are_points_of_one_line(tmp_path):
    sizes = {16: 0.4, 64: 0.9}
    rows = [
        row("D", 0.1, 0, recall, run=f"width={bytes_},lr=0.1,seed=0", state_bytes=bytes_)
        for bytes_, recall in sizes.items()
    ]
    points, losses = plot.read_points(write_table(tmp_path / "table.csv", *rows))
    assert {point.row["state_bytes"]: point.score for point in points} == sizes
    plot.draw(points, losses, tmp_path / "x.png")
    figure, axes = plt.subplots()
    figures.scores_against(axes, points, "state_bytes", figures.pattern_of)
    drawn = [line.get_xydata().tolist() for line in axes.get_lines()]
    plt.close(figure)
    assert [[16.0, 0.4], [64.0, 0.9]] in drawn


def text_row(pattern, lr, seed, nll, **changes):
    return {
        "run": f"task=text,pattern={pattern},lr={lr},seed={seed}", "status": "done", "eval": "ppl",
        "pattern": pattern, "lr": lr, "seed": seed, "slice": "16-63", "nll": nll,
        "attention_share": 0.5, "state_bytes": 8,
    } | changes  # fmt: skip


def test_losses_on_text_stand_beside_the_recall(tmp_path):
    rows = [row("A", 0.1, 0, 0.9)]
    rows += [text_row("A", 0.1, seed, nll) for seed, nll in enumerate((1.5, 1.7))]
    # Behind more tokens the loss is another; a rate at which a seed failed is none to choose.
    rows += [text_row("A", 0.1, 0, 1.1, slice="4-15"), text_row("A", 0.2, 0, 1.0)]
    rows += [text_row("A", 0.3, 0, 2.0), text_row("A", 0.2, 1, "", status="failed: no", slice="")]
    points, losses = plot.read_points(write_table(tmp_path / "table.csv", *rows))
    assert [point.model for point in points] == ["pattern=A"]
    (loss,) = losses
    assert (loss.lr, loss.slice, loss.model) == (0.1, "16-63", "task=text,pattern=A")
    assert (loss.low, loss.nll, loss.high) == pytest.approx((1.5, 1.6, 1.7))
    plot.draw(points, losses, tmp_path / "x.png")
    figure, axes = plt.subplots()
    figures.losses_against_attention(axes, losses)
    (line,) = axes.get_lines()[:1]
    assert line.get_xydata().tolist() == [[0.5, loss.nll]]
    assert axes.get_ylim() == pytest.approx((1.35, 1.87))
    plt.close(figure)


def test_against_length_each_model_is_a_line_over_what_it_was_asked(tmp_path):
    longer = {"eval": "length", "slice": "T64_K3", "length": 64, "chance": 0.2}
    rows = [
        row("GA", 0.1, 0, recall, run=f"rope={rope},lr=0.1,seed=0", **of)
        for rope, recalls in {0: (0.9, 0.8), 1: (0.9, 0.4)}.items()
        for recall, of in zip(recalls, ({}, longer), strict=True)
    ]
    # One kind of the answers is no place of its own.
    rows.append(rows[-1] | {"slice": "T64_K3/updated"})
    table = write_table(tmp_path / "table.csv", *rows)
    points, _ = plot.read_points(table, against="length")
    figure, axes = plt.subplots()
    figures.scores_against(axes, points, "length")
    figures.chance_against(axes, points, "length")
    drawn = [line.get_xydata().tolist() for line in axes.get_lines()]
    plt.close(figure)
    for line in ([[16, 0.9], [64, 0.8]], [[16, 0.9], [64, 0.4]], [[16, 0.3], [64, 0.2]]):
        assert line in drawn
    assert plot.main([str(table), "--out", str(tmp_path / "x.png"), "--against", "length"]) == 0
    with pytest.raises(UserError, match="leave --slice T64_K3 out"):
        plot.read_points(table, "T64_K3", against="length")
    rows.append(row("GA", 0.1, 0, 0.1, run="rope=0,lr=0.1,seed=0", slice="T16_K9", pairs=9))
    table = write_table(tmp_path / "table.csv", *rows)
    with pytest.raises(
        UserError, match="'rope=0 on T16_K3' and 'rope=0 on T16_K9' have one length"
    ):
        plot.read_points(table, against="length")


def test_against_model_those_of_one_share_and_state_stand_side_by_side(tmp_path):
    rows = [
        row("GA", 0.1, 0, recall, run=f"place={place},lr=0.1,seed=0")
        for place, recall in {"first": 0.2, "last": 0.6}.items()
    ]
    table = write_table(tmp_path / "table.csv", *rows)
    with pytest.raises(UserError, match="--against model"):
        plot.read_points(table)
    points, _ = plot.read_points(table, against="model")
    assert {point.model: point.score for point in points} == {"place=first": 0.2, "place=last": 0.6}
    plot.draw(points, (), tmp_path / "x.png", "model")
    figure = figures.scores_by_model(points)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["place=first", "place=last"]
    drawn = [list(line.get_xdata()) for line in axes.get_lines()]
    plt.close(figure)
    assert [0.2, 0.6] in drawn and [0.3, 0.3] in drawn


def test_other_evals_and_kinds_alone_are_told_in_one_sentence(tmp_path):
    table = write_table(tmp_path / "table.csv", row("A", 0.1, 0, 0.5, eval="niah", chance=""))
    with pytest.raises(UserError, match="rows of the eval niah, which are not drawn"):
        plot.read_points(table)
    rows = [row("A", lr, 0, lr, slice="T16_K3/old") for lr in (0.1, 0.2)]
    (point,), _ = plot.read_points(write_table(tmp_path / "kinds.csv", *rows))
    assert point.lr == 0.2


def test_means_in_a_report_are_of_recall_alone_at_the_rate_of_the_slices():
    longer = {"eval": "length", "slice": "T64_K3", "length": 64}
    rows = [
        row("A", lr, 0, recall, parameters=9, error=0.03, **of)
        for lr, recalls in {0.1: (0.9, 0.2), 0.2: (0.8, 0.8)}.items()
        for recall, of in zip(recalls, ({}, longer), strict=True)
    ]
    told = report.mean_table(analysis.summarise(rows), rows)
    # The rate is chosen within the trained length, at 0.1; beyond it the other is better.
    assert "<td>0.1</td>" in told and "0.550</span>" in told
    loss = text_row("A", 0.1, 0, 1.0, run=rows[0]["run"], length=16)
    assert report.mean_table(analysis.summarise(rows), [*rows, loss]) == told
    lacking = [*rows, row("A", 0.2, 1, 0.8, parameters=9)]
    assert "has no result on T64_K3" in report.mean_table(analysis.summarise(lacking), lacking)

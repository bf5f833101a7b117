"""Collect and plot on damaged input: the cause is named and a broken run hides no other."""

import csv
import io
import json

import pytest

import collect
import plot
import report
import reproduce
from fastweights import config
from fastweights.errors import UserError
from runs import ROOT, write_table

RESULT = json.dumps({"step": 4, "rows": [{"slice": "T8_K2", "length": 8, "recall": 0.5}]})


def collected(folder, capsys):
    collect.main([str(folder)])
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def make_run(folder):
    (folder / "evals").mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json(config.load(str(ROOT / "tests/tiny.py"))))
    (folder / "evals/recall-4.json").write_text(RESULT)
    (folder / "DONE").write_text("4\n")


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("evals/recall-4.json", "", "recall-4.json' is not JSON"),
        ("evals/recall-4.json", b"\xff\xfe", "recall-4.json' is not JSON"),
        ("evals/recall-9.json", "{}", "recall-9.json' holds no step and rows"),
        ("evals/recall-9.json", '{"step": 9, "rows": []}', "recall-9.json' holds no step and rows"),
        ("evals/recall-x.json", RESULT, "recall-x.json' has no step in its name"),
        ("config.json", "{", "config.json' is not valid JSON"),
        ("config.json", "[]", "must be a group of fields"),
        ("metrics.jsonl", "no record\n", "/b"),
    ],
)
def test_a_broken_run_gets_one_row_with_its_cause_and_hides_no_other(
    tmp_path, capsys, file, content, told
):
    for name in "abc":
        make_run(tmp_path / name)
    (tmp_path / "b" / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    whole, broken, other = collected(tmp_path, capsys)
    assert [row["run"] for row in (whole, broken, other)] == ["a", "b", "c"]
    assert whole["status"] == other["status"] == "done"
    assert whole["recall"] == other["recall"] == "0.5"
    assert broken["status"].startswith("broken: ") and told in broken["status"]
    assert broken["recall"] == "" and broken["eval"] == "recall"


def test_the_step_to_much_recall_is_the_first_eval_in_training_with_it(tmp_path, capsys):
    make_run(tmp_path / "a")
    evals = [(2, 0.5), (4, 0.95), (6, 0.8), (8, 0.99)]
    records = [{"kind": "eval", "step": step, "recall/mean": found} for step, found in evals]
    (tmp_path / "a/metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert [row["steps_to_90"] for row in collected(tmp_path, capsys)] == ["4"]


def test_of_a_run_in_two_sources_the_later_one_counts(tmp_path, capsys):
    for name in ("old/a", "old/b", "new/b", "new/c"):
        make_run(tmp_path / name)
    (tmp_path / "new/b/evals/recall-4.json").write_text(RESULT.replace("0.5", "0.75"))
    table = tmp_path / "old.csv"
    collect.main([str(tmp_path / "old")])
    table.write_text(capsys.readouterr().out)
    for sources in (["old", "new"], ["old.csv", "new"], ["old", "new/b", "new/c"]):
        rows = collect.gather([tmp_path / name for name in sources], "recall")
        assert [(row["run"], row["recall"]) for row in rows] == [
            ("a", 0.5),
            ("b", 0.75),
            ("c", 0.5),
        ]


def test_what_only_some_evals_tell_is_in_the_table_too(tmp_path, capsys):
    make_run(tmp_path / "runs/a")
    rows = [{"slice": "blocks[0] G", "rank": 3.5, "most": 8}]
    result = tmp_path / "runs/a/evals/state_rank-4.json"
    result.write_text(json.dumps({"step": 4, "rows": rows}))
    collect.main([str(tmp_path / "runs"), "--eval", "state_rank"])
    table = tmp_path / "table.csv"
    table.write_text(capsys.readouterr().out)
    collect.main([str(table), "--eval", "state_rank"])
    assert capsys.readouterr().out == table.read_text()
    (row,) = collect.read_rows(table)
    assert (row["slice"], row["rank"], row["most"]) == ("blocks[0] G", "3.5", "8")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"recall": "high"}, "run 'a' has recall 'high', which is no finite number"),
        ({"recall": "1.5"}, "run 'a' has recall '1.5', which is outside 0 to 1"),
        ({"recall": "1", "state_bytes": "0"}, "run 'a' has state_bytes '0', which is not above 0"),
        ({"seed": "0.5"}, "run 'a' has seed '0.5', which is no whole number"),
        ({"eval": "length"}, "has no row of the eval recall"),
        ({"status": ""}, "has a row of run 'a' without status"),
        ({"whole": None}, "has no column whole; make it with"),  # from before it was told
    ],
)
def test_a_csv_in_the_place_of_runs_is_checked(tmp_path, changes, told):
    cells = dict.fromkeys(collect.COLUMNS, "") | {"run": "a", "status": "done", "eval": "recall"}
    row = {name: text for name, text in (cells | changes).items() if text is not None}
    with pytest.raises(UserError, match=told):
        collect.gather([write_table(tmp_path / "table.csv", row)], "recall")


CELLS = {
    "run": "a", "status": "done", "pattern": "A", "slice": "T16_K3", "pairs": "3", "length": "16",
    "lr": "0.1", "seed": "0", "recall": "0.1", "attention_share": "0.5", "state_bytes": "8",
    "chance": "0.3", "eval": "recall",
}  # fmt: skip


@pytest.mark.parametrize(
    ("column", "text"),
    [("length", "x"), ("recall", "nan"), ("lr", "inf"), ("state_bytes", "many"), ("pairs", "")],
)
def test_a_cell_that_is_no_number_is_named_with_its_run(tmp_path, column, text):
    table = write_table(tmp_path / "table.csv", CELLS | {column: text})
    told = f"has {column} '{text}', which is no (finite|whole) number" if text else "has no pairs"
    with pytest.raises(UserError, match=f"run 'a' {told}"):
        plot.main([str(table), "--out", str(tmp_path / "x.png")])


def test_a_missing_column_is_named(tmp_path):
    row = {name: text for name, text in CELLS.items() if name not in ("lr", "chance")}
    table = write_table(tmp_path / "table.csv", row)
    with pytest.raises(UserError, match="has no column lr, chance"):
        plot.main([str(table), "--out", str(tmp_path / "x.png")])


def test_a_table_that_is_no_text_or_a_folder_is_told(tmp_path):
    binary = tmp_path / "table.csv"
    binary.write_bytes(b"\x89PNG\r\n\xff\x00")
    for path in (binary, tmp_path):
        with pytest.raises(UserError, match="can't be read as CSV"):
            plot.main([str(path), "--out", str(tmp_path / "x.png")])


def test_the_folder_of_the_plot_is_made_and_a_bad_output_is_told(tmp_path):
    table = write_table(tmp_path / "table.csv", CELLS)
    plot.main([str(table), "--out", str(tmp_path / "new/folder/x.png")])
    assert (tmp_path / "new/folder/x.png").stat().st_size > 10_000
    for out in (tmp_path / "x.xyz", table / "x.png"):
        with pytest.raises(UserError, match=r"--out '.*x\.(xyz|png)' can't be written"):
            plot.main([str(table), "--out", str(out)])


def test_equal_scores_whose_mean_rounds_outside_them_are_drawn(tmp_path):
    table = write_table(tmp_path / "table.csv", *(CELLS | {"seed": seed} for seed in "012"))
    plot.main([str(table), "--out", str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").is_file()


TEXT = CELLS | {"eval": "ppl", "slice": "256-511", "nll": "1.5"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "has losses on text and no recall"),
        ({"slice": "all"}, "has the slice 'all' in the eval ppl, which is no range"),
        ({"nll": ""}, "run 'a' has no nll in a row of the eval ppl"),
        ({"status": "failed: no", "seed": ""}, "run 'a' has no seed in a row of the eval ppl"),
        ({"lr": "", "seed": ""}, "run 'a' has no lr, seed in a row of the eval ppl"),
    ],
)
def test_a_row_on_text_is_checked(tmp_path, changes, told):
    with pytest.raises(UserError, match=told):
        plot.read_points(write_table(tmp_path / "table.csv", TEXT | changes))


@pytest.mark.parametrize(
    ("command", "changes", "told"),
    [
        (report, {"task": ""}, "has no task in a row of the eval recall"),
        (report, {"chance": "", "pairs": ""}, "has no pairs, chance in a row of the eval recall"),
        (report, TEXT | {"parameters": ""}, "has no parameters in a row of the eval ppl"),
        (report, {"status": "failed: no", "seed": ""}, "has no seed in a row of the eval recall"),
        (reproduce, {"slice": ""}, "has no slice in a row of the eval recall"),
        (reproduce, {"lr": "", "seed": ""}, "has no lr, seed in a row of the eval recall"),
        (reproduce, {"recall": ""}, "has no recall in a row of the eval recall"),
    ],
)
def test_report_and_reproduce_check_a_table_as_plot_does(tmp_path, command, changes, told):
    row = CELLS | {"task": "mqar", "parameters": "9"}
    rows = [row, row | changes | {"run": "b"}]
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as file:
        collect.write_rows(rows, file)
    names = "recall,ppl" if rows[1]["eval"] == "ppl" else "recall"
    arguments = {
        report: [str(table), "--eval", names, "--out", str(tmp_path / "page")],
        reproduce: ["placement", "--rows", str(table)],
    }
    with pytest.raises(UserError, match=f"run 'b' {told}"):
        command.main(arguments[command])
    assert not (tmp_path / "page").exists()


def test_a_table_that_excel_saved_is_read(tmp_path):
    table = write_table(tmp_path / "table.csv", CELLS)
    table.write_text(table.read_text(), encoding="utf-8-sig")
    (point,), _ = plot.read_points(table)
    assert point.score == 0.1


def test_to_leave_out_every_run_is_told(tmp_path):
    with pytest.raises(UserError, match="--without leaves no run"):
        plot.read_points(write_table(tmp_path / "table.csv", CELLS), without=["a"])

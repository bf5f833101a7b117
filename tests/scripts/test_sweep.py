"""Sweep, collect and plot: finished runs are skipped, a failed one is told and stops no other."""

import csv
import io
import re
import shutil
import threading

import pytest

import collect
import plot
import report
import sweep
import train_group
from fastweights import analysis, launching, sweeps
from fastweights import config as config_lib
from fastweights.errors import UserError
from fastweights.training import run_folder
from runs import ROOT, kill_at_step, run, start

CONFIG = f"""
from fastweights.config import load_dict

def get_config(arg=None):
    config = load_dict({str(ROOT / "tests/tiny.py")!r})
    config.steps = 4
    config.model.num_layers = 1
    config.optim.clip_norm = 0.0
    return config

def sweep():
    for pattern in ("A", "L"):
        yield {{"model.pattern": pattern, "optim.lr": 0.001, "seed": 0}}
    yield {{"model.pattern": "A", "optim.lr": 1e30, "seed": 1}}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Folder, exit code and output of a sweep of two good points and one that diverges."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "config.py").write_text(CONFIG)
    command = ["scripts/sweep.py", "--config", folder / "config.py", "--workdir", folder / "runs"]
    return folder, command, *run(*command, "--jobs", "2")


def test_a_failed_run_is_told_and_stops_no_other(swept):
    folder, _, code, output = swept
    assert code == 1, output
    assert "2 of 3 runs done" in output and "1 failed" in output
    (line,) = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert "pattern=A,lr=1e+30,seed=1: error: step " in line and "not finite" in line
    done = sorted(path.parent.name for path in (folder / "runs").glob("*/DONE"))
    assert done == ["pattern=A,lr=0.001,seed=0", "pattern=L,lr=0.001,seed=0"]


def test_finished_runs_are_skipped(swept):
    folder, command, _, _ = swept
    before = [path.stat().st_mtime_ns for path in (folder / "runs").glob("*/DONE")]
    code, output = run(*command)
    assert code == 1
    assert output.count("skipped (done)") == 2 and output.count("FAILED") == 1
    assert [path.stat().st_mtime_ns for path in (folder / "runs").glob("*/DONE")] == before


def test_collect_gives_a_line_a_slice_and_one_for_an_unfinished_run(swept, capsys):
    folder, *_ = swept
    collect.main([str(folder / "runs")])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    done = [row for row in rows if row["status"] == "done"]
    assert {(row["pattern"], row["slice"]) for row in done} == {
        (pattern, name) for pattern in "AL" for name in ("T8_K2", "T16_K3")
    }
    (failed,) = [row for row in rows if row["status"] != "done"]
    assert failed["status"].startswith("failed: ") and "not finite" in failed["status"]
    assert failed["recall"] == ""
    share = {row["pattern"]: float(row["attention_share"]) for row in rows}
    assert share == {"A": 1.0, "L": 0.0}
    state = {(row["pattern"], row["slice"]): int(row["state_bytes"]) for row in done}
    # Keys and values grow with length (2 x 4 heads x 4 wide x 4 bytes a token), a state does not.
    assert state["A", "T16_K3"] == 2 * state["A", "T8_K2"] == 16 * 128
    assert state["L", "T16_K3"] == state["L", "T8_K2"]


def test_the_report_is_one_page_that_needs_no_network(swept, tmp_path, capsys):
    folder, *_ = swept
    report.main([str(folder / "runs"), "--out", str(tmp_path / "page")])
    text = (tmp_path / "page" / "index.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', text) == []
    pictures = sorted((tmp_path / "page").glob("*.png"))
    assert len(pictures) == text.count("<img") == len(re.findall("<h3>", text)) == 4
    assert "not made equal in parameters or state" in text and "Fewer than four rates" in text
    assert "1 of them failed and count as a recall of 0" in text
    (failure,) = re.findall(r"<td>pattern=A,lr=1e\+30,seed=1</td><td>(failed: [^<]*)</td>", text)
    assert "not finite" in failure
    _, means, headline, *_ = text.split("<table>")
    assert headline.count("<tr>") == 1 + 2 * 2
    # Above them each model's mean over its slices, of chances 1/2 and 1/3.
    assert means.count("<td>mean of all</td>") == means.count("<td>0.417</td>") == 2
    # Chance of two pairs, and of three, and a cheater beside each.
    assert (
        "<td>0.500</td>" in headline
        and "<td>0.333</td>" in headline
        and "<td>-</td>" not in headline
    )
    with (tmp_path / "page" / "results.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)].count("done") == 4
    assert "figures" in capsys.readouterr().out


def test_the_report_of_a_csv_is_that_of_the_runs(swept, tmp_path, capsys):
    folder, *_ = swept
    collect.main([str(folder / "runs")])
    table = tmp_path / "runs.csv"
    table.write_text(capsys.readouterr().out)
    pages = []
    for name, source in (("a", folder / "runs"), ("b", table)):
        report.main([str(source), "--out", str(tmp_path / name)])
        pages.append((tmp_path / name / "index.html").read_text().replace("runs.csv", "runs"))
        assert (tmp_path / name / "results.csv").read_text() == table.read_text()
    assert pages[0] == pages[1]
    with pytest.raises(UserError, match=r"runs\.csv' is no folder, so say where"):
        report.main([str(table)])


def test_the_report_tells_what_was_made_equal_and_which_models_are_lost():
    def found(matched, run="a,lr=0.1,seed=0", status="done"):
        return {"run": run, "status": status, "eval": "recall", "slice": "T8_K2", "lr": 0.1,
                "seed": 0, "recall": 0.5, "matched": matched}  # fmt: skip

    def told(*rows):
        return report.scale(analysis.summarise(rows), list(rows))

    lost = found("", "c,lr=0.1,seed=0", "failed: not finite")
    assert "models made equal in state;" in told(found("state"))
    assert "not made equal" in told(found("state"), found("", "b,lr=0.1,seed=0"))
    assert "All runs of c failed, so the tables leave" in told(found(""), lost)
    assert "count as a recall of 0" not in told(found(""), lost)


def test_the_report_tells_losses_on_text(swept, tmp_path, capsys):
    folder, *_ = swept
    collect.main([str(folder / "runs")])
    table = tmp_path / "runs.csv"
    table.write_text(capsys.readouterr().out)
    rows = collect.read_rows(table)
    text = {"run": "task=text,lr=0.1,seed=0", "status": "done", "eval": "ppl", "slice": "16-63",
            "nll": 1.25, "lr": 0.1, "seed": 0, "attention_share": 0.5, "parameters": 7,
            "state_bytes": 8}  # fmt: skip
    with table.open("w", newline="") as file:
        collect.write_rows([*rows, text], file)
    report.main([str(table), "--eval", "recall,ppl", "--out", str(tmp_path / "page")])
    page = (tmp_path / "page" / "index.html").read_text()
    assert "<td>task=text</td><td>16-63</td><td>1.2500</td>" in page
    assert "<h3>loss on text against attention</h3>" in page and page.count("<img") == 5


def test_the_report_wants_a_finished_run(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        report.main([str(tmp_path)])
    folder = tmp_path / "seed=0"
    folder.mkdir()
    run_folder.mark_failed(folder, "no GPU")
    with pytest.raises(UserError, match=r"with recall in the eval recall .failed: no GPU"):
        report.main([str(tmp_path)])
    with pytest.raises(UserError, match=r"shows the evals recall, length, ppl, not age, whose"):
        report.main([str(tmp_path), "--eval", "recall,age,ppl"])


def test_collect_gathers_several_evals(tmp_path, swept):
    run = "pattern=L,lr=0.001,seed=0"
    shutil.copytree(swept[0] / "runs" / run, tmp_path / run)
    (tmp_path / run / "evals" / "length-4.json").write_text(
        '{"step": 4, "rows": [{"slice": "T24_K3", "length": 24, "recall": 0.5}]}'
    )
    rows = collect.collect(tmp_path, "recall,length")
    assert [(row["eval"], row["slice"]) for row in rows] == [
        ("recall", "T8_K2"), ("recall", "T16_K3"), ("length", "T24_K3")
    ]  # fmt: skip
    assert {row["task"] for row in rows} == {"mqar"}


def test_plot_draws_each_pattern_once(swept, tmp_path, capsys):
    folder, *_ = swept
    collect.main([str(folder / "runs")])
    table = tmp_path / "table.csv"
    table.write_text(capsys.readouterr().out)
    plot.main([str(table), "--out", str(tmp_path / "plot.png")])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["A", "L"]
    assert (tmp_path / "plot.png").stat().st_size > 10_000


GROUPED = (
    CONFIG.replace(
        "config.steps = 4",
        "config.steps, config.data.on_device = 8, True\n"
        "    config.data.mqar.train = ((16, 3, 1.0),)",
    ).split("def sweep")[0]
    + """
def sweep():
    return grid({"model.pattern": ["A"], "optim.lr": [0.001, 0.003], "seed": [0, 1]})
"""
)
GROUPED = "from fastweights.sweeps import grid\n" + GROUPED


def table(folder):
    """Collect's rows without the seconds, which no two runs share."""
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in collect.collect(folder, "recall")
    ]


def test_a_killed_sweep_of_a_group_ends_with_the_table_of_an_undisturbed_one(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(GROUPED)
    points = sweeps.read_points(str(config), [])
    (whole,) = sweeps.plan(tmp_path / "whole", points[:3], most=16)
    sweeps.note_group(whole)
    train_group.main([str(whole.folder)])

    runs_folder = tmp_path / "runs"
    # Begun by a sweep that had a point less: the group stays one of three.
    (begun,) = sweeps.plan(runs_folder, points[:3], most=16)
    sweeps.note_group(begun)
    process = start("scripts/train_group.py", begun.folder)
    kill_at_step(process, runs_folder / points[0].name, 5)
    assert not any((runs_folder / point.name / "DONE").is_file() for point in points)
    sizes = [len(u.points) for u in sweeps.plan(runs_folder, points, most=16)]
    assert sizes == [3, 1]
    train_group.main([str(begun.folder)])
    assert not begun.folder.exists()
    done = [sweeps.state(runs_folder, point) for point in points]
    assert done == ["done", "done", "done", "open"]
    assert len(table(runs_folder)) == 6
    assert table(runs_folder) == table(tmp_path / "whole")
    # The seeds and rates made different runs of them.
    assert len({row["nll"] for row in table(runs_folder)}) == 6


def test_points_alike_but_for_seed_and_rate_are_one_program_unless_that_is_too_large(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(GROUPED.replace('["A"]', '["A", "L"]'))

    def sizes(most, *fields):
        points = sweeps.read_points(str(config), list(fields))
        return [len(unit.points) for unit in sweeps.plan(tmp_path, points, most)]

    assert sizes(16) == [4, 4]
    assert sizes(3) == [3, 1, 3, 1]
    assert sizes(1) == sizes(16, "data.on_device=false") == [1] * 8


def test_failed_points_are_tried_again_only_when_asked(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(GROUPED)
    points = sweeps.read_points(str(config), [])
    folder = tmp_path / points[1].name
    folder.mkdir()
    (folder / "config.json").write_text(config_lib.to_json(points[1].config))
    run_folder.mark_failed(folder, "out of\nmemory")
    assert sweeps.state(tmp_path, points[1]) == "failed"
    (unit,) = sweeps.plan(tmp_path, points, most=16)
    assert [point.name for point in unit.points] == [points[i].name for i in (0, 2, 3)]
    (row,) = table(tmp_path)
    assert row["status"] == "failed: out of memory" and row["seed"] == 1
    run_folder.mark_done(folder, 8)
    assert sweeps.state(tmp_path, points[1]) == "done" and not run_folder.failure(folder)
    assert table(tmp_path)[0]["status"] == "done without the eval recall"
    # Another config in the same folder is another run.
    changed = sweeps.read_points(str(config), ["steps=9"])
    assert sweeps.state(tmp_path, changed[1]) == "open"


def test_processes_are_launched_in_one_way_and_an_interrupted_one_has_not_failed(
    tmp_path, monkeypatch, capsys
):
    config = tmp_path / "config.py"
    config.write_text(GROUPED)
    commands = []

    def pretend(command, log):
        commands.append(command)
        log.write_text("error: of before\n")
        return -15

    monkeypatch.setattr(launching, "here", lambda env, jobs: pretend)
    argv = ["--config", str(config), "--workdir", str(tmp_path / "runs"), "--group", "3"]
    assert sweep.main(argv) == 1
    assert "train_group.py" in commands[0][1] and "train.py" in commands[1][1]
    assert capsys.readouterr().out.count("stopped  pattern=A") == 4
    monkeypatch.setattr(launching, "here", lambda env, jobs: lambda command, log: 1)
    assert sweep.main(argv) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    # What a log says of an earlier start is no cause.
    assert len(told) == 4 and not any("of before" in line for line in told)
    with pytest.raises(UserError, match="--only 'pattern=B' is in no point's name"):
        sweep.main([*argv, "--only", "pattern=B"])


def test_a_grid_has_every_combination():
    axes = {"model.pattern,model.num_layers": [("GA", 4), ("G", 2)], "seed": sweeps.SEEDS}
    points = sweeps.grid(axes)
    assert len(points) == 6
    assert points[0] == {"model.pattern": "GA", "model.num_layers": 4, "seed": 0}
    assert points[-1] == {"model.pattern": "G", "model.num_layers": 2, "seed": 2}
    assert sweeps.learning_rates(3e-2) == (9.5e-4, 3e-3, 9.5e-3, 3e-2)


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({}, "no axes"),
        ({"seed": []}, "axis 'seed' has no values"),
        ({"seed": "012"}, "axis 'seed' has no values but '012'"),
        ({"seed": 3}, "axis 'seed' has no values but 3"),
        ({"seed": [0], "optim.lr,seed": [(1e-3, 1)]}, "two axes name the field seed"),
        ({"optim.lr,seed": [(1e-3,)]}, r"value \(0.001,\); it names 2 fields"),
    ],
)
def test_bad_axes_are_named(axes, told):
    with pytest.raises(UserError, match=told):
        sweeps.grid(axes)


def test_names_tell_fields_apart_that_end_alike():
    fields = {"seed": 0, "model.mixers.A.num_heads": 2, "model.mixers.G.num_heads": 4}
    assert sweeps.run_name(fields) == "seed=0,A.num_heads=2,G.num_heads=4"
    assert sweeps.run_name({"seed": 1, "data.seed": 2}) == "seed=1,data.seed=2"


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_another_process_trains_is_waited_for(tmp_path, monkeypatch, capsys, begun):
    """Such as one whose sweep was killed alone: it is in use and has not failed."""
    config = tmp_path / "config.py"
    config.write_text(GROUPED)
    point = sweeps.read_points(str(config), [])[0]
    folder = tmp_path / "runs" / point.name
    locks = [run_folder.claim(folder)] if begun else []

    def finish():
        (folder / "config.json").write_text(config_lib.to_json(point.config))
        run_folder.mark_done(folder, 8)
        locks.pop().close()

    def launch(command, log):
        """Finds that the other process, which was starting too, has the folder already."""
        assert not locks, "trained twice"
        locks.append(run_folder.claim(folder))
        other.start()
        log.write_text("error: the folder is in use\n")
        return 2

    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(launching, "here", lambda env, jobs: launch)
    other, in_use = threading.Timer(0.1, finish), run_folder.in_use

    def asked(workdir):
        """Only then does the other come to its end, however long the sweep took to ask."""
        found = in_use(workdir)
        if begun and other.ident is None:
            other.start()
        return found

    monkeypatch.setattr(run_folder, "in_use", asked)
    argv = ["--config", str(config), "--workdir", str(tmp_path / "runs"), "--only", point.name]
    assert sweep.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"waiting  {point.name}: another process trains it"
    assert lines[2] == f"skipped (done)  {point.name}"


@pytest.mark.parametrize(
    "body, told",
    [
        ("", r"defines no sweep\(\)"),
        ("def sweep(): return []", r"yields no point"),
        ("def sweep(): return [{'seed': 0}, {'seed': 0}]", r"two points .* 'seed=0'"),
        ("def sweep(): return [{'model.d_modle': 3}]", r"sweep point 'd_modle=3'.*did you mean"),
    ],
)
def test_a_bad_sweep_is_refused_before_any_run(tmp_path, body, told):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.split("def sweep")[0] + body + "\n")
    with pytest.raises(UserError, match=told):
        sweep.main(["--config", str(path), "--workdir", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()


def test_an_override_of_a_field_that_the_points_set_is_refused(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    with pytest.raises(
        UserError, match=r"--config.seed=3 would change nothing: .*config\.py gives"
    ):
        sweeps.read_points(str(path), ["steps=9", "seed=3"])


def test_collect_and_plot_name_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        collect.main([str(tmp_path)])
    with pytest.raises(UserError, match=r"does not exist; check the path, or make a table"):
        plot.main([str(tmp_path / "none.csv"), "--out", str(tmp_path / "x.png")])
    table = tmp_path / "table.csv"
    filled = {"run": "a", "status": "unfinished", "eval": "recall"}
    cells = [filled.get(name, "") for name in plot.COLUMNS]
    table.write_text(f"{','.join(plot.COLUMNS)}\n{','.join(cells)}\n")
    with pytest.raises(UserError, match="no finished run"):
        plot.main([str(table), "--out", str(tmp_path / "x.png")])

"""Claims and verdicts; the memory probe; configs of configs/recall/."""

import dataclasses

import numpy as np
import pytest

import collect
import reproduce
from fastweights import config as config_lib
from fastweights import sweeps
from fastweights.errors import UserError
from fastweights.evals import perplexity
from fastweights.probe import memory_probe
from fastweights.reproduction import Claim, Order, judge, mean_of_slices, published
from fastweights.tasks import eval_slices
from fastweights.training import group, metrics

NAMES = sorted(path.stem for path in reproduce.CONFIGS.glob("*.py"))


def row(seed, lr, recall, run="task=a,layers=G", status="done"):
    return {
        "run": f"{run},lr={lr},seed={seed}", "status": status, "eval": "recall", "slice": "T8_K2",
        "lr": lr, "seed": seed, "recall": recall, "chance": 0.5,
    }  # fmt: skip


ROWS = [row(0, 0.1, 0.9), row(1, 0.1, 0.7), row(0, 0.2, 1.0), row(1, 0.2, 0.2)]


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (Claim("task=a,layers=G", "T8_K2", low=0.7), True),
        (Claim("task=a,layers=G", "T8_K2", low=0.75), False),
        (Claim("task=a,layers=G", "T8_K2", high=0.85), False),
        (Claim("task=a,layers=G", "T8_K2", low=0.75, over="mean"), True),
        (published("task=a,layers=G", "T8_K2", 0.83, within=0.03, source=""), True),
        (published("task=a,layers=G", "T8_K2", 0.84, within=0.03, source=""), False),
    ],
)
def test_a_claim_is_judged_at_the_rate_of_the_best_mean(claim, holds):
    verdict = judge(claim, ROWS)
    assert verdict.scores == (0.9, 0.7) and verdict.chance == 0.5
    assert verdict.holds == holds


@pytest.mark.parametrize(
    ("order", "holds", "note"),
    [
        (Order("task=a,layers=G", "task=a,layers=L", "T8_K2", 0.29), True, "0.800 against 0.500"),
        (Order("task=a,layers=G", "task=a,layers=L", "T8_K2", 0.31), False, "0.800 against 0.500"),
        (Order("task=a,layers=L", "task=a,layers=G", "T8_K2", -0.29), False, "0.500 against 0.800"),
        (Order("task=a,layers=L", "task=a,layers=G", "T8_K2", -0.31), True, "0.500 against 0.800"),
        # The rate of the lowest mean loss is another one.
        (Order("task=a,layers=L", "task=a,layers=G", "T8_K2", 0.2, measure="nll"), True,
         "1.000 against 1.250"),
        (Order("task=a,layers=G", "task=a,layers=L", "T8_K2", 0.0, measure="nll"), False,
         "1.250 against 1.000"),
        (Order("task=a,layers=G", "task=a,layers=L", "T8_K2", 0.1, apart=0.31), True,
         "0.800 against 0.500"),
        (Order("task=a,layers=G", "task=a,layers=L", "T8_K2", 0.1, apart=0.29), False,
         "0.800 against 0.500"),
        (Order("task=a,layers=G", "task=a,layers=L", "T8_K2", least=0.81), False,
         "0.800 against 0.500"),
        (Order("task=a,layers=G", "task=a,layers=S", "T8_K2"), False, "no such run"),
    ],
)  # fmt: skip
def test_an_order_is_that_of_the_means_each_at_its_best_rate(order, holds, note):
    other = [row(0, 0.1, 0.5, run="task=a,layers=L") | {"nll": 1.0}]
    losses = (2.0, 2.0, 1.0, 1.5)
    mine = [found | {"nll": nll} for found, nll in zip(ROWS, losses, strict=True)]
    verdict = judge(order, mine + other)
    assert (verdict.holds, verdict.note) == (holds, note)
    if "0.800 against" in note:
        told = f"{note} (seeds 0.900 0.700 against 0.500)"
        assert reproduce.scores(verdict) == told


def test_the_best_of_some_rates_is_taken_for_each_seed():
    """As a table does that tells the best of one run a rate."""
    claim = Claim("task=a,layers=G", "T8_K2", low=0.85, over="best")
    verdict = judge(claim, ROWS)
    assert verdict.scores == (1.0, 0.7) and verdict.holds
    assert not judge(dataclasses.replace(claim, low=0.86), ROWS).holds


@pytest.mark.parametrize(
    ("claim", "rows", "note"),
    [
        (Claim("task=a,layers=GG", "T8_K2"), ROWS, "no such run"),
        (Claim("task=a,layers", "T8_K2"), ROWS, "no such run"),
        (Claim("task=a,layers=G", "T8_K3"), ROWS, "no slice T8_K3 in recall"),
        (
            Claim("task=a,layers=G", "T8_K2"),
            [*ROWS, row(2, 0.1, None, status="failed: not finite at step 3")],
            "seed=2 failed: not finite at step 3",
        ),
        (
            mean_of_slices("task=a,layers=G", 0.8, within=0.03, source=""),
            [*ROWS, row(0, 0.1, None, status="done without the eval length") | {"eval": "length"}],
            "seed=0 done without the eval length",
        ),
    ],
)
def test_what_is_missing_speaks_against_a_claim(claim, rows, note):
    verdict = judge(claim, rows)
    assert not verdict.holds and verdict.note.endswith(note)
    assert reproduce.scores(verdict) == verdict.note


def test_a_mean_is_over_slices_of_all_evals_and_leaves_kinds_out():
    longer = {"eval": "length", "slice": "T99_K2", "chance": 0.1}
    kind = {"slice": "T8_K2/updated"}
    rows = [row(0, 0.1, 0.9), {**row(0, 0.1, 0.1), **longer}, {**row(0, 0.1, 0.0), **kind}]
    verdict = judge(mean_of_slices("task=a,layers=G", 0.52, within=0.03, source=""), rows)
    assert verdict.scores == (0.5,) and verdict.holds
    assert verdict.chance == pytest.approx(0.3)


def test_the_notes_tell_claims_scores_and_place():
    verdicts = [judge(Claim("task=a,layers=G", "T8_K2", low=low, source="us"), ROWS)
                for low in (0.5, 0.8)]  # fmt: skip
    rows = [row | {"seconds": 2.5} for row in ROWS]
    text = reproduce.markdown("tiny", verdicts, rows, reproduce.here())
    assert "1 of 2 claims hold; 4 runs, 10 s of training" in text
    assert "| task=a,layers=G | T8_K2 | 0.500 | >= 0.8 | 0.900 0.700 | **no** | us |" in text


def rows_of(point):
    """What a run of the point would leave, of each eval the slices it scores: those of guesses."""
    config = point.config
    data = config.data
    if data.kind == "text":
        parts = perplexity.by_position(np.ones(data.length), np.ones(data.length, int))
        rows = [part | {"eval": "ppl"} for part in parts]
    else:
        rows = [
            {"eval": "length" if part.length > data.length else "recall", "slice": part.name,
             "chance": part.chance, "recall": part.chance}
            for part in eval_slices(data.task)
        ]  # fmt: skip
    common = {"run": point.name, "status": "done", "lr": config.optim.lr, "seed": config.seed}
    return [common | row for row in rows if row["eval"] in config.eval.final.split(",")]


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_is_on_runs_that_its_sweep_makes(tmp_path, name):
    spec = str(reproduce.CONFIGS / f"{name}.py")
    points = sweeps.read_points(spec, [])
    rows = [row for point in points for row in rows_of(point)]
    claims = config_lib.call_config_file(spec, "claims", pass_arg=False)
    for verdict in (judge(claim, rows) for claim in claims):
        if not verdict.claim.runs.startswith("probe="):
            assert verdict.scores, (verdict.claim, verdict.note)
            assert verdict.claim.source
            # But for what a model is said not to learn, guesses meet no claim.
            fails = isinstance(verdict.claim, Claim) and verdict.claim.low == 0
            assert fails or verdict.claim.measure == "nll" or not verdict.holds, verdict.claim
    # Seeds and rates of a model are one program.
    units = sweeps.plan(tmp_path, points, 16)
    alone = [unit for unit in units if len(unit.points) == 1]
    models = {point.name.partition(",lr=")[0] for point in points}
    if name not in ("cpu", "state_tracking", "zoology"):
        assert {unit.points[0].config.data.kind for unit in alone} <= {"text"}
        assert len(units) - len(alone) == sum("task=text" not in model for model in models)


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("ratio", "task=k_hop,pattern=G"),
        ("placement", "place=first"),
        ("niah", "variant=single_2,mixer=G"),
        ("extrapolation", "rope=0.0"),
        ("parity_retrieval", "layers=GGGA2"),
    ],
)
def test_a_small_model_of_each_config_trains_with_its_other_seeds_and_rates(tmp_path, name, arg):
    # One layer, the same in all: compiling is what this costs.
    few = ["batch_size=2", "eval.every=0", "eval.stop_at=0", "log.every=1", "checkpoint.every=2",
           "model.pattern=A", "model.num_layers=1"]  # fmt: skip
    spec = f"{reproduce.CONFIGS / name}.py:{arg}"
    folders = {
        tmp_path / seed: config_lib.load(spec, [*few, f"seed={seed}", f"optim.lr=1e-{seed}"])
        for seed in "23"
    }
    # To be stopped right after a checkpoint is no reason to save again.
    assert not group.train(tmp_path / "group", folders, lambda step: step == 2)
    losses = [[found["loss"] for found in metrics.read_metrics(path, "train")] for path in folders]
    assert len(losses[0]) == 2 and losses[0] != losses[1]
    assert np.isfinite(losses).all()


def test_the_delta_rule_overwrites_and_addition_sums():
    again = {rule: memory_probe(rule, key_dim=32, pairs=16, rewritten=8) for rule in
             ("additive", "delta")}  # fmt: skip
    assert 0.45 < again["additive"] < 0.55 and again["delta"] > 0.99
    once = {rule: memory_probe(rule, key_dim=32, pairs=16) for rule in again}
    assert once["additive"] > 0.99 > once["delta"] > 0.9
    assert memory_probe("delta", key_dim=32, pairs=16, decay=0.95) < once["delta"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(rule="hebb", pairs=4), "knows no rule 'hebb'"),
        (dict(rule="delta", pairs=4, rewritten=5), "writes 5 of 4 keys again"),
        (dict(rule="delta", pairs=4, decay=1.5), "decay is 1.5"),
    ],
)
def test_the_probe_names_bad_options(options, told):
    with pytest.raises(UserError, match=told):
        memory_probe(**options, key_dim=8)


@pytest.fixture
def points(tmp_path, monkeypatch):
    """The points of a reproduction "mine", one a row of ROWS, and its one claim."""
    source = (
        "from fastweights.reproduction import Claim\n"
        "def claims():\n    yield Claim('task=a,layers=G', 'T8_K2', low=0.75)\n"
    )
    points = [sweeps.Point(found["run"], "", (), config_lib.Config()) for found in ROWS]
    monkeypatch.setattr(reproduce.sweeps, "read_points", lambda *_: points)
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.setattr(reproduce, "CONFIGS", tmp_path)
    return points


def test_a_run_that_left_nothing_speaks_against_a_claim(points, tmp_path, monkeypatch):
    """As one does that was killed before it had a folder."""
    monkeypatch.setattr(reproduce.sweep, "main", lambda argv: 1)
    monkeypatch.setattr(reproduce.collect, "collect", lambda *_: ROWS[:1])
    notes = tmp_path / "notes.md"
    command = ["mine", "--notes", str(notes), "--workdir", str(tmp_path)]
    assert reproduce.main(command) == 1 and not notes.exists()
    del points[1:]
    assert reproduce.main(command) == 0 and "1 of 1 claims hold" in notes.read_text()
    with pytest.raises(UserError, match="--made 'now' goes with --rows"):
        reproduce.main([*command, "--made", "now"])


def test_rows_made_elsewhere_are_judged_and_nothing_is_trained(
    points, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(reproduce.sweep, "main", lambda argv: pytest.fail("runs"))
    tables = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for table, found in zip(tables, (ROWS, ROWS[:1]), strict=True):
        with table.open("w", newline="") as file:
            collect.write_rows(found, file)
    notes = tmp_path / "notes.md"
    command = ["mine", "--notes", str(notes), "--rows"]
    assert reproduce.main([*command, str(tables[0])]) == 1
    assert "0 of 1 claims hold" in capsys.readouterr().out
    # A run that is in neither speaks against the claim.
    assert reproduce.main([*command, str(tables[1])]) == 1
    assert "1 of 4 runs are there" in capsys.readouterr().out
    del points[1:]
    assert reproduce.main([*command, str(tables[1])]) == 0
    # Where the runs were made is not known here, unless it is told.
    assert not notes.exists()
    assert reproduce.main([*command, str(tables[1]), "--made", "2026, one TPU"]) == 0
    assert notes.read_text().startswith("\n## mine: 2026, one TPU\n\n1 of 1 claims hold; 1 runs,")


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"no reproduction 'zoo'; known: .*cpu"):
        reproduce.main(["zoo", "--workdir", "x"])
    with pytest.raises(UserError, match=r"is 0.9 to 0.5 over each"):
        Claim("a", "b", low=0.9, high=0.5)
    with pytest.raises(UserError, match="is by 'loss'; give recall or nll"):
        Order("a", "b", "c", measure="loss")


@pytest.mark.parametrize(
    ("body", "told"),
    [("return []", "yields none"), ("yield Claim('a', 'b', eval='recal')", "'recal' does not")],
)
def test_bad_claims_are_told_before_anything_runs(tmp_path, monkeypatch, body, told):
    source = f"from fastweights.reproduction import Claim\ndef claims():\n    {body}\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.setattr(reproduce, "CONFIGS", tmp_path)
    monkeypatch.setattr(reproduce.sweep, "main", lambda argv: pytest.fail("runs"))
    with pytest.raises(UserError, match=told):
        reproduce.main(["mine", "--workdir", str(tmp_path / "runs")])

"""Claims and verdicts; the memory probe; configs of configs/recall/."""

import pytest

import reproduce
from fastweights import config as config_lib
from fastweights import reproduction, sweeps
from fastweights.errors import UserError
from fastweights.probe import memory_probe
from fastweights.reproduction import Claim, judge, mean_of_slices, published
from fastweights.tasks import eval_slices

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
    text = reproduce.markdown("tiny", verdicts, [row | {"seconds": 2.5} for row in ROWS])
    assert "1 of 2 claims hold; 4 runs, 10 s of training" in text
    assert "| task=a,layers=G | T8_K2 | 0.500 | >= 0.8 | 0.900 0.700 | **no** | us |" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_is_on_runs_that_its_sweep_makes(name):
    spec = str(reproduce.CONFIGS / f"{name}.py")
    points = sweeps.read_points(spec, [])
    rows = [
        {"run": point.name, "status": "done", "eval": eval_name, "slice": part.name, "lr": 0,
         "seed": point.config.seed, "recall": 1.0, "chance": part.chance}
        for point in points
        for part in eval_slices(point.config.data.task)
        for eval_name in point.config.eval.final.split(",")
    ]  # fmt: skip
    claims = config_lib.call_config_file(spec, "claims", pass_arg=False)
    for verdict in reproduction.judge_all(claims, rows):
        if not verdict.claim.runs.startswith("probe="):
            assert verdict.scores, (verdict.claim, verdict.note)
            assert verdict.claim.source


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


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"no reproduction 'zoo'; known: .*cpu"):
        reproduce.main(["zoo", "--workdir", "x"])
    with pytest.raises(UserError, match=r"is 0.9 to 0.5 over each"):
        Claim("a", "b", low=0.9, high=0.5)
    with pytest.raises(UserError, match="yields none"):
        reproduction.judge_all([], ROWS)

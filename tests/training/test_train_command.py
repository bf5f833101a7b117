"""The commands train.py and eval.py from their arguments to the run folder."""

import json

import numpy as np
import pytest

import eval as eval_command
import runs
import train
from fastweights.errors import UserError
from fastweights.training import metrics
from runs import TINY

PLAIN = ("model.pattern=A", "model.num_layers=1", "steps=6", "checkpoint.every=2")


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """A finished run on text with evals in training, and what it printed."""
    workdir = tmp_path_factory.mktemp("command") / "run"
    fields = (*PLAIN, "eval.every=2", "log.every=2", "checkpoint.keep_last=9")
    code, output = runs.run(
        *runs.train_command(workdir, *fields, spec=f"{TINY}:text"), JAX_LOG_COMPILES="1"
    )
    assert code == 0, output
    return workdir, output


def test_a_run_compiles_its_step_exactly_once(text_run):
    _, output = text_run
    started = [line for line in output.splitlines() if "Compiling jit(train_step)" in line]
    assert len(started) == 1
    # After the first two steps (whose metrics and first eval bring their own small programs)
    # nothing compiles until the final evals.
    tail = output[output.index("step 4/6") : output.index("step 6/6")]
    assert "Compiling" not in tail


def test_the_banner_tells_devices_sizes_work_and_memory(text_run):
    _, output = text_run
    for told in ("1 x cpu", "mesh data 1", "A (1 x A)", "parameters  ", "768 tokens",
                 "MFLOPs a token", "temporaries", "compile "):  # fmt: skip
        assert told in output, told


def test_the_folder_holds_config_metrics_checkpoints_and_evals(text_run):
    workdir, _ = text_run
    records = metrics.read_metrics(workdir)
    assert [(r["kind"], r["step"]) for r in records] == [
        ("train", 1), ("train", 2), ("eval", 2), ("train", 4), ("eval", 4), ("train", 6),
        ("eval", 6), ("final", 6),
    ]  # fmt: skip
    assert {"ppl/nll", "ppl/ppl", "ppl/bits_per_byte"} <= records[2].keys()
    assert {"loss", "lr", "tokens_per_s", "data_wait", "grad_norm", "seconds"} <= records[0].keys()
    assert "mfu" not in records[0], "a CPU has no known peak, so no MFU may be told"
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"2", "4", "6"}
    assert records[0]["tokens_per_s"] > 0
    info = json.loads((workdir / "run.json").read_text())
    assert len(info["id"]) == 8 and info["starts"][0]["versions"]["jax"]
    assert (workdir / "DONE").read_text() == "6\n"
    assert not list(workdir.glob(".*tmp"))


def test_evaluating_the_last_checkpoint_gives_the_final_evals_again(text_run, capsys):
    workdir, _ = text_run
    final = json.loads((workdir / "evals" / "ppl-6.json").read_text())
    assert eval_command.main(["--workdir", str(workdir)]) == 0
    again = json.loads((workdir / "evals" / "ppl-6.json").read_text())
    np.testing.assert_allclose(again["metrics"]["nll"], final["metrics"]["nll"], rtol=1e-5)
    assert "ppl at step 6" in capsys.readouterr().out


def test_evaluating_an_earlier_step_gives_what_training_logged_then(text_run):
    workdir, _ = text_run
    logged = metrics.read_metrics(workdir, "eval")[0]["ppl/nll"]
    eval_command.main(["--workdir", str(workdir), "--step", "2", "--evals", "ppl,length"])
    found = json.loads((workdir / "evals" / "ppl-2.json").read_text())["metrics"]["nll"]
    np.testing.assert_allclose(found, logged, rtol=1e-5)
    assert (workdir / "evals" / "length-2.json").is_file()


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--step", "3"], r"no checkpoint of step 3; it has \[2, 4, 6\]"),
        (["--evals", "bleu"], "eval 'bleu' does not exist; known: recall"),
        (["--evals", "recall"], "no recall slices"),
        (["--config.model.dtype=bfloat16"], "model.dtype=bfloat16 would change the model"),
        (["--config.model.d_modle=3"], "did you mean 'model.d_model'"),
    ],
)
def test_eval_names_what_it_cannot_do(text_run, arguments, told):
    workdir, _ = text_run
    with pytest.raises(UserError, match=told):
        eval_command.main(["--workdir", str(workdir), *arguments])


def test_eval_with_other_data_is_printed_and_not_written(text_run, capsys):
    workdir, _ = text_run
    before = (workdir / "evals" / "ppl-6.json").read_text()
    eval_command.main(["--workdir", str(workdir), "--config.eval.max_batches=1"])
    assert "ppl at step 6" in capsys.readouterr().out
    assert (workdir / "evals" / "ppl-6.json").read_text() == before


def test_eval_leaves_a_save_in_flight_alone(text_run):
    workdir, _ = text_run
    writing = workdir / "checkpoints" / "9.orbax-checkpoint-tmp"
    writing.mkdir()
    eval_command.main(["--workdir", str(workdir)])
    assert writing.exists()
    writing.rmdir()


def test_eval_refuses_data_beyond_the_models_vocabulary(tmp_path):
    workdir = tmp_path / "run"
    train.main(runs.train_command(workdir, *PLAIN)[1:])
    with pytest.raises(UserError, match="use 64 token ids but the model's vocab_size is 32"):
        eval_command.main(["--workdir", str(workdir), "--config.data.mqar.vocab_size=64"])


def test_evals_and_saves_do_not_count_in_the_speed(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    progress = metrics.Progress(100, 0, seconds=5.0, quiet=True)
    progress.waited(1.0)
    progress.leave_out(8.0)
    speeds = progress.interval(20, tokens_per_step=3, flops_per_step=1.0, peak_flops=None)
    progress.close()
    assert speeds["tokens_per_s"] == 20 * 3 / 2.0
    assert speeds["data_wait"] == 0.5
    assert speeds["seconds"] == 15.0


def test_eval_of_no_run_says_so(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        eval_command.main(["--workdir", str(tmp_path)])


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    train.main([*runs.train_command(tmp_path / "run", *PLAIN)[1:], "--dry_run"])
    output = capsys.readouterr().out
    assert "8 x cpu" in output and "temporaries" in output
    assert not (tmp_path / "run").exists()


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path):
    workdir = tmp_path / "run"
    fields = (*PLAIN, "eval.every=2", "checkpoint.keep_last=1", "checkpoint.keep_best=1")
    train.main([*runs.train_command(workdir, *fields)[1:], "--config.steps=8"])
    scores = {r["step"]: r["recall/mean"] for r in metrics.read_metrics(workdir, "eval")}
    kept = {int(path.name) for path in (workdir / "checkpoints").iterdir()}
    best = {step for step, score in scores.items() if score == max(scores.values())}
    assert 8 in kept and kept <= best | {8} and kept & best


@pytest.mark.parametrize("steps", [2, 20], ids=["inside", "past the end"])
def test_a_profiler_window_leaves_a_trace(tmp_path, steps):
    fields = (*PLAIN, "log.profile_start=2", f"log.profile_steps={steps}")
    train.main(runs.train_command(tmp_path / "run", *fields)[1:])
    assert list((tmp_path / "run" / "profile").glob("**/*.xplane.pb"))


def test_offline_wandb_goes_on_with_one_id(tmp_path):
    workdir = tmp_path / "run"
    fields = (*PLAIN, "log.wandb=offline")
    runs.train(workdir, *fields)
    runs.train(workdir, *fields, "steps=8")
    identity = json.loads((workdir / "run.json").read_text())["id"]
    folders = [path.name for path in (workdir / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert all(name.endswith(identity) for name in folders)

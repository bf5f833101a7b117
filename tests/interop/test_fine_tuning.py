"""An imported model is a run like any other: it trains, resumes, evaluates and goes out again."""

import shutil

import numpy as np
import pytest

import export_hf
import import_hf
import published
import runs
from fastweights import config as config_lib
from fastweights import interop
from fastweights.errors import UserError
from fastweights.training import run_folder

SOURCE = published.DATA / "geometries" / "mamba2"
FIELDS = (
    "steps=50",
    "data.length=32",
    "optim.warmup_steps=5",
    "checkpoint.every=25",
    "log.every=1",
    "eval.max_batches=2",
)


def go_on(run, *overrides):
    """Trains what is in the folder, with its own config."""
    fields = [f"--config.{field}" for field in overrides]
    code, output = runs.run("train.py", "--workdir", run, *fields)
    assert code == 0, output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`run`, trained; `start` and `tuned`, exported before and after."""
    folder = tmp_path_factory.mktemp("imported")
    run = folder / "run"
    overrides = [f"--config.{field}" for field in FIELDS]
    import_hf.main([str(SOURCE), "--workdir", str(run), *overrides])
    export_hf.main(["--workdir", str(run), "--out", str(folder / "start")])
    go_on(run, "optim.lr=3e-3")
    export_hf.main(["--workdir", str(run), "--out", str(folder / "tuned")])
    return folder


def test_before_training_all_goes_out_as_it_came_in(folder):
    published.assert_same_folder(folder / "start", SOURCE)


def test_the_loss_falls_at_the_rate_asked_for_last(folder):
    losses = runs.read_losses(folder / "run")
    assert np.mean([losses[i] for i in range(46, 51)]) < losses[1] - 1.0
    assert run_folder.load_config(folder / "run").optim.lr == 3e-3


def test_it_resumes_bit_for_bit(folder, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(folder / "run", again)
    shutil.rmtree(again / "checkpoints" / "50")
    go_on(again)
    runs.assert_same_run(folder / "run", again)


def test_what_goes_out_is_what_was_trained(folder):
    """It loads as it did, with the dtypes it had, and every tensor has moved to where it is now."""
    before, after = (interop.open_checkpoint(path) for path in (SOURCE, folder / "tuned"))
    kinds = [
        {n: e.dtype for n, e in f.entries.items()}
        for c in (before, after)
        for f in c.files.values()
    ]
    assert kinds[0] == kinds[1]
    trained = runs.final_state(folder / "run")
    for name in before.published:
        assert not np.array_equal(before.read(name), after.read(name)), name
    embedding = after.read("embeddings.weight")
    wide = trained["params.embedding"]
    np.testing.assert_array_equal(embedding, wide.astype(embedding.dtype))
    gate = trained["params.groups.layer_0.mixer.read_out.gate.kernel"][1]
    projection = after.read("layers.1.mixer.in_proj.weight")
    np.testing.assert_array_equal(projection[:64], gate.T.astype(projection.dtype))


def test_another_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"d_model=16 would be another model .* \(it is 32\)"):
        import_hf.main(
            [str(SOURCE), "--workdir", str(tmp_path / "run"), "--config.model.d_model=16"]
        )
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_not_trained_may_change_all_but_its_model(folder, tmp_path):
    stored, imported = run_folder.load_config(folder / "run"), tmp_path / "checkpoints" / "0"
    imported.mkdir(parents=True)
    (imported / "_CHECKPOINT_METADATA").write_text("")
    shutil.copy(folder / "run" / "config.json", tmp_path)
    asked = config_lib.override(stored, ["optim.name=muon", "data.length=64", "model.remat=full"])
    changed = run_folder.check_config(tmp_path, asked)
    assert set(changed) == {"optim.name", "data.length", "model.remat"}
    with pytest.raises(UserError, match=r"model\.num_layers: stored 2, asked 3"):
        run_folder.check_config(tmp_path, config_lib.override(stored, ["model.num_layers=3"]))

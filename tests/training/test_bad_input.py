"""A user's mistake gives one sentence with the value and the remedy, and leaves the disk alone."""

import functools
import json
import pathlib
import shutil

import pytest

import runs
import train
from fastweights import sharding
from fastweights.errors import UserError
from fastweights.training import checkpoint, optim, run_folder
from fastweights.training.state import make_blueprint
from fastweights.training.step import compile_step
from runs import TINY

# Fast to compile, for the mistakes that show only after the model is built.
PLAIN = ("model.pattern=A", "model.num_layers=1", "steps=4", "checkpoint.every=2")


@functools.cache
def compiled_step(config):
    """The step of a config, which many of the runs here share."""
    mesh = sharding.make_mesh(config.mesh)
    tx = optim.make_optimizer(config.optim, config.steps)
    return compile_step(config, make_blueprint(config.model, tx, mesh), tx, mesh)


@pytest.fixture(autouse=True, scope="module")
def _compile_a_config_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "compile_step", lambda config, *_: compiled_step(config))
        yield


def command(workdir: pathlib.Path, *overrides: str, spec: str = TINY) -> list[str]:
    return runs.train_command(workdir, *overrides, spec=spec)[1:]


@pytest.mark.parametrize(
    "override, told",
    [
        ("model.d_modle=3", "'model.d_modle' does not exist; did you mean 'model.d_model'?"),
        ("modle.d_model=3", "did you mean 'model.d_model'?"),
        ("steps=1e3", "'steps' takes a value of type int, got '1e3'"),
        ("optim.lr=fast", "'optim.lr' takes a value of type float, got 'fast'"),
        ("model.tie_embeddings=maybe", "takes a value of type bool, got 'maybe'"),
        ("data.mqar.train=(8,", "takes a value of type tuple, got '(8,'"),
        ("model=3", "'model' is a group of fields; set one of:"),
        ("model.pattern=GXA", "unknown letter 'X'; known letters"),
        ("model.pattern=", "empty"),
        ("steps=0", "steps is 0; set it to 1 or more"),
        ("batch_size=9", "9 rows cannot be cut over data x fsdp = 8 devices"),
        ("accum_steps=3", "batch_size 8 is not divisible by accum_steps 3"),
        ("mesh.fsdp=3", "fixes 3 devices, which does not divide the 8 present"),
        ("mesh.data=2", "takes 2 devices but 8 are present"),
        ("model.mixers.A.num_kv_heads=3", "num_kv_heads"),
        ("model.mixers.G.num_qk_heads=3", "num_qk_heads"),
        ("model.vocab_size=20", "data use 32 token ids but the model's vocab_size is 20"),
        ("data.kind=mnist", "data.kind is 'mnist'; it must be one of"),
        (
            "model.decoder=positions",
            "'positions' but data.kind is 'mqar', whose models have 'none'",
        ),
        ("data.length=8", "mqar.train has a slice of length 16 but the row length is 8"),
        ("eval.final=recal", "eval 'recal' does not exist; known: recall"),
        ("log.wandb=maybe", "log.wandb is 'maybe'; use disabled, offline or online"),
        ("eval.final=ppl", "data.kind is 'mqar', which has no held-out text"),
        ("eval.final=,", "the list of evals ',' is empty"),
        ("checkpoint.keep_best=1", "so that there is no best to keep"),
        ("z_loss=-1.0", "z_loss is -1.0; use 0 (none) or a weight above"),
        ("optim.lr=inf", "optim.lr is inf; it must be positive"),
        ("steps=99999999999999999999", "it must be less than 2**31"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last is 0; set it to 1 or more"),
    ],
)
def test_a_bad_field_is_named_with_its_value(tmp_path, override, told):
    workdir = tmp_path / "run"
    with pytest.raises(UserError) as caught:
        train.main(command(workdir, override))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not workdir.exists()


@pytest.mark.parametrize(
    "source, told",
    [
        (None, "does not exist; check the path"),
        ("x = 1", "defines no get_config(); add it"),
        ("def get_config(arg=None):\n    return 3", "returned int; it must return a ConfigDict"),
        ("def get_config(arg=None):\n    return 1 / 0", "failed with ZeroDivisionError"),
        ("def get_config(:", "failed with SyntaxError"),
        (
            "from fastweights.config import defaults\n"
            "def get_config(arg=None):\n    c = defaults()\n    c.model.d_modle = 3\n    return c",
            "d_modle",
        ),
        (
            "from fastweights.config import defaults\n"
            "def get_config(arg=None):\n    c = defaults()\n    c.steps = 'many'\n    return c",
            "steps",
        ),
    ],
)
def test_a_bad_config_file_is_named(tmp_path, source, told):
    path = tmp_path / "config.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(UserError) as caught:
        train.main(command(tmp_path / "run", spec=str(path)))
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_an_unknown_config_argument_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match="config argument 'txt' does not exist; did you mean"):
        train.main(command(tmp_path / "run", spec=f"{TINY}:txt"))


def test_an_unknown_argument_is_refused(tmp_path):
    with pytest.raises(UserError, match="argument '--dryrun' is not known"):
        train.main([*command(tmp_path / "run"), "--dryrun"])


def test_missing_prepared_data_are_named(tmp_path):
    fields = ("data.text.path=nowhere", "steps=4")
    with pytest.raises(UserError, match=r"no meta.json in 'nowhere'"):
        train.main(command(tmp_path / "run", *fields, spec=f"{TINY}:text"))
    assert not (tmp_path / "run").exists()


def test_the_command_prints_one_line_and_exits_with_two(tmp_path):
    code, output = runs.run(*runs.train_command(tmp_path / "run", "model.d_modle=3"))
    assert code == 2
    assert output.startswith("error: ") and output.count("\n") == 1


def test_a_workdir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    workdir = tmp_path / "file" / "run"
    with pytest.raises(UserError, match=r"workdir '.*/file/run' can't be written"):
        train.main(command(workdir, *PLAIN))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("bad_input") / "run"
    train.main(command(workdir, *PLAIN))
    return workdir


@pytest.fixture
def copy(finished, tmp_path) -> pathlib.Path:
    """A finished run of four steps, for a test to spoil."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def saved_steps(workdir: pathlib.Path) -> set[str]:
    return {path.name for path in (workdir / "checkpoints").iterdir()}


def test_another_config_is_refused_field_by_field(copy):
    with pytest.raises(UserError) as caught:
        train.main(command(copy, *PLAIN, "optim.lr=0.5", "model.d_model=32"))
    told = str(caught.value)
    assert "model.d_model: stored 16, asked 32" in told
    assert "optim.lr: stored 0.001, asked 0.5" in told
    assert "log." not in told
    assert json.loads((copy / "config.json").read_text())["model"]["d_model"] == 16


def test_a_safe_field_may_change_and_the_run_goes_on(copy, capsys):
    train.main(command(copy, *PLAIN, "steps=6", "log.every=2"))
    assert "config field steps changes from 4 to 6" in capsys.readouterr().out
    assert (copy / "DONE").read_text() == "6\n"
    assert run_folder.load_config(copy).steps == 6


def test_fewer_steps_than_are_done_are_refused(copy):
    with pytest.raises(UserError, match="is at step 4, beyond steps=3; raise steps"):
        train.main(command(copy, *PLAIN, "steps=3"))
    assert run_folder.load_config(copy).steps == 4


def test_a_run_without_a_checkpoint_may_start_over_with_another_config(copy):
    shutil.rmtree(copy / "checkpoints")
    train.main(command(copy, *PLAIN, "optim.lr=0.5"))
    assert run_folder.load_config(copy).optim.lr == 0.5
    assert sorted(runs.read_losses(copy)) == [1, 2, 3, 4]


def test_a_checkpoint_of_another_model_names_each_parameter(copy):
    (copy / "config.json").unlink()
    with pytest.raises(UserError) as caught:
        train.main(command(copy, *PLAIN, "model.mixers.A.head_dim=8", "model.mlp=none"))
    told = str(caught.value)
    assert "mixer.qkv.q.kernel is stored as (1, 16, 16) and (1, 16, 32) in the model" in told
    assert "mlp.down.kernel (1, 16, 16) is stored but not in the model" in told
    assert saved_steps(copy) == {"2", "4"}
    # A refused command leaves the finished run as it was, so that the right one still works.
    assert (copy / "DONE").exists() and not (copy / "config.json").exists()


def test_a_disk_too_full_for_a_checkpoint_keeps_the_earlier_ones(copy, monkeypatch):
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000)
    )
    with pytest.raises(UserError, match=r"step 6 was not saved: .* has 0\.0 MB free"):
        train.main(command(copy, *PLAIN, "steps=8"))
    assert saved_steps(copy) == {"2", "4"}


def test_a_write_that_fails_midway_keeps_the_earlier_checkpoints(copy):
    """The limit on file size stands in for a disk that fills up while orbax writes."""
    arguments = runs.train_command(copy, *PLAIN, "steps=8", "log.every=100")
    # Between the run's own files, which grow a little, and a checkpoint's largest.
    own, saved = (
        max(path.stat().st_size for path in files if path.is_file())
        for files in (copy.glob("*"), (copy / "checkpoints" / "4").rglob("*"))
    )
    assert 2 * own < saved, "the model is too small for this test"
    limit = (2 * own + saved) // 2
    script = (
        "import resource, runpy, sys; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        f"sys.argv = {arguments!r}; runpy.run_path('train.py', run_name='__main__')"
    )
    code, output = runs.run("-c", script, JAX_COMPILATION_CACHE_DIR="")
    assert code == 2, output
    assert "could not be written" in output and "earlier checkpoints are intact" in output
    assert "Traceback" not in output
    train.main(command(copy, *PLAIN, "steps=8"))
    assert saved_steps(copy) == {"6", "8"}


def test_a_workdir_in_use_by_another_process_is_refused(copy):
    with (
        run_folder.claim(copy),
        pytest.raises(UserError, match="is in use by another process that trains in it"),
    ):
        train.main(command(copy, *PLAIN))


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "config.json"])
@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1, 2\n", b"\xff\xfe\n"], ids=repr)
def test_a_broken_file_of_the_run_is_named(copy, name, content):
    if name == "metrics.jsonl" and not content:
        pytest.skip("an empty log is a log without lines")
    (copy / name).write_bytes(content)
    if name == "config.json" and content == b"{}\n":
        match = "holds a run with another config"
    else:
        match = f"{name}' "
    with pytest.raises(UserError, match=match):
        train.main(command(copy, *PLAIN))
    assert (copy / "DONE").exists()
    assert saved_steps(copy) == {"2", "4"}


@pytest.mark.parametrize("part", ["state", "data"])
def test_a_damaged_checkpoint_is_named_and_the_earlier_one_serves(copy, part):
    shutil.rmtree(copy / "checkpoints" / "4" / part)
    with pytest.raises(UserError, match=r"checkpoint 4 .* is damaged .*; delete its folder"):
        train.main(command(copy, *PLAIN))
    shutil.rmtree(copy / "checkpoints" / "4")
    train.main(command(copy, *PLAIN))
    assert saved_steps(copy) == {"2", "4"}


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_finite(tmp_path, nonfinite, capsys):
    """A learning rate beyond all measure; stop names step and cause, skip counts and goes on."""
    fields = (*PLAIN, "optim.lr=1e30", "optim.warmup_steps=0", "optim.clip_norm=0.0")
    arguments = command(tmp_path / "run", *fields, f"optim.nonfinite={nonfinite}")
    if nonfinite == "stop":
        with pytest.raises(
            UserError, match=r"step 2: .* gradient norm nan.*stopped before its upd"
        ):
            train.main(arguments)
        assert not (tmp_path / "run" / "DONE").exists()
    else:
        train.main(arguments)
        assert "step 2: loss is" in (output := capsys.readouterr().out)
        assert "update skipped" in output
        assert (tmp_path / "run" / "DONE").exists()


def test_wandb_out_of_reach_does_not_end_training(tmp_path):
    fields = (*PLAIN, "log.wandb=online")
    code, output = runs.run(
        *runs.train_command(tmp_path / "run", *fields),
        WANDB_API_KEY="0" * 40,
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    assert code == 0, output
    assert "training goes on without it" in output
    assert (tmp_path / "run" / "DONE").exists()

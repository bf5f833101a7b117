"""Random models of each family against transformers, both ways: theirs here, and ours there."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

import published
from conftest import run_torch
from fastweights import interop, model
from fastweights.interop import export

# Names of MODELS in torch_models.py, which can't be imported without torch.
NAMES = [folder.name for folder in published.GEOMETRIES]


@pytest.fixture(scope="module")
def there(models, tmp_path_factory) -> pathlib.Path:
    """What we export, run by transformers: changed weights of imports, and models from scratch."""
    out = tmp_path_factory.mktemp("exported")
    np.save(out / "tokens.npy", np.random.default_rng(0).integers(0, 200, (2, 19)))
    for name in NAMES:
        case = published.read(models / name)
        # No longer the source's weights: what comes back must be what is in the run.
        params = jax.tree.map(lambda x: x * 1.125, case.params)
        record_in = out / f"record_{name}"
        interop.save_record(case.source, record_in)
        record = interop.load_record(record_in)
        interop.export_imported(params, case.config, record, out / name)
        # And the same model as if it had been made here.
        export.export_new(params, case.config, out / f"new_{name}", "float32")
    run_torch("logits", *(out / f"{kind}{name}" for name in NAMES for kind in ("", "new_")))
    return out


def test_all_families_are_here(models):
    assert sorted(path.name for path in models.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_theirs_here(models, name):
    case = published.read(models / name)
    tokens = case.reference["input_ids"]
    published.close(case.logits(case.params, tokens), case.reference["logits"])


@pytest.mark.parametrize("kind", ["", "new_"], ids=["imported", "from scratch"])
@pytest.mark.parametrize("name", NAMES)
def test_ours_there(there, name, kind):
    source = interop.open_checkpoint(there / f"{kind}{name}")
    config = dataclasses.replace(source.model, dtype="float32")
    params = interop.load_params(source, config, published.one_device())
    graphdef, _, _ = model.abstract_model(config)
    tokens = np.load(there / "tokens.npy")
    ours, _ = jax.jit(lambda params: model.bind(graphdef, params)(tokens))(params)
    with np.load(there / f"{kind}{name}" / "logits.npz") as stored:
        published.close(ours, stored["logits"], 2e-4)

"""Mixed patterns through what a run does: training cut over a mesh, checkpoint, one device.

Mamba and S4 are cut over a mesh in `test_sharding`; `test_caches` decodes with every letter.
"""

import jax
import numpy as np
import pytest

import tiny_models
from fastweights import config as config_lib
from fastweights import model, sharding
from fastweights.data import train_dataset
from fastweights.sharding import MeshConfig
from fastweights.training import optim
from fastweights.training.checkpoint import CheckpointConfig, Checkpoints
from fastweights.training.loss import IGNORE
from fastweights.training.state import init_state, make_blueprint
from fastweights.training.step import make_train_step, place_batch
from runs import TINY

SMALL = (
    "model.mlp=none",
    "optim.warmup_steps=0",
    "optim.lr=0.01",
    "model.mixers.L.num_heads=2",
    "model.mixers.L.head_dim=8",
    "model.mixers.N.num_heads=4",
    "model.mixers.N.head_dim=8",
    "model.mixers.N.value_head_dim=8",
)


@pytest.mark.parametrize("pattern", ("NGA", "LA"))
def test_pattern_trains_cut_and_is_restored_whole(pattern, tmp_path):
    fields = (*SMALL, f"model.pattern={pattern}", f"model.num_layers={len(pattern)}")
    config = config_lib.load(TINY, fields)
    rows = train_dataset(config.data, seed=config.seed, rows=config.batch_size)[0]
    tx = optim.make_optimizer(config.optim, config.steps)
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    blueprint = make_blueprint(config.model, tx, mesh)
    # As `compile_step`, but in less time.
    step = tiny_models.quick_jit(
        make_train_step(blueprint.graphdef, tx, accum_steps=1, loss_chunk=0, z_loss=0.0),
        in_shardings=(blueprint.shardings, sharding.batch_sharding(mesh)),
        out_shardings=(blueprint.shardings, sharding.replicated(mesh)),
    )

    # Eight devices learn a batch by heart.
    state, losses = init_state(config.model, tx, blueprint, config.seed), []
    with jax.set_mesh(mesh):
        batch = place_batch(rows, mesh)
        for _ in range(3):
            before, (state, metrics) = state, step(state, batch)
            assert metrics["finite"]
            losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]

    # What they wrote before the last step one device reads, bit for bit.
    one = make_blueprint(config.model, tx, sharding.make_mesh(MeshConfig(), jax.devices()[:1]))
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(2, before, data_position=2, evals=None)
        checkpoints.wait()
        restored, position = checkpoints.restore(2, one.abstract)
    assert position == 2
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(before))

    # It finds the loss that the eight found.
    @tiny_models.quick_jit
    def run(params, tokens, ids):
        return model.bind(one.graphdef, params)(tokens, segment_ids_BT=ids)[0]

    logits = run(restored["params"], rows["tokens"], rows["segment_ids"])
    log_p = np.asarray(jax.nn.log_softmax(logits))
    asked = rows["targets"] != IGNORE
    found = np.take_along_axis(log_p, np.where(asked, rows["targets"], 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(-found[asked].mean(), losses[2], rtol=2e-5)

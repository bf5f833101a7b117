"""Models computed elsewhere (transformers 5.24, float32), as `tests/interop/data` holds them.

`published/` are four small models with logits, caches, greedy tokens and norms of gradients;
`geometries/` are smaller ones of sizes that no published model has, with logits, made by
`tests/peers/torch_models.py`.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import deserialize, safe_open

import tiny_models
from fastweights import interop, model, sharding

DATA = pathlib.Path(__file__).parent / "interop" / "data"
PUBLISHED = sorted((DATA / "published").iterdir())
GEOMETRIES = sorted((DATA / "geometries").iterdir())
# Tokens of a cached call, the rest of them padding, and of a cache with all that padding: one
# program for prompts and single tokens. One-token forms are held to others elsewhere.
CALL = 72
SLOTS = 18 * CALL


def one_device():
    return sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])


class Model:
    """One folder, read; its functions are compiled once for all tests of a process."""

    def __init__(self, folder: pathlib.Path):
        self.source = interop.open_checkpoint(folder)
        self.config = dataclasses.replace(self.source.model, dtype="float32")
        self.params = interop.load_params(self.source, self.config, one_device())
        with np.load(folder / "reference.npz") as stored:
            self.reference = {name: stored[name] for name in stored}
        self.graphdef, _, _ = model.abstract_model(self.config)

    def forward(self, params, tokens, ids=None, cache=None):
        return model.bind(self.graphdef, params)(tokens, segment_ids_BT=ids, cache=cache)

    @functools.cached_property
    def logits(self):
        """(params, tokens) -> logits."""
        return tiny_models.quick_jit(lambda params, tokens: self.forward(params, tokens)[0])

    @functools.cached_property
    def train(self):
        """(params, tokens, ids) -> ((loss of the first 64 tokens, logits of all), gradients)."""

        def loss(params, tokens, ids):
            logits, _ = self.forward(params, tokens, ids)
            log_p = jax.nn.log_softmax(logits[:, :63])
            return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:64, None], axis=-1)), logits

        return tiny_models.quick_jit(jax.value_and_grad(loss, has_aux=True))

    @functools.cached_property
    def step(self):
        """(params, tokens, ids, cache) -> (logits, cache)."""
        return tiny_models.quick_jit(self.forward)

    def call(self, cache, tokens, ids=None):
        """A cached call of any length up to `CALL`, filled up with padding on the left."""
        room = ((0, 0), (CALL - tokens.shape[1], 0))
        ids = np.ones(tokens.shape, np.int32) if ids is None else ids
        logits, cache = self.step(self.params, np.pad(tokens, room), np.pad(ids, room), cache)
        return logits[:, CALL - tokens.shape[1] :], cache

    def init_cache(self, batch: int):
        bound = model.bind(self.graphdef, self.params)
        return bound.init_cache(batch, SLOTS)


@functools.cache
def read(folder: pathlib.Path) -> Model:
    return Model(folder)


def layers(tree, layout):
    """A model's caches or parameters layer by layer."""
    for i in range(len(layout.letters)):
        n, place = divmod(i, len(layout.group) or 1)
        if n < layout.num_groups:
            yield jax.tree.map(lambda x, n=n: x[n], tree["groups"][f"layer_{place}"])
        else:
            tail = i - layout.num_groups * len(layout.group)
            yield tree["tail"][f"layer_{tail}"]


def close(actual, expected, tolerance=1e-4):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def contents(path: pathlib.Path):
    """Tensors with dtype, shape and bytes by name, and metadata; or the bytes of another file."""
    stored = path.read_bytes()
    if path.suffix != ".safetensors":
        return stored
    with safe_open(path, "numpy") as file:
        return dict(deserialize(stored)), file.metadata()


def assert_same_folder(one: pathlib.Path, other: pathlib.Path) -> None:
    files = [{path.name: contents(path) for path in folder.iterdir()} for folder in (one, other)]
    assert files[0].keys() == files[1].keys()
    for name, content in files[0].items():
        assert content == files[1][name], name

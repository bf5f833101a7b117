"""Inputs at the edges of the rules: gates and writes where implementations have gone wrong.

Each edge changes inputs as from `ops_family.Rule.draw`, in place.
"""

import numpy as np

from ops_family import RULES


def strong_decay(x):
    x["g"] = np.random.default_rng(1).uniform(-100, -20, x["g"].shape)


def decay_to_almost_nothing(x):
    """What is left of earlier tokens is far below what a token writes, but not 0."""
    x["g"] = np.random.default_rng(1).uniform(-30, -20, x["g"].shape)


def strong_and_mild_decay(x):
    strong = np.random.default_rng(1).uniform(size=x["g"].shape) < 0.5
    x["g"] = np.where(strong, -45.0, x["g"])


def one_huge_decay(x):
    x["g"][:, 70] = -1e6


def no_decay(x):
    x["g"] = np.zeros_like(x["g"])


GATES = (strong_decay, decay_to_almost_nothing, strong_and_mild_decay, one_huge_decay, no_decay)


def ungated(x):
    if "g" in x:
        no_decay(x)


def identical_keys(x):
    ungated(x)
    x["k"][:] = x["k"][:, :1]
    x["beta"] = np.ones_like(x["beta"])


def identical_keys_overwritten(x):
    identical_keys(x)
    x["beta"] = 1.5 * x["beta"]


def reflections(x):
    ungated(x)
    x["beta"] = np.full_like(x["beta"], 2.0)


def near_identical_keys(x):
    keys = x["k"][:, :1] + 0.05 * x["k"]
    x["k"] = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    x["beta"] = np.full_like(x["beta"], 0.95)


def no_write(x):
    x["beta"] = np.zeros_like(x["beta"])


def zero_keys_and_queries(x):
    x["k"][:, 10:20] = 0
    x["q"][:, 15:90] = 0


WRITES = (
    identical_keys,
    identical_keys_overwritten,
    reflections,
    near_identical_keys,
    no_write,
    zero_keys_and_queries,
)


def edited(name, edge, seed=3, **sizes):
    x = RULES[name].draw(seed, **sizes)
    edge(x)
    return {n: a if np.iscomplexobj(a) else a.astype(np.float32) for n, a in x.items()}

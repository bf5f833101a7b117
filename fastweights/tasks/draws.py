"""Randomness for tasks, on the host and inside `jit`, so that an example is written down once.

`HostDraws` answers from a NumPy generator, `DeviceDraws` from a JAX key; their numbers differ,
their laws do not. `xp` is the array module of each; generators change no array in place.

Array legend: N rows, T places, P population, K taken, M drawn, S slots.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # of NumPy or of JAX
Step = Callable[..., tuple[Any, Array]]


class HostDraws:
    """Draws from a NumPy generator, for the data pipeline."""

    xp: Any = np

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Array:
        """Uniform int32 in [low, high)."""
        return self._rng.integers(low, high, size=shape).astype(np.int32)

    def gumbel(self, shape: tuple[int, ...]) -> Array:
        return self._rng.gumbel(size=shape)

    def distinct(self, count: int, population: int, take: int) -> Array:
        """`count` ordered uniform samples without replacement of `take` out of range(population).

        The first steps of a Fisher-Yates shuffle, in step for all samples.
        """
        deck_NP = np.tile(np.arange(population, dtype=np.int32), (count, 1))
        picks_NK = self._rng.integers(np.arange(take), population, size=(count, take))
        row_N = np.arange(count)
        for j in range(take):
            pick_N = picks_NK[:, j]
            deck_NP[row_N, j], deck_NP[row_N, pick_N] = deck_NP[row_N, pick_N], deck_NP[row_N, j]
        return deck_NP[:, :take]

    def shuffled(self, array_NK: Array) -> Array:
        """Each row in a random order of its own."""
        return self._rng.permuted(array_NK, axis=1)

    def put(self, array_NT: Array, place_NK: Array, values_NK: Array) -> Array:
        """A copy of the array with `values` at `place` of each row."""
        array_NT = array_NT.copy()
        np.put_along_axis(array_NT, place_NK, values_NK, axis=1)
        return array_NT

    def scan(self, step: Step, carry: Any, xs_NT: tuple[Array, ...]) -> tuple[Any, Array]:
        """`carry, y_N = step(carry, *x_N)` for each place in turn; returns (carry, ys_NT)."""
        ys = []
        for t in range(xs_NT[0].shape[1]):
            carry, y_N = step(carry, *(x_NT[:, t] for x_NT in xs_NT))
            ys.append(y_N)
        return carry, np.stack(ys, axis=1)


class DeviceDraws:
    """Draws from a JAX key, for batches that are made inside a compiled program."""

    xp: Any = jnp

    def __init__(self, key: jax.Array):
        self._key = key

    def _next(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return key

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Array:
        return jax.random.randint(self._next(), shape, low, high)

    def gumbel(self, shape: tuple[int, ...]) -> Array:
        return jax.random.gumbel(self._next(), shape)

    def distinct(self, count: int, population: int, take: int) -> Array:
        if population < 4 * take:
            # The places of the largest of independent numbers. Of equal ones, which 32 bits make
            # rare, the first wins.
            noise_NP = jax.random.bits(self._next(), (count, population))
            return jax.lax.top_k(noise_NP, take)[1]
        # Draws with replacement, each repeat left out: a sort of a few in place of the population.
        # That more than half of them and 16 repeat does not happen (below 1e-12 a row).
        drawn_NM = self.integers(0, population, (count, 2 * take + 16))
        same_NMM = drawn_NM[:, :, None] == drawn_NM[:, None, :]
        repeats_NM = jnp.tril(same_NMM, -1).any(axis=2)
        fresh_NM = jnp.argsort(repeats_NM, axis=1, stable=True)[:, :take]
        return jnp.take_along_axis(drawn_NM, fresh_NM, axis=1)

    def shuffled(self, array_NK: Array) -> Array:
        order_NK = jnp.argsort(jax.random.bits(self._next(), array_NK.shape), axis=1)
        return jnp.take_along_axis(array_NK, order_NK, axis=1)

    def put(self, array_NT: Array, place_NK: Array, values_NK: Array) -> Array:
        return jnp.put_along_axis(array_NT, place_NK, values_NK, axis=1, inplace=False)

    def scan(self, step: Step, carry: Any, xs_NT: tuple[Array, ...]) -> tuple[Any, Array]:
        xs_TN = tuple(jnp.swapaxes(x_NT, 0, 1) for x_NT in xs_NT)
        carry, ys_TN = jax.lax.scan(lambda c, x: step(c, *x), carry, xs_TN)
        return carry, jnp.swapaxes(ys_TN, 0, 1)


Draws = HostDraws | DeviceDraws


def slots(draws: Draws, count: int, size: int, take: int, power_a: float = 1.0) -> Array:
    """`count` samples of `take` of `size` slots drawn one by one, without replacement, by weight.

    Slot i, from 1, has the weight a * i^(a - 1): uniform for a = 1. The order of the largest
    `log weight + Gumbel noise` is the order of such successive draws (Plackett-Luce; Yellott 1977),
    which lets a whole batch be drawn by one sort.
    """
    log_weight_S = (power_a - 1.0) * np.log(np.arange(1, size + 1))
    noisy_NS = draws.gumbel((count, size)) + draws.xp.asarray(log_weight_S)[None, :]
    return draws.xp.argsort(-noisy_NS, axis=1)[:, :take]


def interleave(draws: Draws, *columns_NK: Array) -> Array:
    """a1 b1 ... a2 b2 ...: the columns' entries side by side, [N, len(columns) * K]."""
    stacked_NKC = draws.xp.stack(columns_NK, axis=2)
    return stacked_NKC.reshape(stacked_NKC.shape[0], -1)

"""The layers of a stack: norms, mixer and MLP around the residual stream.

Shapes: B batch, T tokens, D model width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fastweights.mixers import MIXERS
from fastweights.mixers.experts import MixtureOfExperts
from fastweights.mixers.layers import SwiGLU
from fastweights.mixers.norms import RMSNorm
from fastweights.sharding import constrain

if TYPE_CHECKING:
    from fastweights.model import ModelConfig


class Block(nnx.Module):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)) if there is an MLP.

    With `post_norm` the norms stand behind: x + norm(mixer(x)), then x + norm(mlp(x)).
    """

    def __init__(self, letter: str, mlp: str, config: ModelConfig, *, rngs: nnx.Rngs):
        """`mlp` is the layer's kind of MLP, one of `model.MLPS`."""
        mixer_class, _ = MIXERS[letter]
        kinds: dict[str, Any] = dict(
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            residual_scale=(2 * config.num_layers) ** -0.5,
            rngs=rngs,
        )
        norm = functools.partial(
            RMSNorm,
            config.d_model,
            eps=config.norm_eps,
            param_dtype=kinds["param_dtype"],
            centred=config.norm == "centred",
        )
        self.post_norm, self.mlp_kind = letter in config.post_norm, mlp
        self.mixer_norm = norm()
        self.mixer = mixer_class(
            config.d_model, getattr(config.mixers, letter), norm_eps=config.norm_eps, **kinds
        )
        if mlp != "none":
            self.mlp_norm = norm()
        self.mlp: Any
        if mlp == "swiglu":
            self.mlp = SwiGLU(config.d_model, config.mlp_width, **kinds)
        if mlp == "moe":
            self.mlp = MixtureOfExperts(config.d_model, config.moe, **kinds)

    def __call__(self, x_BTD, *, segment_ids_BT, positions_BT, cache):
        """Returns (x_BTD, next cache, the balance of the experts or None)."""
        y_BTD, cache = self.mixer(
            x_BTD if self.post_norm else self.mixer_norm(x_BTD),
            segment_ids_BT=segment_ids_BT,
            positions_BT=positions_BT,
            cache=cache,
        )
        y_BTD = self.mixer_norm(y_BTD) if self.post_norm else y_BTD
        x_BTD, balance = x_BTD + checkpoint_name(y_BTD, "mixer_out"), None
        if self.mlp_kind != "none":
            y_BTD = x_BTD if self.post_norm else self.mlp_norm(x_BTD)
            if self.mlp_kind == "moe":
                y_BTD, balance = self.mlp(y_BTD, segment_ids_BT)
            else:
                y_BTD = self.mlp(y_BTD)
            y_BTD = self.mlp_norm(y_BTD) if self.post_norm else y_BTD
            x_BTD = x_BTD + checkpoint_name(y_BTD, "mlp_out")
        return constrain(x_BTD, "batch", "tokens", None), cache, balance


class Blocks(nnx.Module):
    """Consecutive layers `layer_0`, `layer_1`, ...; caches are a dict by the same names."""

    def __init__(self, letters: str, config: ModelConfig, *, rngs: nnx.Rngs, first: int = 0):
        """`first` is the number, in the whole stack, of the first layer."""
        self.names = tuple(f"layer_{i}" for i in range(len(letters)))
        for i, (name, letter) in enumerate(zip(self.names, letters, strict=True)):
            setattr(self, name, Block(letter, config.mlp_kind(first + i), config, rngs=rngs))

    def __call__(self, x_BTD, *, segment_ids_BT, positions_BT, cache):
        """Returns (x_BTD, next caches, the balance of each mixture of experts or None)."""
        next_cache, balances = {}, []
        for name in self.names:
            x_BTD, next_cache[name], balance = getattr(self, name)(
                x_BTD,
                segment_ids_BT=segment_ids_BT,
                positions_BT=positions_BT,
                cache=None if cache is None else cache[name],
            )
            balances += [] if balance is None else [balance]
        return (
            x_BTD,
            None if cache is None else next_cache,
            jnp.stack(balances) if balances else None,
        )

    def init_cache(self, batch: int, max_length: int, dtype) -> dict[str, Any]:
        return {
            name: getattr(self, name).mixer.init_cache(batch, max_length, dtype)
            for name in self.names
        }


def stack(make: Callable[[nnx.Rngs], nnx.Module], copies: int, rngs: nnx.Rngs) -> Any:
    """`copies` equal modules as one whose parameters have a leading axis of copies.

    The result is a container and not to be called: split it, then merge one slice of its
    parameters.
    """
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def one(key):
        return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1])

    return nnx.merge(graphdef, jax.vmap(one)(jax.random.split(rngs.params(), copies)))

"""Mamba (letter `M`): a diagonal state space that each token writes and reads in its own way.

Gu and Dao 2023 (arXiv:2312.00752), figure 3 and section 3.6: x and z are projections of the stream
to E channels; x goes through a short convolution with SiLU, and from it come the step
dt = softplus(dt_up dt_down x + dt_bias) of each channel and the maps B and C that all channels
share; then h_t = exp(dt A) h_(t-1) + dt B x, y = C h + D x, and the output is out(y * silu(z)).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fastweights import ops
from fastweights.mixers.decay import initial_step_bias
from fastweights.mixers.layers import Linear
from fastweights.mixers.projections import QKVProjection, check_sizes


@dataclasses.dataclass(frozen=True)
class MambaConfig:
    """Options of `Mamba`.

    Attributes:
      d_state: states N of each channel.
      expand: channels E as a multiple of the model width.
      conv_size: taps of the short convolution; 0 leaves it and its SiLU out.
      dt_rank: width of the projection that the steps come from; 0 takes a sixteenth of the model
        width, rounded up.
      chunk_size: tokens a chunk of the parallel form.
      implementation: which form of the op to run; "auto" chooses.
    """

    d_state: int = 16
    expand: int = 2
    conv_size: int = 4
    dt_rank: int = 0
    chunk_size: int = 64
    implementation: str = "auto"

    def __post_init__(self):
        owner = type(self).__name__
        check_sizes(owner, d_state=self.d_state, expand=self.expand, chunk_size=self.chunk_size)
        check_sizes(owner, minimum=0, conv_size=self.conv_size, dt_rank=self.dt_rank)

    def channels(self, d_model: int) -> int:
        """E for a model of this width."""
        return self.expand * d_model

    def rank(self, d_model: int) -> int:
        """dt_rank with the default filled in."""
        return self.dt_rank or -(-d_model // 16)


class Mamba(nnx.Module):
    """The selective state space between its projections.

    A starts at -1, ..., -N in every channel (S4D-Real, arXiv:2206.11893), D at 1 and the step
    softplus(dt_bias) log-uniform in [1e-3, 0.1]. A, D and the bias of the step are float32 whatever
    the parameter dtype: bfloat16 would round slow decays to none.
    """

    def __init__(
        self,
        d_model: int,
        config: MambaConfig,
        *,
        dtype,
        param_dtype,
        norm_eps: float,
        rngs: nnx.Rngs,
        residual_scale: float = 1.0,
    ):
        """`dtype` is of activations; `residual_scale` shrinks the initial output projection."""
        del norm_eps
        self.config, self.state_dtype = config, jnp.promote_types(dtype, jnp.float32)
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        E, N, rank = config.channels(d_model), config.d_state, config.rank(d_model)
        self.channels = E
        self.inputs = QKVProjection(d_model, {"x": E}, config.conv_size, conv_bias=True, **kinds)
        self.gate = Linear(d_model, E, logical_axes=("embed", "heads"), **kinds)
        self.dt_down = Linear(E, rank, logical_axes=("heads", None), **kinds)
        # Small enough that the bias sets the steps at the start: a third of the usual variance.
        self.dt_up = Linear(rank, E, logical_axes=(None, "heads"), scale=3**-0.5, **kinds)
        self.B = Linear(E, N, logical_axes=("heads", None), **kinds)
        self.C = Linear(E, N, logical_axes=("heads", None), **kinds)
        self.out = Linear(
            E, d_model, logical_axes=("heads", "embed"), scale=residual_scale, **kinds
        )
        acc = jnp.promote_types(param_dtype, jnp.float32)
        rates_N = jnp.log(jnp.arange(1, N + 1, dtype=acc))
        self.A_log = nnx.Param(jnp.broadcast_to(rates_N[None], (E, N)), logical_axes=(None, None))
        self.D = nnx.Param(jnp.ones((E,), acc), logical_axes=(None,))
        self.dt_bias = nnx.Param(initial_step_bias(rngs.params(), (E,), acc), logical_axes=(None,))

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        segment_ids_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        cache: dict[str, Any] | None = None,
    ) -> tuple[jax.Array, dict[str, Any] | None]:
        """Mixes a batch; arguments and results as in `RecurrentMixer`."""
        del positions_BT
        # The projection is kept for the backward pass, the convolution's shifted copies are not.
        project = jax.checkpoint(
            self.inputs.__call__, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )
        inputs, conv = project(x_BTD, segment_ids_BT, None if cache is None else cache["conv"])
        u_BTE = inputs["x"]
        y_BTE, state = ops.selective_scan(
            u_BTE,
            jax.checkpoint(self._step)(self.dt_down(u_BTE)),
            -jnp.exp(self.A_log[...]),
            self.B(u_BTE),
            self.C(u_BTE),
            D=self.D[...],
            initial_state=None if cache is None else cache["state"],
            segment_ids=segment_ids_BT,
            chunk_size=self.config.chunk_size,
            implementation=self.config.implementation,
        )
        gate_BTE = checkpoint_name(self.gate(x_BTD), "mixer_qkv")
        y_BTD = jax.checkpoint(self._read_out)(y_BTE, gate_BTE)
        return y_BTD, None if cache is None else {"state": state, "conv": conv}

    # Cheap to compute again, and E channels wide: not kept for the backward pass.

    def _step(self, low_BTR: jax.Array) -> jax.Array:
        step_BTE = self.dt_up(low_BTR, accumulate=True) + self.dt_bias[...][None, None]
        return jax.nn.softplus(step_BTE)

    def _read_out(self, y_BTE: jax.Array, gate_BTE: jax.Array) -> jax.Array:
        return self.out(y_BTE * jax.nn.silu(gate_BTE))

    def init_cache(self, batch: int, max_length: int, dtype) -> dict[str, Any]:
        """The empty state [B, E, N], in float32 or wider, and the convolution's last inputs.

        Its size does not depend on `max_length` (tokens).
        """
        del max_length
        state = jnp.zeros((batch, self.channels, self.config.d_state), self.state_dtype)
        return {"state": state, "conv": self.inputs.init_cache(batch, dtype)}

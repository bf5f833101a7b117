"""S4 (letter `S`): a linear state space a channel that starts as a memory of the input's past.

Gu, Goel and Re 2021 (arXiv:2111.00396) and, for the diagonal form, Gu et al. 2022
(arXiv:2206.11893): every channel of the stream has its own system of `d_state` states; its output
passes a GELU and a linear mix of channels, which may be gated. The system ignores what a token
holds, so a row of one document is one convolution. Packed rows, and so all that the data pipelines
make, take chunks joined by the state instead, and CPUs always do: see `ops.state_space`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastweights import ops
from fastweights.errors import check
from fastweights.mixers.layers import Linear
from fastweights.mixers.projections import check_sizes
from fastweights.ops.hippo import legs_pairs

MODES = ("dplr", "diagonal")
INITS = ("legs", "lin")
DISCRETIZATIONS = ("bilinear", "zoh")


@dataclasses.dataclass(frozen=True)
class S4Config:
    """Options of `S4`.

    Attributes:
      d_state: states N of each channel, even (they come in conjugate pairs).
      mode: "dplr", A diagonal plus low rank, or "diagonal" (S4D).
      init: where A and B start: "legs", HiPPO-LegS (without its low-rank part if diagonal), or
        "lin", S4D-Lin: -1/2 + i pi n, for the diagonal mode only.
      discretization: "bilinear", or "zoh" (zero-order hold) for the diagonal mode only.
      output_gate: mix channels by a gated linear unit instead of one matrix.
      dt_min, dt_max: range that step sizes start in, log-uniformly.
      chunk_size: tokens a chunk of the form for packed rows and prefill.
      implementation: which form of the op to run; "auto" chooses.
    """

    d_state: int = 64
    mode: str = "dplr"
    init: str = "legs"
    discretization: str = "bilinear"
    output_gate: bool = True
    dt_min: float = 1e-3
    dt_max: float = 0.1
    chunk_size: int = 64
    implementation: str = "auto"

    def __post_init__(self):
        owner = type(self).__name__
        check_sizes(owner, d_state=self.d_state, chunk_size=self.chunk_size)
        check(
            self.d_state % 2 == 0,
            f"{owner}.d_state is {self.d_state}; states come in pairs, give an even number.",
        )
        for name, choices in (
            ("mode", MODES),
            ("init", INITS),
            ("discretization", DISCRETIZATIONS),
        ):
            value = getattr(self, name)
            check(
                value in choices,
                f"{owner}.{name} is {value!r}; choose one of {', '.join(choices)}.",
            )
        for name, needed in (("init", "legs"), ("discretization", "bilinear")):
            value = getattr(self, name)
            check(
                self.mode == "diagonal" or value == needed,
                f"{owner}.{name} is {value!r}, which mode 'dplr' does not have; use {needed!r} or "
                "mode 'diagonal'.",
            )
        check(
            0 < self.dt_min <= self.dt_max,
            f"{owner}.dt_min is {self.dt_min} and dt_max {self.dt_max}; give 0 < dt_min <= dt_max.",
        )


class S4(nnx.Module):
    """State space, GELU, mix of channels.

    Complex parameters are pairs of real ones, `_real` and `_imag`; A is -exp(A_log) + i A_imag. All
    of the system is float32 whatever the parameter dtype: bfloat16 would round slow decays to none.
    C starts as unit complex normal noise and D as normal noise.
    """

    def __init__(
        self,
        d_model: int,
        config: S4Config,
        *,
        dtype,
        param_dtype,
        norm_eps: float,
        rngs: nnx.Rngs,
        residual_scale: float = 1.0,
    ):
        """`dtype` is of activations; `residual_scale` shrinks the initial output mix."""
        del norm_eps
        self.config, self.channels = config, d_model
        self.state_dtype = jnp.promote_types(dtype, jnp.float32)
        acc = jnp.promote_types(param_dtype, jnp.float32)

        def param(value_D: Any) -> nnx.Param:
            return nnx.Param(jnp.asarray(value_D, acc), logical_axes=(None,) * value_D.ndim)

        def copies(x_P: np.ndarray) -> nnx.Param:
            return param(jnp.broadcast_to(jnp.asarray(x_P, acc)[None], (d_model, len(x_P))))

        pairs = config.d_state // 2
        A_P, P_P, B_P = legs_pairs(config.d_state)
        if config.init == "lin":
            A_P, B_P = -0.5 + 1j * math.pi * np.arange(pairs), np.ones(pairs, complex)
        self.A_log, self.A_imag = copies(np.log(-np.real(A_P))), copies(np.imag(A_P))
        self.B_real, self.B_imag = copies(np.real(B_P)), copies(np.imag(B_P))
        if config.mode == "dplr":
            self.P_real, self.P_imag = copies(np.real(P_P)), copies(np.imag(P_P))
        C_2DP = jax.random.normal(rngs.params(), (2, d_model, pairs), acc) * 0.5**0.5
        self.C_real, self.C_imag = param(C_2DP[0]), param(C_2DP[1])
        self.D = param(jax.random.normal(rngs.params(), (d_model,), acc))
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        self.log_dt = param(jax.random.uniform(rngs.params(), (d_model,), acc, low, high))

        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        axes = ("heads", "embed")
        self.out = Linear(d_model, d_model, logical_axes=axes, scale=residual_scale, **kinds)
        if config.output_gate:
            self.gate = Linear(d_model, d_model, logical_axes=axes, **kinds)

    def _complex(self, name: str) -> jax.Array:
        return jax.lax.complex(
            getattr(self, f"{name}_real")[...], getattr(self, f"{name}_imag")[...]
        )

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
        c = self.config
        y_BTD, state = ops.state_space(
            x_BTD,
            jnp.exp(self.log_dt[...]),
            jax.lax.complex(-jnp.exp(self.A_log[...]), self.A_imag[...]),
            self._complex("B"),
            self._complex("C"),
            P=self._complex("P") if c.mode == "dplr" else None,
            D=self.D[...],
            discretization=c.discretization,
            initial_state=None if cache is None else cache["state"],
            segment_ids=segment_ids_BT,
            chunk_size=c.chunk_size,
            implementation=c.implementation,
        )
        y_BTD = jax.nn.gelu(y_BTD, approximate=False)
        out_BTD = self.out(y_BTD)
        if c.output_gate:
            out_BTD = out_BTD * jax.nn.sigmoid(self.gate(y_BTD))
        return out_BTD, None if cache is None else {"state": state}

    def init_cache(self, batch: int, max_length: int, dtype) -> dict[str, Any]:
        """The empty state [B, D, N], real, in float32 or wider.

        Its size does not depend on `max_length` (tokens).
        """
        del max_length, dtype
        shape = (batch, self.channels, self.config.d_state)
        return {"state": jnp.zeros(shape, self.state_dtype)}

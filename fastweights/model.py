"""The hybrid language model: embedding, a patterned stack of mixers, final norm, head.

Shapes: B batch, T tokens, D model width, V vocabulary.

The repeating groups of the pattern are stacked along a leading axis and run by one `lax.scan`, so
compile time does not grow with depth; layers that fill no whole group follow as an unrolled tail.

The residual stream is kept in the compute dtype: it is the scan's carry, the one array saved a
group when activations are recomputed, and the published bfloat16 models keep it so. Norms, gates,
states and logits are float32.

Parameters are a plain nested dict of arrays. Modules only define: `abstract_model` splits them from
their parameters once, and `bind` puts any dict of the same tree back under them inside a jitted
function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastweights.blocks import Blocks, stack
from fastweights.decoder import PositionDecoder
from fastweights.errors import check
from fastweights.mixers import MIXERS, MixerConfigs
from fastweights.mixers.experts import ExpertsConfig
from fastweights.mixers.norms import RMSNorm
from fastweights.mixers.projections import check_sizes
from fastweights.ops.segments import select_real
from fastweights.ops.weights import Gathered, gather, look_up
from fastweights.pattern import Layout, expand
from fastweights.sharding import constrain

MLPS = ("swiglu", "none", "moe")
NORMS = ("centred", "plain")
DECODERS = ("none", "positions")
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Of the logits before training: wide enough to learn from at once, small beside ln V.
INITIAL_LOGIT_STD = 0.5

# What the backward pass may keep instead of computing it anew. "names" keeps the narrow results of
# the matrix products around each mixer and lets the wide MLP and the mixer's inside be recomputed;
# "dots" keeps the results of all matrix products and what the memory kernels saved.
REMAT_POLICIES: dict[str, Any] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("memory_saved"),
    ),
    "names": jax.checkpoint_policies.save_only_these_names("mixer_qkv", "mixer_out", "mlp_out"),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a model.

    Attributes:
      vocab_size: rows of the embedding, V.
      d_model: width of the residual stream, D.
      num_layers: mixers in the stack.
      pattern: one letter a layer (`MIXERS`), tiled over depth.
      mlp: after every mixer "swiglu", "moe" (a mixture of experts) or "none".
      mlp_dim: hidden width of the MLP; 0 takes 8/3 D, rounded up to a multiple of 64.
      moe: options of the mixture of experts.
      decoder: "positions" has each document's last token alone give back all its tokens
        (`PositionDecoder`), as the task of compression asks; "none" for language models.
      tie_embeddings: use the embedding as the head too.
      norm: weights of the norms on the residual stream, "centred" (1 + w) or "plain" (w).
      norm_eps: epsilon of every RMSNorm.
      post_norm: letters whose layers norm what mixer and MLP give, instead of what they take.
      dtype: of activations and matrix products.
      param_dtype: of parameters (float32 or wider for gates, whatever it says).
      remat: what to recompute in the backward pass: "none", "full", "dots" or "names".
      mixers: options a letter.

    Raises:
      UserError: a value outside these.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    pattern: str
    mlp: str = "swiglu"
    mlp_dim: int = 0
    moe: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    decoder: str = "none"
    tie_embeddings: bool = True
    norm: str = "centred"
    norm_eps: float = 1e-6
    post_norm: str = ""
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "none"
    mixers: MixerConfigs = dataclasses.field(default_factory=MixerConfigs)

    def __post_init__(self):
        check_sizes("ModelConfig", vocab_size=self.vocab_size, d_model=self.d_model)
        check_sizes("ModelConfig", minimum=0, mlp_dim=self.mlp_dim)
        expand(self.pattern, self.num_layers)
        for name, choices in (
            ("mlp", MLPS),
            ("norm", NORMS),
            ("decoder", DECODERS),
            ("dtype", DTYPES),
            ("param_dtype", DTYPES),
            ("remat", tuple(REMAT_POLICIES)),
        ):
            value = getattr(self, name)
            check(
                value in choices,
                f"ModelConfig.{name} is {value!r}; choose one of {', '.join(choices)}.",
            )
        check(
            self.norm_eps > 0, f"ModelConfig.norm_eps is {self.norm_eps}; give a positive number."
        )
        for letter in self.post_norm:
            check(
                letter in MIXERS,
                f"ModelConfig.post_norm is {self.post_norm!r}; give letters out of "
                f"{', '.join(MIXERS)}.",
            )
        beyond = [i for i in self.moe.dense_layers if i >= self.num_layers]
        check(
            self.mlp != "moe" or not beyond,
            f"ModelConfig.moe.dense_layers has {beyond} but the model has {self.num_layers} "
            "layers, counted from 0; leave those out.",
        )

    @property
    def layout(self) -> Layout:
        """The pattern laid over the depth, in groups that are equal in their MLPs too."""
        kinds = [self.mlp_kind(i) for i in range(self.num_layers)]
        layout = expand(self.pattern, self.num_layers)
        for period in range(len(self.pattern), self.num_layers, len(self.pattern)):
            if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
                return expand(layout.letters[:period], self.num_layers)
        return expand(layout.letters, self.num_layers) if layout.num_groups > 1 else layout

    def mlp_kind(self, layer: int) -> str:
        """The MLP of a layer, counted from 0: one of `MLPS`."""
        return "swiglu" if self.mlp == "moe" and layer in self.moe.dense_layers else self.mlp

    @property
    def mlp_width(self) -> int:
        """Hidden width of a SwiGLU with the default filled in; 0 for models without MLPs."""
        if self.mlp == "none":
            return 0
        return self.mlp_dim or -(-8 * self.d_model // (3 * 64)) * 64


class HybridLM(nnx.Module):
    """A causal language model over a patterned stack of mixers.

    Embedding and head start at standard deviation 0.5 / sqrt(D), which is 0.02 near D = 640. A
    normalised final state then gives logits of standard deviation 0.5 at any width, tied or not, so
    the loss starts near ln(V). See `mixers/layers.py` for all other weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        check(
            "float64" not in (config.dtype, config.param_dtype) or jax.config.jax_enable_x64,
            "ModelConfig asks for float64, which JAX has switched off; set JAX_ENABLE_X64=1.",
        )
        self.config, layout = config, config.layout
        param_dtype = jnp.dtype(config.param_dtype)
        normal = jax.nn.initializers.normal(INITIAL_LOGIT_STD * config.d_model**-0.5)
        shape = (config.vocab_size, config.d_model)
        self.embedding = nnx.Param(
            normal(rngs.params(), shape, param_dtype), logical_axes=("vocab", "embed")
        )
        if layout.num_groups:
            self.groups = stack(
                lambda rngs: Blocks(layout.group, config, rngs=rngs), layout.num_groups, rngs
            )
        if layout.tail:
            first = layout.num_groups * len(layout.group)
            self.tail = Blocks(layout.tail, config, rngs=rngs, first=first)
        norm: dict[str, Any] = dict(
            eps=config.norm_eps, param_dtype=param_dtype, centred=config.norm == "centred"
        )
        if config.decoder == "positions":
            self.decoder = PositionDecoder(
                config.d_model,
                norm=norm,
                dtype=jnp.dtype(config.dtype),
                param_dtype=param_dtype,
                rngs=rngs,
            )
        self.final_norm = RMSNorm(config.d_model, **norm)
        if not config.tie_embeddings:
            self.head = nnx.Param(
                normal(rngs.params(), shape[::-1], param_dtype), logical_axes=("embed", "vocab")
            )

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segment_ids_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Returns (logits_BTV float32, next cache); arguments as in `hidden`."""
        h_BTD, cache = self.hidden(
            tokens_BT, segment_ids_BT=segment_ids_BT, positions_BT=positions_BT, cache=cache
        )
        return self.unembed(h_BTD), cache

    def hidden(
        self,
        tokens_BT: jax.Array,
        *,
        segment_ids_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """The stream after decoder, if there is one, and final norm.

        Args:
          tokens_BT: int token ids; one outside the vocabulary gives NaN, but for padding.
          segment_ids_BT: int document ids of packed rows, 0 for padding; None for one document a
            row.
          positions_BT: position of each token in its document; counted from the ids by default.
          cache: from `init_cache` or an earlier call. Its document goes on with the first real
            token, and prefill and decode in any split give what one call gives.

        Returns:
          (h_BTD in the compute dtype, next cache; None without one).
        """
        h_BTD, cache, _ = self.hidden_and_balance(
            tokens_BT, segment_ids_BT=segment_ids_BT, positions_BT=positions_BT, cache=cache
        )
        return h_BTD, cache

    def hidden_and_balance(
        self,
        tokens_BT: jax.Array,
        *,
        segment_ids_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        cache: Any = None,
        table: Gathered | None = None,
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """As `hidden`, and the mean over layers of how unevenly experts are used (None without).

        See `MixtureOfExperts` for that number. `table` is from `gathered`, for who gathers the
        head too.
        """
        x_BTD: Any = look_up(self._table(shared=False) if table is None else table, tokens_BT)
        if segment_ids_BT is not None:
            # Padding may hold any id: NaN there would meet zeros in the gradients of all kernels.
            x_BTD = select_real(x_BTD, segment_ids_BT != 0)
        x_BTD = constrain(x_BTD, "batch", "tokens", None)
        next_cache, balances = {}, []
        context = (segment_ids_BT, positions_BT)
        check(
            cache is None or self.config.decoder == "none",
            "A model with a decoder reads whole documents at once; call it without a cache.",
        )
        if self.config.layout.num_groups:
            graphdef, state = nnx.split(self.groups)
            run = self._checkpointed(graphdef)

            def step(x_BTD, params_cache):
                params, cache = params_cache
                x_BTD, cache, balance = run(params, x_BTD, *context, cache)
                return x_BTD, (cache, balance)

            xs = (nnx.to_pure_dict(state), None if cache is None else cache["groups"])
            x_BTD, (next_cache["groups"], balance) = jax.lax.scan(step, x_BTD, xs)
            balances.append(balance)
        if self.config.layout.tail:
            graphdef, state = nnx.split(self.tail)
            x_BTD, next_cache["tail"], balance = self._checkpointed(graphdef, in_scan=False)(
                nnx.to_pure_dict(state), x_BTD, *context, None if cache is None else cache["tail"]
            )
            balances.append(balance)
        if self.config.decoder == "positions":
            x_BTD = constrain(self.decoder(x_BTD, *context), "batch", "tokens", None)
        balances = [jnp.ravel(balance) for balance in balances if balance is not None]
        balance = jnp.mean(jnp.concatenate(balances)) if balances else None
        return self.final_norm(x_BTD), None if cache is None else next_cache, balance

    def _checkpointed(self, graphdef, *, in_scan: bool = True) -> Callable:
        """`Blocks` as a pure function of its parameters, recomputed in the backward pass or not."""

        def run(params, x_BTD, segment_ids_BT, positions_BT, cache):
            return nnx.merge(graphdef, params)(
                x_BTD, segment_ids_BT=segment_ids_BT, positions_BT=positions_BT, cache=cache
            )

        if self.config.remat == "none":
            return run
        # A loop keeps the two passes apart by itself; only unrolled layers need the guard.
        return jax.checkpoint(
            run, policy=REMAT_POLICIES[self.config.remat], prevent_cse=not in_scan
        )

    def unembed(self, h_BTD: jax.Array) -> jax.Array:
        """logits_BTV in float32 (float64 for a float64 model), from `hidden`'s output."""
        acc = jnp.promote_types(h_BTD.dtype, jnp.float32)
        return jnp.dot(h_BTD, self.head_DV.astype(h_BTD.dtype), preferred_element_type=acc)

    @property
    def head_DV(self) -> jax.Array:
        """The matrix from `hidden`'s output to logits, in the parameters' dtype."""
        return self.embedding[...].T if self.config.tie_embeddings else self.head[...]

    def gathered(self) -> tuple[Gathered, Gathered]:
        """Embedding [V, D] and head [D, V] in the compute dtype, gathered once if they are one."""
        table = self._table(shared=self.config.tie_embeddings)
        if self.config.tie_embeddings:
            return table, Gathered(*(jnp.swapaxes(x, -2, -1) for x in table))
        dtype = jnp.dtype(self.config.dtype)
        return table, gather(self.head[...], dtype, ("embed", "vocab"), False)

    def _table(self, *, shared: bool) -> Gathered:
        dtype = jnp.dtype(self.config.dtype)
        return gather(self.embedding[...], dtype, ("vocab", "embed"), shared)

    def init_cache(self, batch: int, max_length: int, dtype=None) -> dict[str, Any]:
        """Empty caches for `batch` rows of up to `max_length` tokens.

        `dtype` of keys, values and convolution inputs is the compute dtype by default; recurrent
        states are float32 always. Caches of the scanned groups are stacked along a leading axis.
        """
        dtype = jnp.dtype(self.config.dtype if dtype is None else dtype)
        cache = {}
        if self.config.layout.num_groups:
            copies = self.config.layout.num_groups
            cache["groups"] = jax.tree.map(
                lambda x: jnp.repeat(x[None], copies, axis=0),
                self.groups.init_cache(batch, max_length, dtype),
            )
        if self.config.layout.tail:
            cache["tail"] = self.tail.init_cache(batch, max_length, dtype)
        return cache


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, dict[str, Any], dict[str, Any]]:
    """The model without its numbers.

    Returns:
      (graphdef, parameters as shapes and dtypes, logical axes of each parameter as a tuple of names
      or None). The last two are nested dicts of the same tree as `init_params` returns.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))))

    def axes(node, stacked=False):
        if isinstance(node, nnx.Variable):
            return (("layers",) if stacked else ()) + node.logical_axes
        return {name: axes(child, stacked or name == "groups") for name, child in node.items()}

    return graphdef, nnx.to_pure_dict(state), axes(state)


def init_params(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
    """Fresh parameters as a plain nested dict; may run under `jax.jit`."""
    return nnx.to_pure_dict(nnx.split(HybridLM(config, rngs=nnx.Rngs(key)))[1])


def bind(graphdef: nnx.GraphDef, params: dict[str, Any]) -> HybridLM:
    """Puts parameters under a model; cheap, and meant to be called inside jitted functions."""
    return nnx.merge(graphdef, params)

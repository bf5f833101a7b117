"""The public recurrent rules: checks, padding, dtypes and the choice of implementation.

Every rule is the one recurrence of `reference.py` with or without a decay g and a write strength
beta. An implementation is a function

    core(q, k, v, g | None, beta | None, initial_state, document | None, *, scale, ...)
        -> (o, final_state)

over inputs that are already zero at padding.

Shapes: B batch, T tokens, H query/key heads, G value heads (G % H == 0, value head j reads
query/key head j // (G // H)), K key dim, V value dim.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fastweights import sharding
from fastweights.ops import channelwise, checks, chunked, kernels, reference, scan, segments
from fastweights.ops.mosaic_gpu import support as gpu
from fastweights.ops.mosaic_tpu import support as tpu
from fastweights.ops.varying import vary_alike

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]


def gated_delta_rule(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    g_BTG: jax.Array,
    beta_BTG: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Gated delta rule: S <- e^g S; S <- S + beta k (v - S^T k)^T; o = scale S^T q.

    Yang et al. 2024, arXiv 2412.06464, eq. 10. The decay comes first, the error is taken against
    the decayed state, and the output reads the state after the write.

    Args:
      q_BTHK: queries.
      k_BTHK: keys; stable for unit keys and beta in [0, 2]. On Hopper GPUs bfloat16 keys that are
        all but equal, with beta near 2 and no decay, cost digits (docs/kernels.md, "Known limits").
      v_BTGV: values.
      g_BTG: log decay, <= 0 (natural logarithm of the factor on the state).
      beta_BTG: write strength, in [0, 2].
      scale: factor on the output, K**-0.5 by default.
      initial_state: [B, G, K, V], zeros by default. It belongs to the row's first document.
      segment_ids: int [B, T], the documents of a packed row. 0 = padding, which neither writes,
        decays nor resets and gives output 0; NaN there spreads nowhere. A document begins at a
        real token whose id differs from that of the real token before it.
      chunk_size: tokens per chunk of the chunked forms: 16, 32, 64, 128 or 256. No effect on the
        result beyond rounding.
      implementation: "auto" (one update for T = 1, otherwise "pallas" where it can and "chunked"
        elsewhere), "reference" (token by token), "chunked" (hand-written gradient), "scan" (chunks
        joined by an associative scan: more work, but a dependent chain of only
        log2(T / chunk_size) steps), or "pallas" (kernels in chunks of 64: Hopper GPUs, bfloat16,
        at T = 1 float32 too; TPUs, bfloat16 and float32; falls back to "chunked" or at T = 1 to
        "reference", and says so once).

    Returns:
      (o_BTGV in v's dtype, final state [B, G, K, V] after the last real token). The state and all
      arithmetic are in float32, or wider where the inputs are.

    Raises:
      UserError: on shapes or dtypes that do not fit, negative segment_ids, chunk_size or
        implementation. Traced values are checked under `checkify`; see `ops/checks.py`.
    """
    checks.check_given("gated_delta_rule", g=g_BTG, beta=beta_BTG)
    return _run(
        "gated_delta_rule",
        (q_BTHK, k_BTHK, v_BTGV, g_BTG, beta_BTG),
        scale,
        initial_state,
        segment_ids,
        chunk_size,
        implementation,
    )


def kimi_delta_rule(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    g_BTGK: jax.Array,
    beta_BTG: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Delta rule with a decay per key channel: S <- diag(e^g) S, then as `gated_delta_rule`.

    Kimi Delta Attention, Kimi Team 2025, arXiv 2510.26692, eq. 1. Arguments, results and errors as
    in `gated_delta_rule`, but for g_BTGK: one log decay, <= 0, for each row of each state.
    """
    checks.check_given("kimi_delta_rule", g=g_BTGK, beta=beta_BTG)
    return _run(
        "kimi_delta_rule",
        (q_BTHK, k_BTHK, v_BTGV, g_BTGK, beta_BTG),
        scale,
        initial_state,
        segment_ids,
        chunk_size,
        implementation,
        channels=True,
    )


def delta_rule(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    beta_BTG: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Delta rule: S <- S + beta k (v - S^T k)^T; o = scale S^T q.

    Schlag et al. 2021, arXiv 2102.11174, eq. 24; in chunks Yang et al. 2024, arXiv 2406.06484.
    Arguments, results and errors as in `gated_delta_rule`, without g.
    """
    checks.check_given("delta_rule", beta=beta_BTG)
    return _run(
        "delta_rule",
        (q_BTHK, k_BTHK, v_BTGV, None, beta_BTG),
        scale,
        initial_state,
        segment_ids,
        chunk_size,
        implementation,
    )


def gated_linear_attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    g_BTG: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Linear attention with one decay per head: S <- e^g S + k v^T; o = scale S^T q.

    The recurrence of Mamba-2, Dao and Gu 2024, arXiv 2405.21060, eq. 6 and section 5. Arguments,
    results and errors as in `gated_delta_rule`, without beta.
    """
    checks.check_given("gated_linear_attention", g=g_BTG)
    return _run(
        "gated_linear_attention",
        (q_BTHK, k_BTHK, v_BTGV, g_BTG, None),
        scale,
        initial_state,
        segment_ids,
        chunk_size,
        implementation,
    )


def linear_attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
    scale: float | None = None,
    initial_state: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array | tuple[jax.Array, jax.Array]]:
    """Linear attention: S <- S + k v^T; o = scale S^T q, divided by the running weight if asked.

    Katharopoulos et al. 2020, arXiv 2006.16236, eq. 18 to 20. q and k have their feature map
    behind them.

    Args:
      q_BTHK, k_BTHK, v_BTGV, segment_ids, chunk_size, implementation: as in `gated_delta_rule`.
      normalize: divide by scale z^T q + eps with the normaliser z <- z + k. Wants features whose
        products are not negative.
      eps: see normalize.
      scale: factor on the logits, by default K**-0.5, or 1 when normalising.
      initial_state: S [B, G, K, V], or (S, z [B, G, K]) when normalising.

    Returns:
      (o_BTGV in v's dtype, final state of the same form as initial_state).

    Raises:
      UserError: as `gated_delta_rule`.
    """
    name = "linear_attention"
    rest = (segment_ids, chunk_size, implementation)
    if not normalize:
        initial_state = checks.single_state(name, initial_state)
        inputs = (q_BTHK, k_BTHK, v_BTGV, None, None)
        return _run(name, inputs, scale, initial_state, *rest)

    # The normaliser is one more value channel, whose value is always 1.
    checks.check_rule(name, q_BTHK, k_BTHK, v_BTGV, None, None, *rest)
    ones = jnp.ones((*v_BTGV.shape[:3], 1), v_BTGV.dtype)
    acc = _accumulator(q_BTHK, k_BTHK, v_BTGV)
    if initial_state is not None:
        S_BGKV, z_BGK = checks.split_normalised_state(name, initial_state, q_BTHK, v_BTGV)
        initial_state = jnp.concatenate([S_BGKV, z_BGK[..., None].astype(S_BGKV.dtype)], axis=-1)
    # Kept wide until after the division: a rounded weight would cost the quotient its accuracy.
    v_wide = jnp.concatenate([v_BTGV, ones], axis=-1).astype(acc)
    inputs = (q_BTHK, k_BTHK, v_wide, None, None)
    scale = 1.0 if scale is None else scale
    o_wide, state = _run(name, inputs, scale, initial_state, *rest, normaliser=True)
    weight_BTG1 = o_wide[..., -1:] + eps
    if segment_ids is not None:
        # Padding has weight 0; with eps = 0 the quotient would be NaN there.
        weight_BTG1 = jnp.where((segment_ids != 0)[:, :, None, None], weight_BTG1, 1.0)
    o_BTGV = (o_wide[..., :-1] / weight_BTG1).astype(v_BTGV.dtype)
    return o_BTGV, (state[..., :-1], state[..., -1])


def _on_slices(name: str, arrays, **options) -> tuple[jax.Array, jax.Array]:
    """A rule on a mesh whose devices hold slices of the rows."""
    from fastweights.ops import sequence_parallel  # it runs the rules on them

    def run(q_BTHK, k_BTHK, v_BTGV, g, beta_BTG, initial_state, segment_ids):
        gates = [gate for gate in (g, beta_BTG) if gate is not None]
        given = dict(initial_state=initial_state, segment_ids=segment_ids)
        return sequence_parallel.run_rule(
            PUBLIC[name], q_BTHK, k_BTHK, v_BTGV, *gates, axis=sharding.SEQUENCE, **given, **options
        )

    heads, state = ("batch", "tokens", "heads", None), ("batch", "heads", None, None)
    g_axes = heads[: arrays[3].ndim] if arrays[3] is not None else None
    axes = (*[heads] * 3, g_axes, heads[:3], state, heads[:2])
    return sharding.on_each_device(run, arrays, axes, (heads, state))


# Logical axes of what the kernels take: q, k, v, g, beta, state, documents.
ROWS_AND_HEADS, STATE_AXES = ("batch", None, "heads", None), ("batch", "heads", None, None)
KERNEL_AXES = (
    *[ROWS_AND_HEADS] * 3, *[ROWS_AND_HEADS[:3]] * 2, STATE_AXES, ROWS_AND_HEADS[:2]
)  # fmt: skip


def _kernels(
    name: str, inputs: Inputs, state, implementation: str, **kind: bool
) -> Callable[..., tuple[jax.Array, jax.Array]] | None:
    """The kernels that take a call; None if none do, said once where that is a loss."""
    if implementation not in ("auto", "pallas"):
        return None
    on_tpu, one_token = tpu.on_tpu(), inputs[0].shape[1] == 1
    support = tpu if on_tpu else gpu
    reason = support.obstacle(*inputs[:3], state, **kind)
    if reason is not None:
        a_loss = (on_tpu or gpu.on_hopper()) and not one_token
        if implementation == "pallas" or a_loss:
            kernels.say_once(name, reason)
        return None
    # Pallas takes a while to import.
    if on_tpu:
        from fastweights.ops.mosaic_tpu import decode, rule
    else:
        from fastweights.ops.mosaic_gpu import decode, rule
    return decode.core if one_token else rule.core


def _accumulator(*inputs):
    return jnp.promote_types(jnp.result_type(*(x for x in inputs if x is not None)), jnp.float32)


def _run(
    name: str,
    inputs: Inputs,
    scale: float | None,
    initial_state: jax.Array | None,
    segment_ids: jax.Array | None,
    chunk_size: int,
    implementation: str,
    *,
    channels: bool = False,
    normaliser: bool = False,
) -> tuple[jax.Array, jax.Array]:
    checks.check_rule(name, *inputs, segment_ids, chunk_size, implementation, channels=channels)
    q_BTHK, _, v_BTGV, _, _ = inputs
    batch, length, _, key_dim = q_BTHK.shape
    value_heads, value_dim = v_BTGV.shape[2:]
    state_shape = (batch, value_heads, key_dim, value_dim)
    checks.check_state(name, "initial_state", initial_state, state_shape)
    acc = _accumulator(*inputs, initial_state)
    state = jnp.zeros(state_shape, acc) if initial_state is None else initial_state.astype(acc)
    if not v_BTGV.size:  # no token, or no row of the batch: nothing moves the state
        return v_BTGV, state
    factor = key_dim**-0.5 if scale is None else checks.known_number(name, "scale", scale)
    if sharding.cuts_tokens(length):
        form = dict(scale=factor, chunk_size=chunk_size, implementation=implementation)
        return _on_slices(name, (*inputs, state, segment_ids), **form)

    document_BT = valid_BT = None
    if segment_ids is not None:
        document_BT, valid_BT = segments.find_documents(segment_ids)
        inputs = jax.tree.map(lambda x: segments.select_real(x, valid_BT), inputs)
    inputs, state, document_BT = vary_alike((inputs, state, document_BT))
    checks.check_range(f"{name}: g is a log decay and must not be positive", inputs[3], high=0)
    checks.check_range(f"{name}: beta must lie in [0, 2]", inputs[4], low=0, high=2)
    kind = dict(channels=channels, normaliser=normaliser)
    kernel = _kernels(name, inputs, state, implementation, **kind)
    if kernel is not None:
        documents = () if length == 1 else (document_BT,)
        o_BTGV, state = sharding.on_each_device(
            functools.partial(kernel, scale=factor),
            (*inputs, state, *documents),
            KERNEL_AXES[: 6 + len(documents)],
            (ROWS_AND_HEADS, STATE_AXES),
        )
    elif implementation == "reference" or (length == 1 and implementation in ("auto", "pallas")):
        o_BTGV, state = reference.core(*inputs, state, document_BT, scale=factor)
    else:
        # "auto" too: chunks are the fastest form measured with gradients, for every rule
        # (docs/measurements.md). A chunk longer than the row would only hold padding.
        size = min(chunk_size, max(16, 1 << (length - 1).bit_length()))
        core = scan.core if implementation == "scan" else chunked.core
        form = channelwise.CHANNEL_DECAY if channels else chunked.SCALAR_DECAY
        o_BTGV, state = core(*inputs, state, document_BT, scale=factor, chunk_size=size, form=form)
    if valid_BT is not None:
        # The inputs are zero at padding, so o is too: this select is for the cotangent, which may
        # hold anything there.
        o_BTGV = segments.select_real(o_BTGV, valid_BT)
    return o_BTGV, state


PUBLIC = {
    rule.__name__: rule
    for rule in (
        gated_delta_rule, kimi_delta_rule, delta_rule, gated_linear_attention, linear_attention
    )
}  # fmt: skip

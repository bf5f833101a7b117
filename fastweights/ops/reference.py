"""Every rule token by token: the definition that all other implementations are tested against.

One recurrence covers them all. With state S, decay g and write strength beta at each token:

    S <- e^g S                          (no g: no decay; g a number, or one per row of S)
    d  = beta (v - S^T k)               (no beta: d = v)
    S <- S + k d^T
    o  = scale S^T q

With both this is the gated delta rule (Yang et al. 2024, arXiv 2412.06464, eq. 10), without g the
delta rule (Schlag et al. 2021, arXiv 2102.11174, eq. 24; Yang et al. 2024, arXiv 2406.06484),
with a decay per key channel Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, eq. 1),
without beta gated linear attention with a scalar decay (Mamba-2: Dao and Gu 2024, arXiv
2405.21060), without either linear attention (Katharopoulos et al. 2020, arXiv 2006.16236).

Shapes: B batch, T tokens, H query/key heads, G value heads, R = G // H value heads per query/key
head (value head j reads query/key head j // R), K key dim, V value dim.
"""

import jax
import jax.numpy as jnp


def _step(S_BHRKV, q_BHK, k_BHK, v_BHRV, g_BHRK, beta_BHR):
    """One token: (state after it, unscaled output); a decay of the whole state has K = 1 there."""
    if g_BHRK is not None:
        S_BHRKV = jnp.exp(g_BHRK)[..., None] * S_BHRKV
    if beta_BHR is not None:
        read_BHRV = jnp.einsum("bhk,bhrkv->bhrv", k_BHK, S_BHRKV, precision="highest")
        v_BHRV = beta_BHR[..., None] * (v_BHRV - read_BHRV)
    S_BHRKV = S_BHRKV + k_BHK[:, :, None, :, None] * v_BHRV[:, :, :, None, :]
    return S_BHRKV, jnp.einsum("bhk,bhrkv->bhrv", q_BHK, S_BHRKV, precision="highest")


def core(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    g: jax.Array | None,
    beta_BTG: jax.Array | None,
    initial_state_BGKV: jax.Array,
    document_BT: jax.Array | None,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence over T >= 1 tokens; T = 1 is one update, without a loop.

    Args:
      q_BTHK, k_BTHK, v_BTGV, g, beta_BTG: inputs, zero at padding; g is [B, T, G], or [B, T, G, K]
        for a decay per key channel; g and beta may be None.
      initial_state_BGKV: in the dtype of all arithmetic.
      document_BT: nondecreasing document numbers, or None. The state restarts from zero where the
        number rises; document 0 continues the initial state.
      scale: factor on the output.

    Returns:
      (o_BTGV in v's dtype, final state in the initial state's dtype).
    """
    batch, length, heads, key_dim = q_BTHK.shape
    value_heads, value_dim = v_BTGV.shape[2:]
    grouped = (batch, heads, value_heads // heads)
    acc = initial_state_BGKV.dtype
    S_BHRKV = initial_state_BGKV.reshape(*grouped, key_dim, value_dim)

    def over_time(x, shape):
        return None if x is None else jnp.moveaxis(x.astype(acc), 1, 0).reshape(length, *shape)

    tokens = (
        over_time(q_BTHK, (batch, heads, key_dim)),
        over_time(k_BTHK, (batch, heads, key_dim)),
        over_time(v_BTGV, (*grouped, value_dim)),
        over_time(g, (*grouped, 1 if g is None or g.ndim == 3 else key_dim)),
        over_time(beta_BTG, grouped),
    )
    if length == 1:
        # A single token never leaves the document that the state belongs to.
        S_BHRKV, o_BHRV = _step(S_BHRKV, *(None if x is None else x[0] for x in tokens))
        o_TBHRV = o_BHRV[None]
    else:
        resets_TB = None
        if document_BT is not None:
            resets_TB = jnp.diff(document_BT, axis=1, prepend=0).T > 0

        def body(S_BHRKV, token):
            reset_B, token = token
            if reset_B is not None:
                S_BHRKV = jnp.where(reset_B[:, None, None, None, None], 0.0, S_BHRKV)
            return _step(S_BHRKV, *token)

        S_BHRKV, o_TBHRV = jax.lax.scan(body, S_BHRKV, (resets_TB, tokens))
    o_BTGV = jnp.moveaxis(scale * o_TBHRV, 0, 1).reshape(v_BTGV.shape)
    return o_BTGV.astype(v_BTGV.dtype), S_BHRKV.reshape(initial_state_BGKV.shape)

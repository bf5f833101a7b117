"""How much a memory of fixed size holds before any training: random keys, read back by argmax.

Each key is written with one of many candidate values, some keys then once more with another, and
the answer is the candidate closest to what is read. Addition sums old and new values; the delta
rule overwrites. For random keys written once addition stores more pairs than one pass of the delta
rule, whose gain comes from keys that were learnt to be nearly perpendicular, and from writing anew.

Array legend: B memories, N writes, P pairs, C candidates, K key dim, V value dim.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fastweights import ops
from fastweights.errors import check

RULES = ("additive", "delta")


def memory_probe(
    rule: str,
    *,
    key_dim: int,
    pairs: int,
    rewritten: int = 0,
    decay: float = 1.0,
    value_dim: int = 64,
    candidates: int = 64,
    memories: int = 200,
    seed: int = 0,
) -> float:
    """Share of keys (of the rewritten ones, if there are any) whose latest value is read back.

    Args:
      rule: "additive" or "delta", the latter with full write strength.
      key_dim, value_dim: size of the state.
      pairs: keys, each written once.
      rewritten: how many of them are written a second time, after all first writes.
      decay: factor that the state shrinks by before each write.
      candidates: random values to choose from.
      memories: independent states to average over.
      seed: of keys and values.

    Raises:
      UserError: an unknown rule, more rewritten keys than keys, or a decay outside (0, 1].
    """
    check(rule in RULES, f"the probe knows no rule {rule!r}; choose one of {', '.join(RULES)}.")
    check(
        0 <= rewritten <= pairs and pairs >= 1,
        f"the probe writes {rewritten} of {pairs} keys again; give at least 1 key and no more "
        "rewritten ones than keys.",
    )
    check(0 < decay <= 1, f"the probe's decay is {decay}; it must be above 0 and at most 1.")
    rng = np.random.default_rng((seed, key_dim, pairs, rewritten))
    keys_BPK = rng.standard_normal((memories, pairs, key_dim))
    keys_BPK /= np.linalg.norm(keys_BPK, axis=2, keepdims=True)
    values_BCV = rng.standard_normal((memories, candidates, value_dim))
    values_BCV /= np.linalg.norm(values_BCV, axis=2, keepdims=True)
    first_BP, again_BP = rng.integers(candidates, size=(2, memories, pairs))

    which_N = np.concatenate([np.arange(pairs), np.arange(rewritten)])
    written_BN = np.concatenate([first_BP, again_BP[:, :rewritten]], axis=1)
    k_BN1K = jnp.asarray(keys_BPK[:, which_N, None], jnp.float32)
    v_BNV = np.take_along_axis(values_BCV, written_BN[:, :, None], axis=1)
    v_BN1V = jnp.asarray(v_BNV[:, :, None], jnp.float32)
    g_BN1 = jnp.full(k_BN1K.shape[:3], np.log(decay), jnp.float32)
    if rule == "additive":
        _, S_B1KV = ops.gated_linear_attention(k_BN1K, k_BN1K, v_BN1V, g_BN1)
    else:
        _, S_B1KV = ops.gated_delta_rule(k_BN1K, k_BN1K, v_BN1V, g_BN1, jnp.ones_like(g_BN1))
    asked = slice(0, rewritten or pairs)
    read_BPV = keys_BPK[:, asked] @ np.asarray(jax.device_get(S_B1KV), np.float64)[:, 0]
    found_BP = np.argmax(read_BPV @ np.swapaxes(values_BCV, 1, 2), axis=2)
    wanted_BP = again_BP if rewritten else first_BP
    return float(np.mean(found_BP == wanted_BP[:, asked]))

"""What a memory of fixed size can and cannot do, in four small experiments without training.

    python scripts/memory_lab.py --out runs/memory_lab.png

1. Addition is a regrouped sum: S^T q equals sum_i (k_i . q) v_i, for 50 random keys.
2. Overwriting: a second value under the same keys. Addition returns a blend of both, the delta
   rule the second one (Schlag et al. 2021, arXiv 2102.11174, section 4.2).
3. Capacity: n pairs under random unit keys of 32 numbers, each read back as the nearest of the n
   values. No rule escapes the fixed size, and for many random keys the delta rule, which corrects
   the latest write at the cost of earlier ones, does worse than addition.
4. A memory of 4 x 4 numbers: keys a and b perpendicular, c half along a, then a overwritten, under
   gates of 1.0, 0.9 and 0.5 a write.

Arrays: B memories, N keys, K key dim, V value dim.
"""

import argparse
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from fastweights import cli, files, ops
from fastweights.errors import check

KEY_DIM, VALUE_DIM = 32, 64
COUNTS = (4, 8, 16, 32, 64, 128)
REPEATS = 20
GATES = (1.0, 0.9, 0.5)
GATE = 0.95  # of the gated delta rule in experiment 3


def write(rule: str, k_BNK: np.ndarray, v_BNV: np.ndarray, gate: float = GATE) -> np.ndarray:
    """The states S_BKV after writing each row's pairs in order with full strength."""
    count = k_BNK.shape[1]
    # Padding to one length, so that all numbers of pairs share one compiled program.
    padding = ((0, 0), (0, -count % max(COUNTS)), (0, 0))
    k, v = (jnp.pad(jnp.asarray(x, jnp.float32), padding)[:, :, None] for x in (k_BNK, v_BNV))
    segment_ids = jnp.broadcast_to((jnp.arange(k.shape[1]) < count)[None], k.shape[:2])
    return np.asarray(_write(rule, k, v, jnp.log(gate), segment_ids.astype(jnp.int32)))


@functools.partial(jax.jit, static_argnums=0)
def _write(rule, k_BN1K, v_BN1V, log_gate, segment_ids_BN):
    ones_BN1 = jnp.ones(k_BN1K.shape[:3])
    if rule == "additive":
        S = ops.linear_attention(k_BN1K, k_BN1K, v_BN1V, segment_ids=segment_ids_BN)[1]
    elif rule == "delta":
        S = ops.delta_rule(k_BN1K, k_BN1K, v_BN1V, ones_BN1, segment_ids=segment_ids_BN)[1]
    else:
        S = ops.gated_delta_rule(
            k_BN1K, k_BN1K, v_BN1V, log_gate * ones_BN1, ones_BN1, segment_ids=segment_ids_BN
        )[1]
    return S[:, 0]


def random_pairs(seed: int, batch: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random unit keys [B, N, K] and values [B, N, V]."""
    rng = np.random.default_rng((seed, count))
    k_BNK = rng.standard_normal((batch, count, KEY_DIM))
    k_BNK /= np.linalg.norm(k_BNK, axis=2, keepdims=True)
    return k_BNK, rng.standard_normal((batch, count, VALUE_DIM))


def regrouped_sum(seed: int = 0, count: int = 50) -> float:
    """Largest difference between reading the state and the sum, over the largest value."""
    k_BNK, v_BNV = random_pairs(seed, 1, count)
    query_K = np.random.default_rng(seed).standard_normal(KEY_DIM)
    read_V = write("additive", k_BNK, v_BNV)[0].T @ query_K
    sum_V = (k_BNK[0] @ query_K) @ v_BNV[0]
    return float(np.abs(read_V - sum_V).max() / np.abs(sum_V).max())


def overwrite(seed: int = 0, count: int = 8) -> dict[str, tuple[float, float]]:
    """Rule -> mean share of (old value, new value) in what is read after the second writing.

    Keys are orthonormal, so that nothing but the second writing disturbs the first. The shares are
    the least-squares coefficients of the read vector on the two values.
    """
    rng = np.random.default_rng(seed)
    keys_NK = np.linalg.qr(rng.standard_normal((KEY_DIM, KEY_DIM)))[0][:count]
    old_NV, new_NV = rng.standard_normal((2, count, VALUE_DIM))
    shares = {}
    for rule in ("additive", "delta"):
        k_BNK, v_BNV = np.concatenate([keys_NK] * 2)[None], np.concatenate([old_NV, new_NV])[None]
        S_KV = write(rule, k_BNK, v_BNV)[0]
        found = [
            np.linalg.lstsq(np.stack([old_NV[i], new_NV[i]], axis=1), S_KV.T @ keys_NK[i])[0]
            for i in range(count)
        ]
        old, new = np.mean(found, axis=0)
        shares[rule] = (float(old), float(new))
    return shares


def capacity(seed: int = 0) -> dict[str, list[float]]:
    """Rule -> share of pairs not read back, for each of `COUNTS`."""
    errors: dict[str, list[float]] = {"additive": [], "delta": [], "gated delta": []}
    for count in COUNTS:
        k_BNK, v_BNV = random_pairs(seed, REPEATS, count)
        for rule, found in errors.items():
            read_BNV = k_BNK @ write(rule, k_BNK, v_BNV)
            nearest_BN = np.argmax(read_BNV @ np.swapaxes(v_BNV, 1, 2), axis=2)
            found.append(float(np.mean(nearest_BN != np.arange(count)[None])))
    return errors


def small_memory() -> dict[float, dict[str, tuple[float, float]]]:
    """Gate -> key -> (component of the read along its last value, length of the rest).

    a, b and c are written in turn, then a gets a new value; values are orthonormal.
    """
    a, b = np.eye(4)[:2]
    c = (a + np.eye(4)[2]) / np.sqrt(2)
    value_a, value_b, value_c, value_new = np.eye(4)
    keys_NK = np.stack([a, b, c, a])
    values_NV = np.stack([value_a, value_b, value_c, value_new])
    results = {}
    for gate in GATES:
        S_KV = write("gated delta", keys_NK[None], values_NV[None], gate)[0]
        results[gate] = {}
        for name, key, value in (("a", a, value_new), ("b", b, value_b), ("c", c, value_c)):
            read_V = S_KV.T @ key
            along = float(read_V @ value)
            results[gate][name] = (along, float(np.linalg.norm(read_V - along * value)))
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", required=True, type=pathlib.Path, help="PNG, SVG or PDF")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    check(args.seed >= 0, f"--seed is {args.seed}; use 0 or more.")

    print(f"1. regrouped sum: largest relative difference {regrouped_sum(args.seed):.1e}")
    shares = overwrite(args.seed)
    for rule, (old, new) in shares.items():
        print(f"2. after a second writing, {rule}: {old:.2f} old + {new:.2f} new")
    errors = capacity(args.seed)
    print("3. pairs lost    n = " + "".join(f"{count:7d}" for count in COUNTS))
    for rule, values in errors.items():
        print(f"   {rule:>16}  " + "".join(f"{value:7.3f}" for value in values))
    small = small_memory()
    for gate, reads in small.items():
        told = ", ".join(f"{k} {along:.2f} (rest {rest:.2f})" for k, (along, rest) in reads.items())
        print(f"4. gate {gate}: {told}")
    draw(shares, errors, small, args.out)
    print(f"figure: {args.out}")
    return 0


def draw(shares: dict, errors: dict, small: dict, out: pathlib.Path) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    bars(left, list(shares), {"old value": 0, "new value": 1}, lambda r, i: shares[r][i])
    left.set_title("Read after overwriting")
    for rule, values in errors.items():
        middle.plot(COUNTS, values, marker="o", label=rule)
    middle.set_xscale("log", base=2)
    middle.set_xticks(COUNTS, map(str, COUNTS))
    middle.set_xlabel(f"pairs in {KEY_DIM} dimensions")
    middle.set_title("Share of pairs lost")
    middle.legend()
    gates = {f"gate {gate}": gate for gate in GATES}
    bars(right, ["a", "b", "c"], gates, lambda key, gate: small[gate][key][0])
    right.set_title("4 x 4 memory: recall of the last value")
    try:
        files.save_figure(figure, out)
    finally:
        plt.close(figure)


def bars(axes: Axes, groups: list[str], kinds: dict[str, Any], height: Any) -> None:
    """Bars side by side: one colour a kind, one place a group."""
    width = 0.8 / len(kinds)
    for i, (label, kind) in enumerate(kinds.items()):
        places = [place + (i - (len(kinds) - 1) / 2) * width for place in range(len(groups))]
        container = axes.bar(places, [height(group, kind) for group in groups], width, label=label)
        axes.bar_label(container, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 1.35)
    axes.legend(loc="upper center", ncols=len(kinds), fontsize=8)


if __name__ == "__main__":
    cli.run(main)

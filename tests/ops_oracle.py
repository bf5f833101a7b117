"""The recurrence and its gradient in plain NumPy float64, independent of the code under test."""

import itertools

import numpy as np

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def random_inputs(seed=0, *, B=2, T=200, H=2, G=4, K=5, V=7, g_mean=-0.1, channels=False):
    """Inputs with unit keys, mild decay and cotangents `do`, `dS`, in float32.

    `channels` asks for a decay per key channel.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    q, k = normal(B, T, H, K), normal(B, T, H, K)
    inputs = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": normal(B, T, G, V),
        "g": g_mean * rng.exponential(size=(B, T, G, K) if channels else (B, T, G)),
        "beta": rng.uniform(size=(B, T, G)),
        "initial_state": normal(B, G, K, V),
        "do": normal(B, T, G, V),
        "dS": normal(B, G, K, V),
    }
    return {name: x.astype(np.float32) for name, x in inputs.items()}


def recurrence(x, *, scale=None):
    """Runs one document per row token by token and back.

    Args:
      x: dict as from `random_inputs`; without "g" or "beta" that part of the rule is absent.
      scale: K**-0.5 by default.

    Returns:
      dict with o, S and the gradients dq, dk, dv, dg, dbeta, dinitial_state.
    """
    x = {name: np.asarray(a, np.float64) for name, a in x.items()}
    per_key_head = x["v"].shape[2] // x["q"].shape[2]
    q, k = (np.repeat(x[name], per_key_head, axis=2) for name in "qk")
    v, do, S = x["v"], x["do"], x["initial_state"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    length = v.shape[1]
    g_shape = x["g"].shape if "g" in x else v.shape[:3]
    g_BTGK = x["g"] if len(g_shape) == 4 else x.get("g", np.zeros(g_shape))[..., None]
    decay = np.exp(g_BTGK)
    beta = x.get("beta")
    o = np.zeros_like(v)
    tape = []
    for t in range(length):
        decayed = decay[:, t, :, :, None] * S
        error = v[:, t]
        delta = error
        if beta is not None:
            error = error - np.einsum("bgk,bgkv->bgv", k[:, t], decayed)
            delta = beta[:, t, :, None] * error
        S = decayed + k[:, t, :, :, None] * delta[:, :, None, :]
        o[:, t] = scale * np.einsum("bgk,bgkv->bgv", q[:, t], S)
        tape.append((decayed, error, delta, S))
    out = {"o": o, "S": S}

    grad = {name: np.zeros_like(a) for name, a in (("q", q), ("k", k), ("v", v))}
    grad["g"], grad["beta"] = np.zeros(g_shape), np.zeros(v.shape[:3])
    dS = x["dS"]
    for t in reversed(range(length)):
        decayed, error, delta, S = tape[t]
        grad["q"][:, t] = scale * np.einsum("bgkv,bgv->bgk", S, do[:, t])
        dS = dS + scale * q[:, t, :, :, None] * do[:, t, :, None, :]
        ddelta = np.einsum("bgkv,bgk->bgv", dS, k[:, t])
        grad["k"][:, t] = np.einsum("bgkv,bgv->bgk", dS, delta)
        grad["v"][:, t] = ddelta
        if beta is not None:
            derror = beta[:, t, :, None] * ddelta
            grad["beta"][:, t] = np.sum(ddelta * error, axis=-1)
            grad["v"][:, t] = derror
            grad["k"][:, t] -= np.einsum("bgkv,bgv->bgk", decayed, derror)
            dS = dS - k[:, t, :, :, None] * derror[:, :, None, :]
        grad["g"][:, t] = np.sum(dS * decayed, axis=-1 if len(g_shape) == 4 else (-1, -2))
        dS = decay[:, t, :, :, None] * dS
    for name in "qk":
        grouped = (*grad[name].shape[:2], -1, per_key_head, grad[name].shape[-1])
        grad[name] = grad[name].reshape(grouped).sum(axis=3)
    grad["initial_state"] = dS
    out.update({f"d{name}": grad[name] for name in NAMES if name in x})
    return out


def packed(x, lengths):
    """Runs documents of the given lengths separately and lays the results side by side.

    The first document starts from the initial state, the last one hands over the final state, and
    only these feel their gradients.
    """
    starts = np.cumsum([0, *lengths])
    assert starts[-1] == x["v"].shape[1]
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        part = {}
        for name, a in x.items():
            if name == "initial_state":
                part[name] = a if i == 0 else np.zeros_like(a)
            elif name == "dS":
                part[name] = a if i == len(lengths) - 1 else np.zeros_like(a)
            else:
                part[name] = a[:, start:end]
        parts.append(recurrence(part))
    out = {}
    for name in parts[0]:
        if name == "S":
            out[name] = parts[-1][name]
        elif name == "dinitial_state":
            out[name] = parts[0][name]
        else:
            out[name] = np.concatenate([part[name] for part in parts], axis=1)
    return out


def assert_close(got, want, tolerance=1e-5, floor=1e-20):
    """Relative RMS error and relative largest error, for every entry of `want`.

    Where a gradient vanishes up to float64's reach the error may be no more than `floor` of 1.
    """
    assert set(got) == set(want)
    worst = {}
    for name, reference in want.items():
        value = np.asarray(got[name], np.float64)
        assert value.shape == reference.shape, name
        error = value - reference
        rms = np.sqrt(np.mean(error**2)) / max(np.sqrt(np.mean(reference**2)), floor)
        largest = np.max(np.abs(error)) / max(np.max(np.abs(reference)), floor)
        # NaN must not pass: it compares false.
        if not (rms <= tolerance and largest <= 2 * tolerance):
            worst[name] = (rms, largest)
    assert not worst, f"relative RMS and largest error beyond {tolerance}: {worst}"

"""Inputs and float64 answers for the rules whose states belong to channels: Mamba's and S4's."""

import numpy as np

from fastweights.ops.hippo import legs_pairs


def selective_inputs(seed=0, *, B=2, T=200, D=6, N=4, rate=1.0):
    """Inputs with steps around 0.1, rates around `rate` and cotangents `do`, `dS`, in float32."""
    rng = np.random.default_rng(seed)
    x = {
        "x": rng.standard_normal((B, T, D)),
        "dt": 0.1 * rng.exponential(size=(B, T, D)),
        "A": -rate * rng.uniform(0.5, 2.0, size=(D, N)),
        "B": rng.standard_normal((B, T, N)),
        "C": rng.standard_normal((B, T, N)),
        "D": rng.standard_normal(D),
        "initial_state": rng.standard_normal((B, D, N)),
        "do": rng.standard_normal((B, T, D)),
        "dS": rng.standard_normal((B, D, N)),
    }
    return {name: a.astype(np.float32) for name, a in x.items()}


def selective_recurrence(x):
    """Outputs, final state and all gradients of one document per row, in NumPy."""
    x = {name: np.asarray(a, np.float64) for name, a in x.items()}
    u, dt, B, C, A = (x[name] for name in ("x", "dt", "B", "C", "A"))
    decay = np.exp(dt[..., None] * A)
    h, tape, o = x["initial_state"], [], np.zeros_like(u)
    for t in range(u.shape[1]):
        tape.append(h)
        h = decay[:, t] * h + (dt[:, t] * u[:, t])[..., None] * B[:, t, None]
        o[:, t] = np.sum(h * C[:, t, None], -1) + x["D"] * u[:, t]
    out = {"o": o, "S": h}
    d = {name: np.zeros_like(a) for name, a in x.items() if name not in ("do", "dS")}
    d["D"] = np.sum(x["do"] * u, (0, 1))
    dh = x["dS"]
    for t in reversed(range(u.shape[1])):
        do = x["do"][:, t]
        dh = dh + do[..., None] * C[:, t, None]
        after = decay[:, t] * tape[t] + (dt[:, t] * u[:, t])[..., None] * B[:, t, None]
        d["C"][:, t] = np.sum(after * do[..., None], 1)
        dwrite = np.sum(dh * B[:, t, None], -1)
        dlog = dh * decay[:, t] * tape[t]
        d["x"][:, t] = dwrite * dt[:, t] + x["D"] * do
        d["dt"][:, t] = dwrite * u[:, t] + np.sum(dlog * A, -1)
        d["B"][:, t] = np.sum(dh * (dt[:, t] * u[:, t])[..., None], 1)
        d["A"] += np.sum(dlog * dt[:, t, :, None], 0)
        dh = decay[:, t] * dh
    d["initial_state"] = dh
    return out | {f"d{name}": a for name, a in d.items()}


def structured_inputs(seed=0, *, low_rank=True, B=2, T=200, D=4, N=8, dt=(3e-3, 0.1)):
    """A LegS system a little disturbed in every channel; float32 and complex64."""
    rng = np.random.default_rng(seed)

    def noise(*shape):
        return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)

    A, P, B_in = (np.tile(a[None], (D, 1)) for a in legs_pairs(N))
    A = A.real * rng.uniform(0.5, 2.0, A.shape) + 1j * A.imag
    x = {
        "dt": np.exp(np.linspace(*np.log(dt), D)),
        "A": A,
        "B": B_in + 0.1 * noise(*A.shape),
        "C": noise(*A.shape),
        "P": P + 0.1 * noise(*A.shape),
        "D": rng.standard_normal(D),
        "x": rng.standard_normal((B, T, D)),
        "initial_state": rng.standard_normal((B, D, N)),
        "do": rng.standard_normal((B, T, D)),
        "dS": rng.standard_normal((B, D, N)),
    }
    if not low_rank:
        del x["P"]
    return {n: a.astype(np.complex64 if np.iscomplexobj(a) else np.float32) for n, a in x.items()}

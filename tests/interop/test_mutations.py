"""The comparison with published logits notices the mistakes that such ports have been seen to make.

One program computes the tiny Qwen3.5 with all mistakes in it, each behind a number that is given
when it runs; mistakes in the reading of weights are made in the parameters. Each must move the
logits further than `test_published_models.py` allows.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import published
import tiny_models
from fastweights import ops
from fastweights.interop.tensors import Kernels
from fastweights.mixers import GatedDeltaNet, attention, norms
from fastweights.ops import convolution, features

ALLOWED = 1e-4  # in test_published_models.py
IN_CODE = (
    "none",
    "tiled heads",
    "gate before the norm",
    "gate by sigmoid",
    "attention's gate by silu",
    "no gate of attention",
    "all channels turned",
    "base 1e4",
    "norm of q and k after the turn",
    "no scale of q",
    "l2 epsilon on the mean",
    "no l2 norm",
    "norm epsilon 1e-5",
    "no silu after the convolution",
    "read before the write",
    "prediction from the state before its decay",
    "no prediction",
    "bfloat16 state",
    "bfloat16 gates",
)


class Patched:
    """Something with a few attributes replaced."""

    def __init__(self, original, **changed):
        self._original = original
        self.__dict__ |= changed

    def __getattr__(self, name):
        return getattr(self._original, name)


@pytest.fixture(scope="module")
def case():
    return published.read(published.DATA / "published" / "tiny_qwen3_5")


@pytest.fixture(scope="module")
def logits_with(case):
    """(number of a mistake in code, parameters) -> logits."""
    patch = pytest.MonkeyPatch()
    now = []

    def pick(name, wrong, right):
        return jnp.where(now[0] == IN_CODE.index(name), wrong, right)

    def through_bfloat16(x):
        return x.astype(jnp.bfloat16).astype(x.dtype)

    normalise, gated = norms._normalise, norms.GatedRMSNorm.__call__
    patch.setattr(
        norms,
        "_normalise",
        lambda x, eps: pick("norm epsilon 1e-5", normalise(x, 1e-5), normalise(x, eps)),
    )

    def gated_norm(self, x, gate=None):
        y = pick("gate by sigmoid", gated(self, x) * jax.nn.sigmoid(gate), gated(self, x, gate))
        return pick("gate before the norm", gated(self, x * jax.nn.silu(gate)), y)

    patch.setattr(norms.GatedRMSNorm, "__call__", gated_norm)

    def sigmoid(x):
        y = pick("attention's gate by silu", jax.nn.silu(x), jax.nn.sigmoid(x))
        return pick("no gate of attention", 1.0, y)

    patch.setattr(attention, "jax", Patched(jax, nn=Patched(jax.nn, sigmoid=sigmoid)))
    rotary, l2_normalize, plain_norm = ops.rotary, ops.l2_normalize, norms.RMSNorm.__call__
    scales = []  # of the norms of q and k, in the order in which the two are turned

    def norm(self, x):
        if x.ndim == 4:
            scales.append(1 + self.scale[...][None, None, None])
        return plain_norm(self, x)

    def turn(x, positions, theta, fraction):
        scale = scales.pop(0)
        y = rotary(x, positions, theta=theta, fraction=fraction)
        y = pick("base 1e4", rotary(x, positions, theta=1e4, fraction=fraction), y)
        y = pick("all channels turned", rotary(x, positions, theta=theta, fraction=1.0), y)
        late = rotary(x / scale, positions, theta=theta, fraction=fraction) * scale
        return pick("norm of q and k after the turn", late, y)

    patch.setattr(norms.RMSNorm, "__call__", norm)
    patch.setattr(ops, "rotary", turn)

    def unit(x):
        y = pick("l2 epsilon on the mean", l2_normalize(x, 1e-6 * x.shape[-1]), l2_normalize(x))
        return pick("no l2 norm", x, y)

    patch.setattr(features, "l2_normalize", unit)
    activated = convolution._activated
    patch.setattr(
        convolution,
        "_activated",
        lambda x, name: pick("no silu after the convolution", x, activated(x, name)),
    )

    def rule(q, k, v, g, beta, **_):
        """The gated delta rule token by token; heads lead, B x G of them."""
        repeats, width = v.shape[2] // q.shape[2], q.shape[3]
        q = q * pick("no scale of q", 1.0, width**-0.5)
        q, k = (
            pick("tiled heads", jnp.tile(x, (1, 1, repeats, 1)), jnp.repeat(x, repeats, axis=2))
            for x in (q, k)
        )
        g, beta = (pick("bfloat16 gates", through_bfloat16(x), x) for x in (g, beta))

        def step(state, token):
            q, k, v, g, beta = token
            decayed = jnp.exp(g)[..., None, None] * state
            seen = pick("prediction from the state before its decay", state, decayed)
            told = pick("no prediction", 0.0, jnp.einsum("bgkv,bgk->bgv", seen, k))
            new = decayed + k[..., None] * (beta[..., None] * (v - told))[..., None, :]
            read = pick("read before the write", decayed, new)
            kept = pick("bfloat16 state", through_bfloat16(new), new)
            return kept, jnp.einsum("bgkv,bgk->bgv", read, q)

        start = jnp.zeros((v.shape[0], v.shape[2], width, v.shape[3]))
        tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
        state, o = jax.lax.scan(step, start, tokens)
        return jnp.moveaxis(o, 0, 1), state

    patch.setattr(GatedDeltaNet, "rule", staticmethod(rule))

    @tiny_models.quick_jit
    def logits(mistake, params):
        now[:] = [mistake]
        return case.forward(params, case.reference["input_ids"])[0]

    logits(0, case.params)
    patch.undo()
    return logits


def error(case, logits):
    return np.abs(np.asarray(logits) - case.reference["logits"]).max()


@pytest.mark.parametrize("mistake", IN_CODE)
def test_mistakes_in_code(case, logits_with, mistake):
    found = error(case, logits_with(IN_CODE.index(mistake), case.params))
    assert (found < ALLOWED) == (mistake == "none"), found


def deltas(params):
    return [params["groups"][f"layer_{i}"]["mixer"] for i in range(3)]


def plain_norms(params):
    for i in range(4):
        for name in ("mixer_norm", "mlp_norm"):
            params["groups"][f"layer_{i}"][name]["scale"] -= 1
    params["final_norm"]["scale"] -= 1


def centred_read_out(params):
    for mixer in deltas(params):
        mixer["read_out"]["norm"]["scale"] += 1


def queries_then_gates(params):
    """As if the rows of q_proj were all queries first, then all gates."""
    mixer = params["groups"]["layer_3"]["mixer"]
    kernels = mixer["qkv"]["q"]["kernel"], mixer["gate"]["kernel"]
    rows = Kernels((32, 32), groups=4).join([np.asarray(kernel[0]) for kernel in kernels])
    q, gate = Kernels((128, 128)).split(rows)
    for holder, kernel in ((mixer["qkv"]["q"], q), (mixer["gate"], gate)):
        holder["kernel"] = jax.device_put(kernel[None], holder["kernel"].sharding)


def interleaved_pairs(params):
    """Channels 2i and 2i + 1 turn together: they are put where i and i + 4 are."""
    mixer = params["groups"]["layer_3"]["mixer"]
    order = np.r_[0:8:2, 1:8:2, 8:32]
    for name in "qk":
        kernel = mixer["qkv"][name]["kernel"]
        heads = kernel.reshape(*kernel.shape[:2], -1, 32)[..., order]
        mixer["qkv"][name]["kernel"] = heads.reshape(kernel.shape)
        scale = mixer[f"{name}_norm"]
        scale["scale"] = scale["scale"][..., order]


def no_dt_bias(params):
    for mixer in deltas(params):
        mixer["decay"]["dt_bias"] *= 0


def a_and_b_swapped(params):
    for mixer in deltas(params):
        a, b = mixer["decay"], mixer["beta"]
        a["proj"], b["proj"] = b["proj"], a["proj"]


def taps_reversed(params):
    for mixer in deltas(params):
        for name in "qkv":
            mixer["qkv"][f"conv_{name}"] = mixer["qkv"][f"conv_{name}"][:, ::-1]


def rounded_rates(params):
    """Bits that only float32 has, lost."""
    for mixer in deltas(params):
        fine = mixer["decay"]["A_log"] + 0.003
        mixer["decay"]["A_log"] = fine.astype(jnp.bfloat16).astype(fine.dtype)


IN_WEIGHTS = (
    plain_norms,
    centred_read_out,
    queries_then_gates,
    interleaved_pairs,
    no_dt_bias,
    a_and_b_swapped,
    taps_reversed,
    rounded_rates,
)


@pytest.mark.parametrize("mistake", IN_WEIGHTS, ids=lambda mistake: mistake.__name__)
def test_mistakes_in_weights(case, logits_with, mistake):
    params = jax.tree.map(copy.copy, case.params)
    mistake(params)
    assert error(case, logits_with(0, params)) > ALLOWED

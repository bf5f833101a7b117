"""The selective scan of Mamba: a diagonal state space whose step, input and output maps are data.

Gu and Dao 2023, arXiv 2312.00752, eq. 2 and 4 and algorithm 2. At each token, for every channel d
and state n:

    h <- exp(dt A) h + dt B x,    y = sum over n of C h + D x

The chunked form follows section 3.3.2: states exist for one chunk of tokens at a time, only those
before each chunk are kept, and the backward pass computes the others anew.

Shapes: B batch, T tokens, D channels, N states a channel, C tokens a chunk, M chunks.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fastweights import sharding
from fastweights.errors import check
from fastweights.ops import checks, segments
from fastweights.ops.varying import vary_alike

IMPLEMENTATIONS = ("auto", "reference", "scan", "chunked")

Solver = Callable[[jax.Array, jax.Array, bool], jax.Array]


def selective_scan(
    x_BTD: jax.Array,
    dt_BTD: jax.Array,
    A_DN: jax.Array,
    B_BTN: jax.Array,
    C_BTN: jax.Array,
    *,
    D: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Selective scan: h <- exp(dt A) h + dt B x; y = C h + D x.

    Args:
      x_BTD: inputs.
      dt_BTD: step sizes, >= 0.
      A_DN: rates, <= 0.
      B_BTN: how a token enters the states.
      C_BTN: how a token reads them.
      D: [D], the share of x that goes straight to the output; None for none.
      initial_state: [B, D, N], zeros by default. It belongs to the row's first document.
      segment_ids: int [B, T], the documents of a packed row, as in `gated_delta_rule`: 0 = padding,
        which neither writes, decays nor resets and gives output 0; NaN there spreads nowhere.
      chunk_size: tokens a chunk: 16, 32, 64, 128 or 256. No effect on the result beyond rounding.
      implementation: "auto" (one update for T = 1, otherwise chunks, inside them token by token on
        CPUs and by an associative scan elsewhere), "reference" (token by token), "chunked" (an
        associative scan inside each chunk, hand-written gradient), or "scan" (one associative scan
        over the row: the shortest chain of dependent steps, but it holds B T D N numbers).

    Returns:
      (y_BTD in x's dtype, final state [B, D, N] after the last real token). The state and all
      arithmetic are in float32, or wider where the inputs are.

    Raises:
      UserError: as `gated_delta_rule`.
    """
    _check_inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, D, segment_ids)
    checks.check_options(
        "selective_scan", segment_ids, x_BTD.shape[:2], chunk_size, implementation, IMPLEMENTATIONS
    )
    (batch, length, channels), states = x_BTD.shape, A_DN.shape[1]
    shape = (batch, channels, states)
    checks.check_state("selective_scan", "initial_state", initial_state, shape)
    if sharding.cuts_tokens(length):
        arrays = (x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, D, initial_state, segment_ids)
        return _on_slices(arrays, chunk_size=chunk_size, implementation=implementation)
    given = [x_BTD, dt_BTD, A_DN, B_BTN, C_BTN]
    given += [x for x in (D, initial_state) if x is not None]
    acc = jnp.promote_types(jnp.result_type(*given), jnp.float32)
    h_BDN = jnp.zeros(shape, acc) if initial_state is None else initial_state.astype(acc)
    if not x_BTD.size:  # no token, or no row of the batch: nothing moves the state
        return x_BTD, h_BDN

    tokens, valid_BT = _Tokens(x_BTD, dt_BTD, B_BTN, C_BTN, None, None), None
    if segment_ids is not None:
        document_BT, valid_BT = segments.find_documents(segment_ids)
        tokens = tokens._replace(begins=jnp.diff(document_BT, axis=1, prepend=0) > 0)
        tokens = tokens._replace(valid=valid_BT)
    dt_real_BTD = dt_BTD if valid_BT is None else segments.select_real(dt_BTD, valid_BT)
    checks.check_range("selective_scan: dt must not be negative", dt_real_BTD, low=0)
    checks.check_range("selective_scan: A must not be positive", A_DN, high=0)
    A_DN, h_BDN, tokens = vary_alike((A_DN.astype(acc), h_BDN, tokens))
    if length == 1:
        # A single token never leaves the document that the state belongs to.
        tokens = _by_time(tokens._replace(begins=None))
        h_BDN, y_BD = _step(A_DN, h_BDN, jax.tree.map(lambda a: a[0], tokens))
        y_TBD = y_BD[None]
    elif implementation == "reference":
        h_BDN, y_TBD = jax.lax.scan(functools.partial(_step, A_DN), h_BDN, _by_time(tokens))
    elif implementation == "scan":
        y_TBD, h_TBDN = _chunk(_associative, A_DN, h_BDN, _by_time(tokens))[:2]
        h_BDN = h_TBDN[-1]
    else:
        solver = _by_platform if implementation == "auto" else _associative
        y_TBD, h_BDN = _in_chunks(solver, chunk_size, A_DN, h_BDN, tokens)
    y_BTD = jnp.moveaxis(y_TBD, 0, 1)
    if D is not None:
        # Selected anew in the backward pass, where NaN at padding would meet D's gradient.
        y_BTD = y_BTD + jax.checkpoint(_skip)(D.astype(acc), x_BTD, valid_BT)
    if valid_BT is not None:
        # Zero already: this select is for the cotangent, which may hold anything at padding.
        y_BTD = segments.select_real(y_BTD, valid_BT)
    return y_BTD.astype(x_BTD.dtype), h_BDN


def _on_slices(arrays, **options) -> tuple[jax.Array, jax.Array]:
    """`selective_scan` on a mesh whose devices hold slices of the rows."""
    from fastweights.ops import sequence_parallel  # it runs this op on them

    def run(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, D, initial_state, segment_ids):
        given = dict(D=D, initial_state=initial_state, segment_ids=segment_ids)
        return sequence_parallel.run_selective_scan(
            x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, axis=sharding.SEQUENCE, **given, **options
        )

    tokens, state = ("batch", "tokens", "heads"), ("batch", "heads", None)
    shared = ("batch", "tokens", None)
    axes = (*[tokens] * 2, ("heads", None), *[shared] * 2, ("heads",), state, shared[:2])
    return sharding.on_each_device(run, arrays, axes, (tokens, state))


class _Tokens(NamedTuple):
    """What tokens bring: any leading axes and then D or N, which the last two, bool, do not have.

    `begins` is True where documents begin (None: nowhere), `valid` at real tokens (None: all).
    """

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: jax.Array
    begins: jax.Array | None
    valid: jax.Array | None


def _by_time(tokens: _Tokens) -> _Tokens:
    """[B, T, ...] to [T, B, ...], with zeros at padding: dt = 0 neither decays nor writes."""
    if tokens.valid is not None:
        x, dt, B, C = (segments.select_real(a, tokens.valid) for a in tokens[:4])
        tokens = _Tokens(x, dt, B, C, tokens.begins, tokens.valid)
    return jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tokens)


def _skip(D, x_BTD, valid_BT):
    x_BTD = x_BTD if valid_BT is None else segments.select_real(x_BTD, valid_BT)
    return D[None, None] * x_BTD.astype(D.dtype)


def _factors(A_DN, tokens: _Tokens):
    """(decay, write) of tokens; where a document begins, nothing is left of what was before."""
    x_D, dt_D, B_N = (a.astype(A_DN.dtype) for a in (tokens.x, tokens.dt, tokens.B))
    lead = (None,) * (x_D.ndim - 1)
    decay_DN = jnp.exp(dt_D[..., None] * A_DN[lead])
    if tokens.begins is not None:
        decay_DN = jnp.where(tokens.begins[..., None, None], 0.0, decay_DN)
    return decay_DN, (dt_D * x_D)[..., None] * B_N[..., None, :]


def _step(A_DN, h_BDN, token: _Tokens):
    """One token: (state after it, output without D x)."""
    decay_BDN, write_BDN = _factors(A_DN, token)
    h_BDN = decay_BDN * h_BDN + write_BDN
    return h_BDN, jnp.sum(h_BDN * token.C.astype(A_DN.dtype)[:, None, :], axis=-1)


def _associative(decay, write, reverse: bool):
    """All h of h_t = decay_t h_(t-1) + write_t along the first axis, h = 0 before the first.

    Affine maps compose associatively (Blelloch 1990; Martin and Cundy 2018, arXiv 1709.04057).
    """

    def compose(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(compose, (decay, write), reverse=reverse)[1]


def _sequential(decay, write, reverse: bool):
    """The same, one after the other: least work, longest chain."""

    def body(h, factors):
        h = factors[0] * h + factors[1]
        return h, h

    return jax.lax.scan(body, jnp.zeros_like(write[0]), (decay, write), reverse=reverse)[1]


def _by_platform(decay, write, reverse: bool):
    # Measured: on a CPU, whose steps cost no launch, the associative scan's extra passes over
    # memory take twice as long.
    return jax.lax.platform_dependent(
        decay,
        write,
        cpu=functools.partial(_sequential, reverse=reverse),
        default=functools.partial(_associative, reverse=reverse),
    )


def _chunk(solver: Solver, A_DN, h_BDN, tokens: _Tokens):
    """The tokens of one chunk, [C, B, ...]: outputs, states after each, decays."""
    decay_CBDN, write_CBDN = _factors(A_DN, tokens)
    h_CBDN = solver(decay_CBDN, write_CBDN.at[0].add(decay_CBDN[0] * h_BDN), False)
    y_CBD = jnp.sum(h_CBDN * tokens.C.astype(A_DN.dtype)[:, :, None, :], axis=-1)
    return y_CBD, h_CBDN, decay_CBDN


def _in_chunks(solver: Solver, chunk_size: int, A_DN, h_BDN, tokens: _Tokens):
    """Outputs [T, B, D] and final state, chunk after chunk."""
    batch, length, channels = tokens.x.shape
    # A chunk longer than the row would only hold padding.
    size = min(chunk_size, max(16, 1 << (length - 1).bit_length()))
    extra = -length % size
    if extra:
        tokens = jax.tree.map(
            lambda a: jnp.pad(a, ((0, 0), (0, extra)) + ((0, 0),) * (a.ndim - 2)), tokens
        )
    y_MCBD, h_BDN = _core(solver, size, A_DN, h_BDN, tokens)
    return y_MCBD.reshape(-1, batch, channels)[:length], h_BDN


def _cut(tokens: _Tokens, n, size: int) -> _Tokens:
    """Chunk n by time. Cut where it is used: chunks laid out beforehand would copy every input."""
    return _by_time(
        jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, n * size, size, 1), tokens)
    )


def _core_forward(solver: Solver, size: int, A_DN, h_BDN, tokens: _Tokens):
    def body(h_BDN, n):
        y_CBD, h_CBDN, _ = _chunk(solver, A_DN, h_BDN, _cut(tokens, n, size))
        return h_CBDN[-1], (y_CBD, h_BDN)

    count = tokens.x.shape[1] // size
    h_BDN, (y_MCBD, h_MBDN) = jax.lax.scan(body, h_BDN, jnp.arange(count))
    return (y_MCBD, h_BDN), (A_DN, h_MBDN, tokens)


def _core_backward(solver: Solver, size: int, residuals, cotangents):
    """The adjoint recurrence dh_t = C_t dy_t + decay_(t+1) dh_(t+1), from the last chunk back."""
    A_DN, h_MBDN, whole = residuals
    dy_MCBD, dh_BDN = cotangents
    acc = A_DN.dtype

    def body(carry, chunk):
        dh_BDN, dA_DN = carry
        n, h_BDN, dy_CBD = chunk
        tokens = _cut(whole, n, size)
        _, h_CBDN, decay_CBDN = _chunk(solver, A_DN, h_BDN, tokens)
        x_CBD, dt_CBD = tokens.x.astype(acc), tokens.dt.astype(acc)
        B_CBN, C_CBN = tokens.B.astype(acc), tokens.C.astype(acc)
        # What reaches a state through its own output, and in the last one from the chunks behind.
        dh_CBDN = (dy_CBD[..., None] * C_CBN[:, :, None, :]).at[-1].add(dh_BDN)
        later_CBDN = jnp.concatenate([decay_CBDN[1:], jnp.zeros_like(decay_CBDN[:1])])
        dh_CBDN = solver(later_CBDN, dh_CBDN, True)
        before_CBDN = jnp.concatenate([h_BDN[None], h_CBDN[:-1]])
        dlog_CBDN = dh_CBDN * decay_CBDN * before_CBDN
        dwrite_CBD = jnp.sum(dh_CBDN * B_CBN[:, :, None, :], axis=-1)
        dA_DN = dA_DN + jnp.sum(dlog_CBDN * dt_CBD[..., None], axis=(0, 1))
        gradients = (
            dwrite_CBD * dt_CBD,
            jnp.sum(dlog_CBDN * A_DN[None, None], axis=-1) + dwrite_CBD * x_CBD,
            jnp.sum(dh_CBDN * (dt_CBD * x_CBD)[..., None], axis=2),
            jnp.sum(h_CBDN * dy_CBD[..., None], axis=2),
        )
        if tokens.valid is not None:
            gradients = tuple(segments.select_real(g, tokens.valid) for g in gradients)
        gradients = tuple(g.astype(a.dtype) for g, a in zip(gradients, tokens[:4], strict=True))
        return (decay_CBDN[0] * dh_CBDN[0], dA_DN), gradients

    chunks = (jnp.arange(h_MBDN.shape[0]), h_MBDN, dy_MCBD)
    start = (dh_BDN, jnp.zeros_like(A_DN))
    (dh_BDN, dA_DN), gradients = jax.lax.scan(body, start, chunks, reverse=True)
    dx, ddt, dB, dC = (jnp.moveaxis(g.reshape(-1, *g.shape[2:]), 0, 1) for g in gradients)
    return dA_DN, dh_BDN, _Tokens(dx, ddt, dB, dC, None, None)


_core = jax.custom_vjp(lambda *args: _core_forward(*args)[0], nondiff_argnums=(0, 1))
_core.defvjp(_core_forward, _core_backward)


def _check_inputs(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, D, segment_ids) -> None:
    name = "selective_scan"
    check(x_BTD.ndim == 3, f"{name}: x must be [B, T, D], got shape {x_BTD.shape}")
    (batch, length, channels) = x_BTD.shape
    check(
        A_DN.ndim == 2 and A_DN.shape[0] == channels and A_DN.shape[1] > 0,
        f"{name}: A must be [D, N] with D = {channels} and N >= 1, got shape {A_DN.shape}",
    )
    mapped = (batch, length, A_DN.shape[1])
    for label, a, axes, shape in (
        ("dt", dt_BTD, "[B, T, D]", x_BTD.shape),
        ("B", B_BTN, "[B, T, N]", mapped),
        ("C", C_BTN, "[B, T, N]", mapped),
        ("D", D, "[D]", (channels,)),
    ):
        check(
            a is None or a.shape == shape,
            f"{name}: {label} must be {axes} = {shape}, got {None if a is None else a.shape}",
        )
    for label, a in (("x", x_BTD), ("dt", dt_BTD), ("A", A_DN), ("B", B_BTN), ("C", C_BTN)):
        check(
            jnp.issubdtype(a.dtype, jnp.floating),
            f"{name}: {label} must be floating-point, got {a.dtype}",
        )

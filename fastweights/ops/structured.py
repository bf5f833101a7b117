"""The structured state space of S4: one linear recurrence a channel that no token can change.

Gu, Goel and Re 2021, arXiv 2111.00396 (diagonal plus low rank) and Gu et al. 2022, arXiv 2206.11893
(S4D, diagonal). In continuous time, for every channel,

    h' = A h + B x,    y = C h + D x,    A = diag(lambda) - P P^*  (P = 0 in the diagonal form)

and with step dt, by the bilinear rule or by zero-order hold (of a diagonal A only),

    h <- h + (1 - dt A / 2)^-1 dt (A h + B x),        h <- e^(dt A) h + A^-1 (e^(dt A) - 1) B x.

Rows, columns and A are complex with conjugate pairs of which one half is stored, so sums over
states are twice the real part of sums over pairs. A state is stored as real numbers: all real
parts, then all imaginary ones.

All forms work on Abar - 1 and not on Abar, here called E: near 1, where slow modes lie, rounding
Abar would move a memory of a thousand steps, rounding E does not.

Shapes: B batch, T tokens, D channels, N states a channel (real numbers), P = N / 2 pairs,
C tokens a chunk, L lags, F frequencies. K is N or P: a diagonal E acts on pairs, a dense one on
states.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastweights import sharding
from fastweights.errors import check
from fastweights.ops import checks, segments
from fastweights.ops.varying import vary_alike

IMPLEMENTATIONS = ("auto", "reference", "convolution", "scan")
DISCRETIZATIONS = ("zoh", "bilinear")
# Columns of the convolution's kernel; a row for every so many lags.
BLOCK = 64

_einsum = functools.partial(jnp.einsum, precision="highest")


def state_space(
    x_BTD: jax.Array,
    dt_D: jax.Array,
    A_DP: jax.Array,
    B_DP: jax.Array,
    C_DP: jax.Array,
    *,
    P: jax.Array | None = None,
    D: jax.Array | None = None,
    discretization: str = "zoh",
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """A state space a channel, the same at every token.

    Args:
      x_BTD: inputs.
      dt_D: step sizes, > 0.
      A_DP: complex diagonal, one of each conjugate pair, real parts < 0.
      B_DP: complex input maps.
      C_DP: complex output maps.
      P: complex [D, P], the low-rank part of A; None for the diagonal form.
      D: [D], the share of x that goes straight to the output; None for none.
      discretization: "zoh" (diagonal form only) or "bilinear".
      initial_state: real [B, D, N], zeros by default. It belongs to the row's first document.
      segment_ids: int [B, T], the documents of a packed row, as in `gated_delta_rule`: 0 = padding,
        which neither writes, decays nor resets and gives output 0; NaN there spreads nowhere.
      chunk_size: tokens a chunk of the scan form: 16, 32, 64, 128 or 256. No effect on the result
        beyond rounding.
      implementation: "convolution" (by FFT with a kernel as long as the row; it can neither start
        from a state nor at a document's first token, so it takes no initial_state and no
        segment_ids), "scan" (chunk by chunk: inside a chunk a masked product with the kernel,
        between chunks the state), "reference" (token by token), or "auto": one update for T = 1,
        the scan form for packed or stateful calls and on CPUs, where it was measured to be no
        slower (docs/measurements.md), otherwise the convolution.

    Returns:
      (y_BTD in x's dtype, final state, real [B, D, N], after the last real token). The state and
      all arithmetic are in float32, or wider where the inputs are.

    Raises:
      UserError: on shapes, dtypes or options that do not fit, and as `gated_delta_rule`.
    """
    _check_inputs(x_BTD, dt_D, A_DP, B_DP, C_DP, P, D, discretization)
    (batch, length, channels), pairs = x_BTD.shape, A_DP.shape[1]
    name, shape = "state_space", (batch, channels, 2 * pairs)
    checks.check_options(
        name, segment_ids, x_BTD.shape[:2], chunk_size, implementation, IMPLEMENTATIONS
    )
    checks.check_state(name, "initial_state", initial_state, shape)
    stateless = segment_ids is None and initial_state is None
    check(
        implementation != "convolution" or stateless,
        f"{name}: the convolution takes no initial_state and no segment_ids; use 'scan' or 'auto'",
    )
    if sharding.cuts_tokens(length):
        # Slices bring states along, which the convolution knows nothing of.
        implementation = "scan" if implementation == "convolution" else implementation
        arrays = (x_BTD, dt_D, A_DP, B_DP, C_DP, P, D, initial_state, segment_ids)
        form = dict(chunk_size=chunk_size, implementation=implementation)
        return _on_slices(arrays, discretization=discretization, **form)
    given = [x_BTD, dt_D, A_DP.real, B_DP.real, C_DP.real]
    given += [x for x in (D, initial_state) if x is not None]
    acc = jnp.promote_types(jnp.result_type(*given), jnp.float32)
    h_BDN = jnp.zeros(shape, acc) if initial_state is None else initial_state.astype(acc)
    if length == 0:
        return x_BTD, h_BDN
    pair_type = jnp.result_type(acc, jnp.complex64)
    A_DP, B_DP, C_DP = (a.astype(pair_type) for a in (A_DP, B_DP, C_DP))
    P = None if P is None else P.astype(pair_type)
    checks.check_range(f"{name}: dt must not be negative", dt_D, low=0)
    checks.check_range(f"{name}: A's real part must not be positive", A_DP.real, high=0)
    u_BTD, document_BT, valid_BT = x_BTD, None, None
    if segment_ids is not None:
        document_BT, valid_BT = segments.find_documents(segment_ids)
        u_BTD = segments.select_real(x_BTD, valid_BT)
    dt_D, A_DP, B_DP, C_DP, P, u_BTD, h_BDN, document_BT = vary_alike(
        (dt_D.astype(acc), A_DP, B_DP, C_DP, P, u_BTD.astype(acc), h_BDN, document_BT)
    )
    system = _System(dt_D, A_DP, B_DP, C_DP, P, discretization)
    if implementation == "reference" or length == 1:
        y_BTD, h_BDN = _recurrence(system, u_BTD, h_BDN, document_BT, valid_BT)
    else:
        size = min(chunk_size, max(16, 1 << (length - 1).bit_length()))

        def scan(u_BTD):
            return _scan(system, u_BTD, h_BDN, document_BT, valid_BT, size)

        def convolve(u_BTD):
            return _convolve(u_BTD, _kernel(system, length))

        # Of the scan only what somebody asks for is kept: here the state alone, if that.
        y_BTD, last_BDN = scan(u_BTD)
        if implementation == "convolution":
            y_BTD = convolve(u_BTD)
        elif implementation == "auto" and stateless:
            y_BTD = jax.lax.platform_dependent(
                u_BTD, cpu=lambda u_BTD: scan(u_BTD)[0], default=convolve
            )
        h_BDN = last_BDN
    if D is not None:
        y_BTD = y_BTD + D.astype(acc)[None, None] * u_BTD
    if valid_BT is not None:
        y_BTD = segments.select_real(y_BTD, valid_BT)
    return y_BTD.astype(x_BTD.dtype), h_BDN


def _on_slices(arrays, **options) -> tuple[jax.Array, jax.Array]:
    """`state_space` on a mesh whose devices hold slices of the rows."""
    from fastweights.ops import sequence_parallel  # it runs this op on them

    def run(x_BTD, dt_D, A_DP, B_DP, C_DP, P, D, initial_state, segment_ids):
        given = dict(P=P, D=D, initial_state=initial_state, segment_ids=segment_ids)
        return sequence_parallel.run_state_space(
            x_BTD, dt_D, A_DP, B_DP, C_DP, axis=sharding.SEQUENCE, **given, **options
        )

    tokens, state = ("batch", "tokens", "heads"), ("batch", "heads", None)
    axes = (tokens, ("heads",), *[("heads", None)] * 4, ("heads",), state, tokens[:2])
    return sharding.on_each_device(run, arrays, axes, (tokens, state))


class _System(NamedTuple):
    dt_D: jax.Array
    A_DP: jax.Array
    B_DP: jax.Array
    C_DP: jax.Array
    P_DP: jax.Array | None
    discretization: str


def idle_steps(
    dt_D: jax.Array,
    A_DP: jax.Array,
    *,
    P: jax.Array | None,
    discretization: str,
    most: int,
    dtype: Any,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """What becomes of a state while no input comes.

    Args:
      dt_D, A_DP, P, discretization: the system, as in `state_space`.
      most: steps at most.
      dtype: of states.

    Returns:
      A function of a state, real [B, D, N], and of the number of steps, int [B], that gives the
      state after them.
    """
    pair_type = jnp.result_type(dtype, jnp.complex64)
    A_DP, P = A_DP.astype(pair_type), None if P is None else P.astype(pair_type)
    system = _System(dt_D.astype(dtype), A_DP, A_DP, A_DP, P, discretization)
    # Abar^count from the powers of two in count.
    squares = _squares(_matrices(system)[0], 1 << (most.bit_length() - 1))

    def after(h_BDN, count_B):
        h = _to_pairs(h_BDN) if P is None else h_BDN
        for i, E in enumerate(squares):
            taken_B11 = ((count_B >> i) & 1)[:, None, None] == 1
            h = jnp.where(taken_B11, h + _act(E, h), h)
        return _to_states(h) if P is None else h

    return after


def _to_pairs(h):
    return jax.lax.complex(*jnp.split(h, 2, axis=-1))


def _to_states(pairs):
    return jnp.concatenate([pairs.real, pairs.imag], axis=-1)


def _to_rows(pairs):
    """Rows r with sum(r * state) = 2 Re sum(pairs * state's pairs)."""
    return 2 * _to_states(jnp.conj(pairs))


def _resolvent(s: _System):
    """(1 - dt A / 2)^-1 as a function of pairs [..., D, P], by Woodbury's identity."""
    half_D1 = s.dt_D[:, None] / 2
    inverse_DP = 1 / (1 - half_D1 * s.A_DP)
    if s.P_DP is None:
        return lambda w: inverse_DP[(None,) * (w.ndim - 2)] * w
    column_DP = inverse_DP * s.P_DP
    size_D1 = 2 * jnp.sum((jnp.conj(s.P_DP) * column_DP).real, axis=-1, keepdims=True)
    column_DP = column_DP * half_D1 / (1 + half_D1 * size_D1)

    def solve(w):
        lead = (None,) * (w.ndim - 2)
        w = inverse_DP[lead] * w
        return w - column_DP[lead] * _inner(s.P_DP, w)

    return solve


def _inner(P_DP, h):
    """P^* h over both halves of the pairs, [..., D, 1]."""
    product = jnp.conj(P_DP)[(None,) * (h.ndim - 2)] * h
    return 2 * jnp.sum(product.real, axis=-1, keepdims=True)


def _discretize(s: _System):
    """(change, input) of one step: h <- h + change(h) + input * x, for pairs h [..., D, P]."""
    dt_D1 = s.dt_D[:, None]
    if s.discretization == "zoh":
        grown_DP = jnp.expm1(dt_D1 * s.A_DP)
        return lambda h: grown_DP[(None,) * (h.ndim - 2)] * h, grown_DP / s.A_DP * s.B_DP
    solve = _resolvent(s)

    def change(h):
        lead = (None,) * (h.ndim - 2)
        rate = s.A_DP[lead] * h
        if s.P_DP is not None:
            rate = rate - s.P_DP[lead] * _inner(s.P_DP, h)
        return solve(dt_D1[lead] * rate)

    return change, solve(dt_D1 * s.B_DP)


def _recurrence(s: _System, u_BTD, h_BDN, document_BT, valid_BT):
    """The definition, token by token: (y_BTD, state after the last real token)."""
    change, input_DP = _discretize(s)

    def step(h_BDP, token):
        u_BD, begins_B, valid_B = token
        before = h_BDP
        if begins_B is not None:
            before = jnp.where(begins_B[:, None, None], 0.0, before)
        after = before + (change(before) + input_DP[None] * u_BD[..., None])
        if valid_B is not None:
            after = jnp.where(valid_B[:, None, None], after, h_BDP)
        return after, 2 * jnp.sum((s.C_DP[None] * after).real, axis=-1)

    begins_TB = None if document_BT is None else jnp.diff(document_BT, axis=1, prepend=0).T > 0
    tokens = (jnp.moveaxis(u_BTD, 1, 0), begins_TB, None if valid_BT is None else valid_BT.T)
    h_BDP = _to_pairs(h_BDN)
    if u_BTD.shape[1] == 1:
        h_BDP, y_BD = step(h_BDP, jax.tree.map(lambda a: a[0], tokens))
        return y_BD[:, None], _to_states(h_BDP)
    h_BDP, y_TBD = jax.lax.scan(step, h_BDP, tokens)
    return jnp.moveaxis(y_TBD, 0, 1), _to_states(h_BDP)


def _matrices(s: _System):
    """E, Bbar and C: over pairs where A is diagonal, [D, P], otherwise E_DNN and real vectors."""
    change, input_DP = _discretize(s)
    if s.P_DP is None:
        return change(jnp.ones_like(s.A_DP)), input_DP, s.C_DP
    basis_N1N = jnp.eye(2 * s.A_DP.shape[1], dtype=s.dt_D.dtype)[:, None]
    columns_NDN = _to_states(change(_to_pairs(basis_N1N)))
    return jnp.moveaxis(columns_NDN, 0, -1), _to_states(input_DP), _to_rows(s.C_DP)


def _act(E, v, *, row=False):
    """E v for columns v [..., D, K], or v E for rows."""
    if E.ndim == 2:
        return E[(None,) * (v.ndim - 2)] * v
    return _einsum("dji,...dj->...di" if row else "dij,...dj->...di", E, v)


def _twice(E):
    """(1 + E)^2 - 1."""
    return 2 * E + (E * E if E.ndim == 2 else _einsum("dij,djk->dik", E, E))


def _squares(E, count: int) -> list[jax.Array]:
    """Abar^(2^i) - 1 for 2^i = 1, 2, 4, ..., count, a power of two."""
    squares = [E]
    while 1 << (len(squares) - 1) < count:
        squares.append(_twice(squares[-1]))
    return squares


def _powers(squares: list[jax.Array], v_DK, *, row=False):
    """Abar^j v for j < 2^len(squares), [j, D, K]."""
    out = v_DK[None]
    for E in squares:
        out = jnp.concatenate([out, out + _act(E, out, row=row)])
    return out


def _real(E, columns, rows):
    """Columns and rows over states, whatever E acts on."""
    return (_to_states(columns), _to_rows(rows)) if E.ndim == 2 else (columns, rows)


def _scan(s: _System, u_BTD, h_BDN, document_BT, valid_BT, size: int):
    """(y_BTD, final state), chunk by chunk; y at padding is left as it comes.

    A state crosses only chunk boundaries, so memory holds T / C of them. Time stands still at
    padding: real tokens are moved to the front, where positions in a chunk count real steps.
    """
    batch, length, channels = u_BTD.shape
    count, order_BT = None, None
    if document_BT is not None:
        order_BT = jnp.argsort(~valid_BT, axis=1, stable=True)
        u_BTD = jnp.take_along_axis(u_BTD, order_BT[:, :, None], axis=1)
        document_BT = jnp.take_along_axis(document_BT, order_BT, axis=1)
        count = jnp.sum(valid_BT, axis=1, dtype=jnp.int32)
    chunks = -(-length // size)
    padding = ((0, 0), (0, chunks * size - length))

    def cut(a, **options):
        a = jnp.pad(a, padding + ((0, 0),) * (a.ndim - 2), **options)
        return jnp.moveaxis(a.reshape(batch, chunks, size, *a.shape[2:]), 1, 0)

    u_cut = cut(u_BTD)
    document_cut = before_cut = None
    if document_BT is not None:
        document_cut = cut(document_BT, mode="edge")
        # The document that a chunk's incoming state belongs to.
        before_cut = jnp.pad(document_cut[:-1, :, -1], ((1, 0), (0, 0)))

    E, input_DK, C_DK = _matrices(s)
    *squares, E_chunk = _squares(E, size)
    columns = _powers(squares, input_DK)
    rows = _powers(squares, C_DK + _act(E, C_DK, row=True), row=True)
    weight = C_DK[None] * columns
    kernel_CD = jnp.sum(weight if E.ndim == 3 else 2 * weight.real, axis=-1)
    lag_CC = jnp.arange(size)[:, None] - jnp.arange(size)[None, :]
    kernel_CCD = jnp.where((lag_CC >= 0)[..., None], kernel_CD[jnp.maximum(lag_CC, 0)], 0.0)
    columns_CDN, rows_CDN = _real(E, columns[::-1], rows)

    def body(h_BDN, chunk):
        u_BCD, document_BC, before_B = chunk
        grown = _to_states(_act(E_chunk, _to_pairs(h_BDN))) if E.ndim == 2 else _act(E_chunk, h_BDN)
        moved_BDN = h_BDN + grown
        old_BCD = _einsum("cdn,bdn->bcd", rows_CDN, h_BDN)
        if document_BC is None:
            y_BCD = _einsum("tsd,bsd->btd", kernel_CCD, u_BCD) + old_BCD
        else:
            same_BCC = document_BC[:, :, None] == document_BC[:, None, :]
            seen_BCCD = jnp.where(same_BCC[..., None], u_BCD[:, None], 0.0)
            y_BCD = jnp.sum(kernel_CCD[None] * seen_BCCD, axis=2)
            y_BCD = y_BCD + segments.select_real(old_BCD, document_BC == before_B[:, None])
            u_BCD = segments.select_real(u_BCD, document_BC == document_BC[:, -1:])
            goes_on_B11 = (document_BC[:, -1] == before_B)[:, None, None]
            moved_BDN = jnp.where(goes_on_B11, moved_BDN, 0.0)
        return moved_BDN + _einsum("cdn,bcd->bdn", columns_CDN, u_BCD), (y_BCD, h_BDN)

    # What a chunk computes from its incoming state is cheap to compute again.
    inputs = (u_cut, document_cut, before_cut)
    last_BDN, (y_cut, h_cut) = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), h_BDN, inputs)
    y_BTD = jnp.moveaxis(y_cut, 0, 1).reshape(batch, chunks * size, channels)[:, :length]
    if order_BT is not None:
        y_BTD = jnp.take_along_axis(y_BTD, jnp.argsort(order_BT, axis=1)[:, :, None], axis=1)
    if count is None and length % size == 0:
        return y_BTD, last_BDN

    # The last real token ends somewhere in a chunk: walk there from the state before that chunk.
    count_B = jnp.full((batch,), length, jnp.int32) if count is None else count
    which_B = jnp.maximum(count_B - 1, 0) // size

    def pick(cut):
        return cut[which_B, jnp.arange(batch)]

    within_BC = jnp.arange(size)[None] < (count_B - which_B * size)[:, None]
    # Numbered from the incoming state's document, which the walk takes to be number 0.
    document_BC = None if document_BT is None else pick(document_cut) - pick(before_cut)[:, None]
    return y_BTD, _recurrence(s, pick(u_cut), pick(h_cut), document_BC, within_BC)[1]


def _kernel(s: _System, length: int):
    """The response to one unit input, K_j = C Abar^j Bbar, [L, D] with L >= length.

    Lags are split as j = 64 m + c, which makes the kernel a product of rows C Abar^(64 m) and
    columns Abar^c Bbar, both grown by doubling. For a diagonal A this is the Vandermonde product of
    S4D; for the low-rank form it takes the place of S4's generating function, whose gradient with
    respect to dt cancels in float32: 4e-5 off at dt = 1e-3 and 1e-3 off at dt = 0.1.
    """
    size = max(BLOCK, 1 << (length - 1).bit_length())
    E, input_DK, C_DK = _matrices(s)
    squares, split = _squares(E, size // 2), BLOCK.bit_length() - 1
    columns = _powers(squares[:split], input_DK)
    rows = _powers(squares[split:], C_DK, row=True)
    columns, rows = _real(E, columns, rows)
    return _einsum("mdn,cdn->mcd", rows, columns).reshape(size, -1)


def _convolve(u_BTD, kernel_LD):
    """The causal convolution over time, by FFT of twice the length so that nothing wraps around."""
    length, size = u_BTD.shape[1], 2 * kernel_LD.shape[0]
    u_BDF = jnp.fft.rfft(jnp.swapaxes(u_BTD, 1, 2), n=size)
    kernel_DF = jnp.fft.rfft(kernel_LD.T, n=size)
    return jnp.swapaxes(jnp.fft.irfft(u_BDF * kernel_DF[None], n=size)[..., :length], 1, 2)


def _check_inputs(x_BTD, dt_D, A_DP, B_DP, C_DP, P, D, discretization) -> None:
    name = "state_space"
    check(
        x_BTD.ndim == 3 and jnp.issubdtype(x_BTD.dtype, jnp.floating),
        f"{name}: x must be a floating-point array [B, T, D], got {x_BTD.dtype} of shape "
        f"{x_BTD.shape}",
    )
    channels = x_BTD.shape[2]
    check(
        A_DP.ndim == 2 and A_DP.shape[0] == channels and A_DP.shape[1] > 0,
        f"{name}: A must be [D, P] with D = {channels} and P >= 1, got shape {A_DP.shape}",
    )
    for label, a in (("A", A_DP), ("B", B_DP), ("C", C_DP), ("P", P)):
        check(
            a is None or (a.shape == A_DP.shape and jnp.issubdtype(a.dtype, jnp.complexfloating)),
            f"{name}: {label} must be complex [D, P] = {A_DP.shape}, "
            f"got {None if a is None else (a.dtype, a.shape)}",
        )
    for label, a in (("dt", dt_D), ("D", D)):
        check(
            a is None or (a.shape == (channels,) and jnp.issubdtype(a.dtype, jnp.floating)),
            f"{name}: {label} must be a floating-point array [D] = {(channels,)}, "
            f"got {None if a is None else (a.dtype, a.shape)}",
        )
    check(
        discretization in DISCRETIZATIONS,
        f"{name}: unknown discretization {discretization!r}; "
        f"choose one of {', '.join(DISCRETIZATIONS)}",
    )
    check(
        P is None or discretization == "bilinear",
        f"{name}: a low-rank part P goes with discretization 'bilinear', got {discretization!r}",
    )

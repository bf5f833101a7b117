"""The recurrent rules in chunks, with a hand-written gradient.

Inside a chunk of C tokens with incoming state S the recurrence of `reference.py` has a closed form.
With G the running sum of g, and per value head

    D_ij = e^(G_i - G_j) for j <= i in the same document, else 0     (within)
    a_i  = e^G_i          where the incoming state's document goes on (read)
    b_j  = e^(G_C - G_j)  where the document reaches the chunk's end  (write)
    c    = e^G_C          where one document spans the whole chunk    (keep)
    T    = (I + strictly_lower(diag(beta) K K^T))^-1 * D              (elementwise product)

the corrected values, outputs and next state are

    U = T diag(beta) (V - diag(a) K S),  O = scale (diag(a) Q S + (Q K^T * D) U),
    S' = c S + K^T diag(b) U.

Without beta U = V; without g the factors are masks of 0 and 1. D commutes with the inverse because
it is diagonal scaling within a document, so the inverse is free of decay and no exponent is ever
positive. The chunked delta rule is from Yang et al. 2024, arXiv 2406.06484, its gate from Yang et
al. 2024, arXiv 2412.06464. Documents are masks on the four factors, never decays: a huge negative
g would ruin the running sum, and inf - inf is NaN.

Shapes: B batch, T tokens, H query/key heads, G value heads, R = G // H value heads per query/key
head, K key dim, V value dim, C chunk, N chunks. Axes of size 1 broadcast.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fastweights.ops import state_passing
from fastweights.ops.triangular import unit_lower_inverse

# One decay step below e^-50 = 2e-22 empties the state in float32 and float64 alike. Stronger gates
# are cut here: a single g = -1e6 would leave the running sum of the milder ones after it with an
# absolute error of 0.4. Their gradient, below 2e-22 in truth, is exactly zero.
MIN_LOG_DECAY = -50.0
# g is split into a multiple of this grain and a remainder. Sums of the multiples are exact, so
# differences of the running sum keep full relative accuracy behind strong gates.
LOG_DECAY_GRAIN = 2.0**-8

einsum = functools.partial(jnp.einsum, precision="highest")


class Decays(NamedTuple):
    """The four factors of the module docstring, or the masks of documents that they begin as."""

    within_NBHRCC: jax.Array
    read_NBHRC: jax.Array
    write_NBHRC: jax.Array
    keep_NBHR: jax.Array


class Group(NamedTuple):
    """A run of whole chunks: the inputs as given, and the document number before them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array | None
    beta: jax.Array | None
    document: jax.Array | None
    carried_B: jax.Array | None


class Chunks(NamedTuple):
    """A group cut into chunks."""

    q_NBHCK: jax.Array
    k_NBHCK: jax.Array
    v_NBHRCV: jax.Array
    g_NBHRC: jax.Array | None
    beta_NBHRC: jax.Array | None
    document_NBC: jax.Array | None
    carried_NB: jax.Array | None


def _cut(x: jax.Array, size: int, split: tuple[int, ...], acc) -> jax.Array:
    """[B, n C, heads, ...] -> [n, B, *split, C, ...] where split multiplies up to heads."""
    x = x.astype(acc).reshape(x.shape[0], -1, size, *split, *x.shape[3:])
    return jnp.moveaxis(jnp.moveaxis(x, 2, 2 + len(split)), 1, 0)


def _join(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `_cut`: to the shape and dtype of an input."""
    chunk_axis = x.ndim - 1 - (like.ndim - 3)
    x = jnp.moveaxis(jnp.moveaxis(x, 0, 1), chunk_axis, 2)
    return x.reshape(like.shape).astype(like.dtype)


def _chunks(group: Group, size: int, acc) -> Chunks:
    q, k, v, g, beta, document, carried_B = group
    heads = (q.shape[2],)
    grouped = (q.shape[2], v.shape[2] // q.shape[2])
    document_NBC = carried_NB = None
    if document is not None and carried_B is not None:
        document_NBC = jnp.moveaxis(document.reshape(document.shape[0], -1, size), 1, 0)
        carried_NB = jnp.concatenate([carried_B[None], document_NBC[:-1, :, -1]])
    return jax.lax.optimization_barrier(
        Chunks(
            _cut(q, size, heads, acc),
            _cut(k, size, heads, acc),
            _cut(v, size, grouped, acc),
            None if g is None else _cut(g, size, grouped, acc),
            None if beta is None else _cut(beta, size, grouped, acc),
            document_NBC,
            carried_NB,
        )
    )


def masks(chunks: Chunks) -> Decays:
    """Where each factor stands, as booleans."""
    size = chunks.q_NBHCK.shape[-2]
    within = jnp.tril(jnp.ones((size, size), bool))[None, None, None, None]
    document_NBC, carried_NB = chunks.document_NBC, chunks.carried_NB
    if document_NBC is None or carried_NB is None:
        everywhere = jnp.ones((1, 1, 1, 1, 1), bool)
        return Decays(within, everywhere, everywhere, everywhere[..., 0])
    end_NB = document_NBC[:, :, -1]
    same_NBCC = document_NBC[:, :, :, None] == document_NBC[:, :, None, :]
    return Decays(
        within & same_NBCC[:, :, None, None],
        (document_NBC == carried_NB[:, :, None])[:, :, None, None],
        (document_NBC == end_NB[:, :, None])[:, :, None, None],
        (end_NB == carried_NB)[:, :, None, None],
    )


def _decays(chunks: Chunks) -> Decays:
    acc, size = chunks.q_NBHCK.dtype, chunks.q_NBHCK.shape[-2]
    within, read, write, keep = masks(chunks)
    if chunks.g_NBHRC is None:
        return Decays(within.astype(acc), read.astype(acc), write.astype(acc), keep.astype(acc))

    g_NBHRC = jnp.maximum(chunks.g_NBHRC, MIN_LOG_DECAY)
    coarse = jnp.round(g_NBHRC / LOG_DECAY_GRAIN) * LOG_DECAY_GRAIN
    lower = jnp.tril(jnp.ones((size, size), acc))
    sums = tuple(einsum("ij,nbhrj->nbhri", lower, part) for part in (coarse, g_NBHRC - coarse))

    def exp_where(mask, exponent):
        # Masked before exp: above the diagonal the exponent is positive and may overflow.
        return jnp.exp(jnp.where(mask, exponent, -jnp.inf))

    return Decays(
        exp_where(within, sum(x[..., :, None] - x[..., None, :] for x in sums)),
        exp_where(read, sums[0] + sums[1]),
        exp_where(write, sum(x[..., -1:] - x for x in sums)),
        exp_where(keep, sums[0][..., -1] + sums[1][..., -1]),
    )


class Saved(NamedTuple):
    """What the backward pass keeps beside the inputs; all linear in T.

    Without error correction u is v itself and stands as None.
    """

    states_NBHRKV: jax.Array
    u_NBHRCV: jax.Array | None
    inverse_NBHRCC: jax.Array | None


class Form(NamedTuple):
    """How a group of chunks is computed.

    Attributes:
      forward: (chunks, S_BHRKV, scale, passing) -> (outputs in chunks, state behind them, `Saved`).
      backward: (chunks, `Saved`, scale, passing, gradient of the outputs in chunks, of the state
        behind them) -> gradients of q, k, v, g and beta in chunks, and of the state before them.
    """

    forward: Callable
    backward: Callable


def _forward(chunks: Chunks, S_BHRKV, scale: float, passing):
    q, k, v, _, beta, *_ = chunks
    within, read, write, keep = _decays(chunks)
    inverse = w = None
    if beta is None:
        u_local = v
    else:
        inverse = _inverse(k, beta)
        u_local = einsum("nbhrij,nbhrjv->nbhriv", inverse * within * beta[..., None, :], v)
        w = _w(inverse, beta, read, k)
    states, u, S_BHRKV = passing.forward(w, u_local, k, write, keep[..., None, None], S_BHRKV)
    scores = einsum("nbhik,nbhjk->nbhij", q, k)[:, :, :, None] * within
    o = einsum("nbhrij,nbhrjv->nbhriv", scores, u)
    o = o + read[..., None] * einsum("nbhik,nbhrkv->nbhriv", q, states)
    return scale * o, S_BHRKV, Saved(states, None if beta is None else u, inverse)


def _inverse(k, beta):
    gram = einsum("nbhik,nbhjk->nbhij", k, k)[:, :, :, None]
    return unit_lower_inverse(jnp.tril(beta[..., None] * gram, -1))


def _w(inverse, beta, read, k):
    """T diag(beta) diag(a) K, written so that only read carries a decay."""
    return read[..., None] * einsum("nbhrij,nbhjk->nbhrik", inverse * beta[..., None, :], k)


def _backward(chunks: Chunks, saved: Saved, scale: float, passing, do, dS_BHRKV):
    """See `Form`.

    dg is summed from the products that each decay factor took part in, rather than from the closed
    form <q, dq> - <k, dk> + ..., whose terms cancel almost wholly under strong decay.
    """
    q, k, v, g, beta, *_ = chunks
    states, u, inverse = saved
    u = v if u is None else u
    decays = _decays(chunks)
    within, read, write, keep = decays
    do = scale * do
    qk = einsum("nbhik,nbhjk->nbhij", q, k)[:, :, :, None]

    w = None
    du = einsum("nbhrij,nbhriv->nbhrjv", qk * within, do)
    dS_read = einsum("nbhik,nbhriv->nbhrkv", q, read[..., None] * do)
    if beta is not None:
        w = _w(inverse, beta, read, k)
    dstates, du, dS_initial = passing.backward(
        w, du, dS_read, k, write, keep[..., None, None], dS_BHRKV
    )

    dscores = einsum("nbhriv,nbhrjv->nbhrij", do, u) * within
    dq_read = read[..., None] * einsum("nbhriv,nbhrkv->nbhrik", do, states)
    dk_write = write[..., None] * einsum("nbhrjv,nbhrkv->nbhrjk", u, dstates)
    dscores_sum = jnp.sum(dscores, axis=3)
    dq = einsum("nbhij,nbhjk->nbhik", dscores_sum, k) + jnp.sum(dq_read, axis=3)
    dk = einsum("nbhij,nbhik->nbhjk", dscores_sum, q) + jnp.sum(dk_write, axis=3)

    pairs = dscores * qk
    reads = jnp.sum(dq_read * q[:, :, :, None], axis=-1)
    dbeta = None
    if beta is None or inverse is None:
        dv = du
    else:
        gram = einsum("nbhik,nbhjk->nbhij", k, k)[:, :, :, None]
        y = einsum("nbhrij,nbhriv->nbhrjv", inverse * within, du)
        dv = beta[..., None] * y
        dL = -jnp.tril(einsum("nbhriv,nbhrjv->nbhrij", y, u) * within, -1)
        dk_read = -read[..., None] * einsum("nbhriv,nbhrkv->nbhrik", y, states)
        errors = jnp.sum(dk_read * k[:, :, :, None], axis=-1)
        dbeta = jnp.sum(y * v, axis=-1) + jnp.sum(dL * gram, axis=-1) + errors
        dgram = beta[..., None] * dL
        pairs = pairs + dgram * gram
        reads = reads + beta * errors
        dgram_sum = jnp.sum(dgram, axis=3)
        # Two products, since adding the transpose to dgram would cost more than the second one.
        dk = dk + einsum("nbhij,nbhjk->nbhik", dgram_sum, k)
        dk = dk + einsum("nbhij,nbhik->nbhjk", dgram_sum, k)
        dk = dk + jnp.sum(beta[..., None] * dk_read, axis=3)
    dg = None
    if g is not None:
        writes = jnp.sum(dk_write * k[:, :, :, None], axis=-1)
        kept = keep * jnp.sum(dstates * states, axis=(-1, -2))
        dg = _decay_gradient(pairs, reads, writes, kept)
        dg = jnp.where(g > MIN_LOG_DECAY, dg, 0.0)
        dg = _zero_at_starts(dg, chunks)
    return dq, dk, dv, dg, dbeta, dS_initial


SCALAR_DECAY = Form(_forward, _backward)


def _zero_at_starts(dg, chunks: Chunks):
    """A document's first gate decays nothing: its gradient is 0 exactly, not just by cancelling."""
    document_NBC, carried_NB = chunks.document_NBC, chunks.carried_NB
    if document_NBC is None or carried_NB is None:
        return dg
    before_NBC = jnp.concatenate([carried_NB[:, :, None], document_NBC[:, :, :-1]], axis=-1)
    return jnp.where((document_NBC != before_NBC)[:, :, None, None], 0.0, dg)


def _decay_gradient(pairs, reads, writes, kept):
    """dg_t: every factor whose exponent contains g_t, times that factor's gradient.

    Those are D_ij with j < t <= i, a_i with i >= t, b_j with j < t, and c.
    """
    size = pairs.shape[-1]
    from_here = jnp.triu(jnp.ones((size, size), pairs.dtype))
    before = 1.0 - from_here
    # The diagonal, whose exponent is 0, is left out: it would drown all else under strong decay.
    pairs = pairs * before[None, None, None, None]
    crossing = jnp.sum(pairs, axis=-1) - jnp.sum(pairs, axis=-2)
    dg = einsum("ti,nbhri->nbhrt", from_here, reads + crossing) + kept[..., None]
    return dg + einsum("tj,nbhrj->nbhrt", before, writes)


class _Plan(NamedTuple):
    """Chunks are worked on in `count` groups of `tokens` tokens, which stay in the cache."""

    count: int
    tokens: int


def _plan(inputs, chunk_size: int, passing) -> _Plan:
    q, _, v, *_ = inputs
    chunks = -(-q.shape[1] // chunk_size)
    together = chunks
    if passing.matrices_together is not None:
        together = max(1, passing.matrices_together // (v.shape[0] * v.shape[2]))
    count = -(-chunks // together)
    return _Plan(count, -(-chunks // count) * chunk_size)


def _pad(x: jax.Array, plan: _Plan, mode: str = "constant") -> jax.Array:
    missing = plan.count * plan.tokens - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2), mode=mode)


def _group(inputs, document, plan: _Plan, i) -> Group:
    """Group i of padded inputs."""
    start = i * plan.tokens

    def part(x):
        return jax.lax.dynamic_slice_in_dim(x, start, plan.tokens, axis=1)

    q, k, v, g, beta = jax.tree.map(part, inputs)
    if document is None:
        return Group(q, k, v, g, beta, None, None)
    before = jax.lax.dynamic_index_in_dim(document, jnp.maximum(start - 1, 0), 1, keepdims=False)
    carried_B = jnp.where(i == 0, 0, before)
    return Group(q, k, v, g, beta, part(document), carried_B)


def _put(whole: jax.Array, part: jax.Array, plan: _Plan, i) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, i * plan.tokens, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _core(inputs, initial_state, document, scale, chunk_size, passing, form):
    return _run(inputs, initial_state, document, scale, chunk_size, passing, form)[0]


def _run(inputs, initial_state, document, scale, chunk_size, passing, form):
    """((output, final state), what the gradient needs)."""
    acc = initial_state.dtype
    q, _, v, *_ = inputs
    batch, value_heads, key_dim, value_dim = initial_state.shape
    heads = q.shape[2]
    plan = _plan(inputs, chunk_size, passing)
    inputs = jax.tree.map(lambda x: _pad(x, plan), inputs)
    document = None if document is None else _pad(document, plan, "edge")

    def body(carry, i):
        S_BHRKV, o = carry
        group = _group(inputs, document, plan, i)
        chunks = _chunks(group, chunk_size, acc)
        o_part, S_BHRKV, saved = form.forward(chunks, S_BHRKV, scale, passing)
        return (S_BHRKV, _put(o, _join(o_part, group.v), plan, i)), saved

    S_BHRKV = initial_state.reshape(batch, heads, value_heads // heads, key_dim, value_dim)
    carry = (S_BHRKV, jnp.zeros_like(inputs[2]))
    (S_BHRKV, o), saved = jax.lax.scan(body, carry, jnp.arange(plan.count))
    return (o[:, : v.shape[1]], S_BHRKV.reshape(initial_state.shape)), saved


def _core_forward(inputs, initial_state, document, scale, chunk_size, passing, form):
    out, saved = _run(inputs, initial_state, document, scale, chunk_size, passing, form)
    return out, (inputs, document, saved)


def _core_backward(scale, chunk_size, passing, form, residuals, cotangents):
    inputs, document, saved = residuals
    do, dS = cotangents
    acc = dS.dtype
    length = do.shape[1]
    plan = _plan(inputs, chunk_size, passing)
    inputs = jax.tree.map(lambda x: _pad(x, plan), inputs)
    document = None if document is None else _pad(document, plan, "edge")
    do = _pad(do, plan)

    def body(carry, step):
        dS_BHRKV, gradients = carry
        i, saved = step
        group = _group(inputs, document, plan, i)
        chunks = _chunks(group, chunk_size, acc)
        # Where no gradient of v stands yet, that of the output does.
        do_part = jax.lax.dynamic_slice_in_dim(gradients[2], i * plan.tokens, plan.tokens, axis=1)
        do_part = _cut(do_part, chunk_size, chunks.v_NBHRCV.shape[2:4], acc)
        *parts, dS_BHRKV = form.backward(chunks, saved, scale, passing, do_part, dS_BHRKV)
        gradients = jax.tree.map(
            lambda whole, part, like: _put(whole, _join(part, like), plan, i),
            gradients,
            tuple(parts),
            tuple(group[:5]),
        )
        return (dS_BHRKV, gradients), None

    dS_BHRKV = dS.reshape(saved.states_NBHRKV.shape[2:])
    dq, dk, _, dg, dbeta = jax.tree.map(jnp.zeros_like, inputs)
    carry = (dS_BHRKV, (dq, dk, do, dg, dbeta))
    steps = (jnp.arange(plan.count), saved)
    (dS_BHRKV, gradients), _ = jax.lax.scan(body, carry, steps, reverse=True)
    gradients = jax.tree.map(lambda x: x[:, :length], gradients)
    return gradients, dS_BHRKV.reshape(dS.shape), None


_core.defvjp(_core_forward, _core_backward)


def core(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTGV: jax.Array,
    g_BTG: jax.Array | None,
    beta_BTG: jax.Array | None,
    initial_state_BGKV: jax.Array,
    document_BT: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
    passing: state_passing.StatePassing = state_passing.SEQUENTIAL,
    form: Form = SCALAR_DECAY,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `reference.core`.

    Further args:
      chunk_size: a power of two, at least 16.
      passing: how states travel from chunk to chunk.
      form: what happens inside the chunks.
    """
    inputs = (q_BTHK, k_BTHK, v_BTGV, g_BTG, beta_BTG)
    return _core(inputs, initial_state_BGKV, document_BT, scale, chunk_size, passing, form)

"""Next-token loss whose logits exist for some positions at a time.

B batch, T tokens, D model width, C tokens of a piece, N pieces, Z vocabulary, S devices that the
rows lie on.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastweights import sharding
from fastweights.model import HybridLM
from fastweights.ops.weights import Gathered, gradient_of

IGNORE = -1  # a target without loss


class Sums(NamedTuple):
    """Float32 sums over the target tokens; means are taken once, over the global batch."""

    nll: jax.Array  # negative log-likelihood, nats
    z: jax.Array  # squared log-partition
    correct: jax.Array  # argmax equal to the target
    count: jax.Array  # target tokens
    balance: jax.Array  # how unevenly experts are used, once a target token


class TokenLoss(NamedTuple):
    """Per position; 0 and False where there is no target."""

    nll_BT: jax.Array
    z_BT: jax.Array
    correct_BT: jax.Array


class Answers(NamedTuple):
    """Any `rows` rows of a batch, from a multiple of `rows` on, have at most `most` targets."""

    rows: int
    most: int


def training_loss(
    model: HybridLM,
    batch: dict[str, Any],
    *,
    loss_chunk: int,
    z_loss: float,
    total: jax.Array,
    balance_loss: float = 0.0,
    answers: Answers | None = None,
) -> tuple[jax.Array, Sums]:
    """(loss, sums) with loss = (nll + z_loss * z + balance_loss * balance) / total of the sums.

    Only the loss has a gradient.

    The gradient by the logits is made while they are there, so no logits are computed twice: the
    forward pass leaves the gradients of the hidden stream and of the head behind.

    Args:
      model: gives `hidden_and_balance` and `gathered`.
      batch, loss_chunk: as in `token_loss`.
      answers: logits are made for no more positions than this says, those with targets; None makes
        them for all.
      z_loss: weight of the squared log-partition.
      total: float32 scalar.
      balance_loss: weight of how unevenly experts are used; see `MixtureOfExperts`.
    """
    table, head = model.gathered()
    h_BTD, balance = _hidden(model, batch, table)
    targets_BT = batch["targets"]
    if answers is not None and answers.most < answers.rows * targets_BT.shape[1]:
        h_BTD, targets_BT = _asked(h_BTD, targets_BT, answers)
    fused: Any = _fused(h_BTD, head, targets_BT, total, loss_chunk, z_loss)
    loss, sums = fused
    if balance is None:
        return loss, sums
    # Once a target token, so that microbatches weigh as their gradients do.
    balance = balance * jax.lax.stop_gradient(sums.count)
    return loss + balance_loss * balance / total, sums._replace(balance=balance)


def _asked(h_BTD: jax.Array, targets_BT: jax.Array, answers: Answers) -> tuple[Any, Any]:
    """Stream and targets at the positions with targets, [B / rows, most, ...], filled up."""
    width = answers.rows * targets_BT.shape[1]
    targets_NX, h_NXD = targets_BT.reshape(-1, width), h_BTD.reshape(-1, width, h_BTD.shape[2])

    def find(targets_X):
        return jnp.flatnonzero(targets_X != IGNORE, size=answers.most, fill_value=width)

    place_NA = jax.vmap(find)(targets_NX)
    take = functools.partial(jnp.take_along_axis, axis=1, mode="fill")
    h_NAD = take(h_NXD, place_NA[:, :, None], fill_value=0)
    return h_NAD, take(targets_NX, place_NA, fill_value=IGNORE)


def token_loss(model: HybridLM, batch: dict[str, Any], *, loss_chunk: int) -> TokenLoss:
    """Loss and correctness of every position.

    Args:
      model: gives `hidden_and_balance` and `head_DV`.
      batch: int32 [B, T] arrays `tokens`, `targets` (-1 without loss), `segment_ids`, `positions`.
      loss_chunk: tokens a piece (0: whole rows), so that the logits' peak is [B, C, Z] and not
        [B, T, Z].
    """
    return hidden_loss(model, _hidden(model, batch)[0], batch["targets"], loss_chunk=loss_chunk)


def hidden_loss(
    model: HybridLM, h_BTD: jax.Array, targets_BT: jax.Array, *, loss_chunk: int
) -> TokenLoss:
    """As `token_loss`, from what `model.hidden` gave."""
    head_DZ = model.head_DV.astype(h_BTD.dtype)

    def one_piece(piece: tuple[jax.Array, jax.Array]) -> TokenLoss:
        h_BCD, targets_BC = piece
        return _score(_logits(h_BCD, head_DZ), targets_BC)[0]

    losses_NBC = jax.lax.map(one_piece, _pieces(h_BTD, targets_BT, loss_chunk))
    return jax.tree.map(functools.partial(_joined, length=targets_BT.shape[1]), losses_NBC)


def _hidden(
    model: HybridLM, batch: dict[str, Any], table: Gathered | None = None
) -> tuple[jax.Array, jax.Array | None]:
    h_BTD, _, balance = model.hidden_and_balance(
        batch["tokens"],
        segment_ids_BT=batch["segment_ids"],
        positions_BT=batch["positions"],
        table=table,
    )
    return h_BTD, balance


def _pieces(h_BTD, targets_BT, loss_chunk) -> tuple[jax.Array, jax.Array]:
    """Stream and targets as [N, B, C, ...], the last piece filled up with tokens without target.

    Slices of a row on different devices count as rows, so that each device has its own pieces.
    """
    h_BTD, targets_BT = (sharding.slices_as_rows(x) for x in (h_BTD, targets_BT))
    length = targets_BT.shape[1]
    size = loss_chunk if 0 < loss_chunk < length else max(length, 1)
    padding = ((0, 0), (0, -length % size))

    def cut(x: jax.Array) -> jax.Array:
        shape = (x.shape[0], x.shape[1] // size, size, *x.shape[2:])
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    h_BTD = jnp.pad(h_BTD, (*padding, (0, 0)))
    return cut(h_BTD), cut(jnp.pad(targets_BT, padding, constant_values=IGNORE))


def _joined(x_NBC: jax.Array, *, length: int) -> jax.Array:
    """[B, length, ...] from pieces of rows of that length."""
    x_BNC = jnp.moveaxis(x_NBC, 0, 1)
    x_BT = x_BNC.reshape(x_BNC.shape[0], -1, *x_BNC.shape[3:])
    return sharding.rows_of_slices(x_BT[:, : sharding.part(length, "tokens")], length)


def _logits(h_BCD: jax.Array, head_DZ: jax.Array) -> jax.Array:
    acc = jnp.promote_types(h_BCD.dtype, jnp.float32)
    return jnp.dot(h_BCD, head_DZ, preferred_element_type=acc)


def _largest(x_BCZ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Value and (first) place of the largest entry, in one pass over the array."""
    place_BCZ = jax.lax.broadcasted_iota(jnp.int32, x_BCZ.shape, x_BCZ.ndim - 1)

    def larger(a, b):
        (x, i), (y, j) = a, b
        first = (x > y) | ((x == y) & (i < j)) | jnp.isnan(x)
        return jnp.where(first, x, y), jnp.where(first, i, j)

    start = (jnp.asarray(-jnp.inf, x_BCZ.dtype), jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32))
    return jax.lax.reduce((x_BCZ, place_BCZ), start, larger, (x_BCZ.ndim - 1,))


def _score(logits_BCZ: jax.Array, targets_BC: jax.Array) -> tuple[TokenLoss, jax.Array]:
    """Cross-entropy, squared log-partition and correctness; and the log-partition."""
    wanted_BC = targets_BC != IGNORE
    top_BC, best_BC = _largest(logits_BCZ)
    # As logsumexp does: where all is -inf, the difference would be NaN.
    top_BC = jnp.where(jnp.isfinite(top_BC), top_BC, 0.0)
    log_partition_BC = top_BC + jnp.log(jnp.exp(logits_BCZ - top_BC[..., None]).sum(-1))
    index_BC = jnp.where(wanted_BC, targets_BC, 0)
    picked_BC = jnp.take_along_axis(logits_BCZ, index_BC[..., None], axis=-1)[..., 0]
    scores = TokenLoss(
        nll_BT=jnp.where(wanted_BC, log_partition_BC - picked_BC, 0.0),
        z_BT=jnp.where(wanted_BC, log_partition_BC**2, 0.0),
        correct_BT=wanted_BC & (best_BC == targets_BC),
    )
    return scores, log_partition_BC


def _summed(scores: TokenLoss, targets_BC: jax.Array) -> Sums:
    return Sums(
        nll=scores.nll_BT.sum(),
        z=scores.z_BT.sum(),
        correct=scores.correct_BT.sum(dtype=jnp.float32),
        count=(targets_BC != IGNORE).sum(dtype=jnp.float32),
        balance=jnp.zeros((), jnp.float32),
    )


def _run(h_BTD, head_DZ, targets_BT, total, loss_chunk, z_loss, gradients):
    """((loss, sums), (dh_BTD, dhead_SDZ) or None); gradients of total * loss.

    Every device sums the head's gradient over its own rows, in all pieces.
    """
    acc, low = jnp.promote_types(h_BTD.dtype, jnp.float32), h_BTD.dtype
    pieces = _pieces(h_BTD, targets_BT, loss_chunk)
    rows = sharding.row_axis(h_BTD.shape[1])

    def one_piece(carry, piece):
        sums, dhead_SDZ = carry
        h_BCD, targets_BC = piece
        logits_BCZ = _logits(h_BCD, head_DZ)
        scores, log_partition_BC = _score(logits_BCZ, targets_BC)
        sums = jax.tree.map(jnp.add, sums, _summed(scores, targets_BC))
        if not gradients:
            return (sums, None), None
        # Of the sum, not of the mean: divided by all tokens, float16 would round them to zero.
        slope_BC = jnp.where(targets_BC != IGNORE, 1.0 + 2.0 * z_loss * log_partition_BC, 0.0)
        dlogits_BCZ = slope_BC[..., None] * jnp.exp(logits_BCZ - log_partition_BC[..., None])
        place_BCZ = jax.lax.broadcasted_iota(jnp.int32, logits_BCZ.shape, 2)
        dlogits_BCZ = dlogits_BCZ - (place_BCZ == targets_BC[..., None])  # IGNORE is no place
        # In the model's dtype: float32 factors would make these the slowest products of the step.
        dlogits_BCZ = dlogits_BCZ.astype(low)
        dh_BCD = jnp.einsum("bcz,dz->bcd", dlogits_BCZ, head_DZ, preferred_element_type=acc)
        h_SBCD = sharding.by_device(h_BCD, rows, None, None)
        dlogits_SBCZ = sharding.by_device(dlogits_BCZ, rows, None, "vocab")
        dhead_SDZ = dhead_SDZ + jnp.einsum(
            "sbcd,sbcz->sdz", h_SBCD, dlogits_SBCZ, preferred_element_type=acc
        )
        return (sums, dhead_SDZ), dh_BCD.astype(low)

    zeros = Sums(*[jnp.zeros((), acc)] * 2, *[jnp.zeros((), jnp.float32)] * 3)
    shape = (sharding.shares(pieces[0].shape[1], rows), *head_DZ.shape)
    start = zeros, jnp.zeros(shape, acc) if gradients else None
    (sums, dhead_SDZ), dh_NBCD = jax.lax.scan(one_piece, start, pieces)
    out = (sums.nll + z_loss * sums.z) / total, sums
    if dh_NBCD is None or dhead_SDZ is None:
        return out, None
    return out, (_joined(dh_NBCD, length=h_BTD.shape[1]), dhead_SDZ)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _fused(h_BTD, head, targets_BT, total, loss_chunk, z_loss) -> Any:
    return _run(h_BTD, head.matrix, targets_BT, total, loss_chunk, z_loss, gradients=False)[0]


def _fused_forward(h_BTD, head, targets_BT, total, loss_chunk, z_loss):
    out, gradients = _run(h_BTD, head.matrix, targets_BT, total, loss_chunk, z_loss, gradients=True)
    return out, (gradients, head, total)


def _fused_backward(loss_chunk, z_loss, kept, cotangents):
    gradients, head, total = kept
    factor = cotangents[0] / total
    dh_BTD, dhead_SDZ = gradients
    gradients = dh_BTD, gradient_of(head, dhead_SDZ)
    return *jax.tree.map(lambda x: (factor * x).astype(x.dtype), gradients), None, None


_fused.defvjp(_fused_forward, _fused_backward)

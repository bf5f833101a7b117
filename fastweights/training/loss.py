"""Next-token loss whose logits exist for a piece of each row at a time.

B batch, T tokens, D model width, C tokens of a piece, N pieces, Z vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastweights.model import HybridLM

IGNORE = -1  # a target without loss


class Sums(NamedTuple):
    """Float32 sums over the target tokens; means are taken once, over the global batch."""

    nll: jax.Array  # negative log-likelihood, nats
    z: jax.Array  # squared log-partition
    correct: jax.Array  # argmax equal to the target
    count: jax.Array  # target tokens


class TokenLoss(NamedTuple):
    """Per position; 0 and False where there is no target."""

    nll_BT: jax.Array
    z_BT: jax.Array
    correct_BT: jax.Array


def loss_sums(model: HybridLM, batch: dict[str, Any], *, loss_chunk: int) -> Sums:
    """Sums of loss and accuracy over the targets of `batch`; arguments as `token_loss`."""
    losses = token_loss(model, batch, loss_chunk=loss_chunk)
    return Sums(
        nll=losses.nll_BT.sum(),
        z=losses.z_BT.sum(),
        correct=losses.correct_BT.sum(dtype=jnp.float32),
        count=(batch["targets"] != IGNORE).sum(dtype=jnp.float32),
    )


def token_loss(model: HybridLM, batch: dict[str, Any], *, loss_chunk: int) -> TokenLoss:
    """Loss and correctness of every position.

    Args:
      model: gives `hidden` and `unembed`.
      batch: int32 [B, T] arrays `tokens`, `targets` (-1 without loss), `segment_ids`, `positions`.
      loss_chunk: tokens a piece (0: whole rows). The logits of a piece are recomputed in the
        backward pass, so the peak is [B, C, Z] and not [B, T, Z].
    """
    h_BTD, _ = model.hidden(
        batch["tokens"], segment_ids_BT=batch["segment_ids"], positions_BT=batch["positions"]
    )
    targets_BT = batch["targets"]
    length = targets_BT.shape[1]
    if not 0 < loss_chunk < length:
        return logits_loss(model.unembed(h_BTD), targets_BT)

    padding = -length % loss_chunk
    h_BTD = jnp.pad(h_BTD, ((0, 0), (0, padding), (0, 0)))
    targets_BT = jnp.pad(targets_BT, ((0, 0), (0, padding)), constant_values=IGNORE)

    def pieces(x: jax.Array) -> jax.Array:
        shape = (x.shape[0], x.shape[1] // loss_chunk, loss_chunk, *x.shape[2:])
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    @jax.checkpoint
    def one_piece(piece: tuple[jax.Array, jax.Array]) -> TokenLoss:
        h_BCD, targets_BC = piece
        return logits_loss(model.unembed(h_BCD), targets_BC)

    losses_NBC = jax.lax.map(one_piece, (pieces(h_BTD), pieces(targets_BT)))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length], losses_NBC
    )


def logits_loss(logits_BTZ: jax.Array, targets_BT: jax.Array) -> TokenLoss:
    """Cross-entropy, squared log-partition and correctness, in float32."""
    logits_BTZ = logits_BTZ.astype(jnp.float32)
    wanted_BT = targets_BT != IGNORE
    log_partition_BT = jax.nn.logsumexp(logits_BTZ, axis=-1)
    index_BT = jnp.where(wanted_BT, targets_BT, 0)
    picked_BT = jnp.take_along_axis(logits_BTZ, index_BT[..., None], axis=-1)[..., 0]
    return TokenLoss(
        nll_BT=jnp.where(wanted_BT, log_partition_BT - picked_BT, 0.0),
        z_BT=jnp.where(wanted_BT, log_partition_BT**2, 0.0),
        correct_BT=wanted_BT & (jnp.argmax(logits_BTZ, axis=-1) == targets_BT),
    )

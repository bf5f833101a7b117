"""The training loss, whose gradient is made by hand in the forward pass, against autodiff."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastweights.ops.weights import gather
from fastweights.training.loss import IGNORE, Answers, token_loss, training_loss

B, T, D, Z = 2, 10, 16, 33
Z_LOSS, BALANCE_LOSS, BALANCE = 0.01, 0.1, 1.5


def draw(dtype):
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((B, T, D)), dtype)
    head = jnp.asarray(rng.standard_normal((D, Z)), jnp.float32)
    targets = jnp.asarray(rng.integers(IGNORE, Z, (B, T)), jnp.int32)
    return h, head, targets


def model_of(h, head):
    return types.SimpleNamespace(
        hidden_and_balance=lambda *_, **__: (h, None, jnp.float32(BALANCE)),
        gathered=lambda: (None, gather(head, h.dtype, ("embed", "vocab"), False)),
        head_DV=head,
    )


def batch_of(targets):
    return dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), targets)


def by_definition(h, head, targets, total):
    logits = h.astype(jnp.float32) @ head.astype(h.dtype).astype(jnp.float32)
    wanted = targets != IGNORE
    partition = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, jnp.where(wanted, targets, 0)[..., None], -1)[..., 0]
    nll = jnp.sum(jnp.where(wanted, partition - picked, 0.0))
    z = jnp.sum(jnp.where(wanted, partition**2, 0.0))
    correct = jnp.sum(wanted & (jnp.argmax(logits, axis=-1) == targets))
    uneven = BALANCE * jnp.sum(wanted)
    loss = (nll + Z_LOSS * z + BALANCE_LOSS * uneven) / total
    return loss, (nll, z, correct, jnp.sum(wanted), uneven)


@pytest.mark.parametrize(
    ("loss_chunk", "answers"),
    [(0, None), (4, None), (10, None), (99, None), (0, (1, 6)), (4, (1, 6)), (0, (1, 10)),
     (0, (2, 10)), (4, (2, 10)), (0, (2, 13))],
)  # fmt: skip
@pytest.mark.parametrize(
    ("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2), (jnp.float16, 2e-3)]
)
def test_loss_and_gradients_are_those_of_the_definition(dtype, bound, loss_chunk, answers):
    h, head, targets = draw(dtype)
    if answers is not None and answers != (1, 10):
        # Six in one row, which has none in front, four in the other.
        targets = jnp.maximum(targets, 0).at[0, ::3].set(IGNORE).at[1, 1:7].set(IGNORE)
        assert (targets >= 0).sum(axis=1).tolist() == [6, 4]
    # So many that float16 would round each token's share to zero.
    total = jnp.float32(2e5)

    def loss(h, head):
        return training_loss(
            model_of(h, head),
            batch_of(targets),
            loss_chunk=loss_chunk,
            answers=None if answers is None else Answers(*answers),
            z_loss=Z_LOSS,
            balance_loss=BALANCE_LOSS,
            total=total,
        )

    def scaled(f):
        # As a caller would: the gradient by h of a mean over many is below float16 itself.
        def call(*args):
            value, sums = f(*args)
            return 1e5 * value, sums

        return jax.jit(jax.value_and_grad(call, (0, 1), has_aux=True))

    (got, sums), gradients = scaled(loss)(h, head)
    reference = functools.partial(by_definition, targets=targets, total=total)
    (want, want_sums), want_gradients = scaled(reference)(h, head)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(sums, want_sums, rtol=1e-6)
    for a, b in zip(gradients, want_gradients, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def test_equal_logits_are_counted_right_only_at_the_first():
    h, head, targets = draw(jnp.float32)
    losses = token_loss(model_of(h, 0.0 * head), batch_of(targets), loss_chunk=4)
    np.testing.assert_array_equal(losses.correct_BT, targets == 0)
    np.testing.assert_allclose(losses.nll_BT, np.where(targets != IGNORE, np.log(Z), 0), rtol=1e-6)

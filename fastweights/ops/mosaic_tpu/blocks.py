"""How the TPU kernels see a call: heads side by side in lanes, gates as columns and rows.

A grid step has `heads` value heads of one row of the batch and `chunks` chunks of it. Arrays of
tokens come as [B, T, heads x dim], as the projections made them, so a head is a run of whole lanes
and nothing is transposed on the way. Value heads find their query/key head by the index map.

Within a step every operation is written for all heads before the next one (`each`): the compiler
schedules in program order, and one head alone would leave the matrix units waiting.

Shapes: B batch, T tokens, H query/key heads, G value heads, K key dim, V value dim, N chunks, C
chunk, J head blocks, F features.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fastweights.ops.chunked import LOG_DECAY_GRAIN, MIN_LOG_DECAY
from fastweights.ops.mosaic_tpu.support import LANES, VMEM_LIMIT

F32, BF16 = jnp.float32, jnp.bfloat16
MOST_HEADS = 16  # of a grid step, at head dims of 128 in bfloat16
# Contracted axes of a product: a b, a b^T, a^T b.
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


class Form(NamedTuple):
    """One variant of the kernels.

    Attributes:
      chunk: tokens, 64 or 128.
      chunks: of a grid step; a state is kept for the gradient once a step.
      heads: value heads of a grid step.
      keys: query/key heads of a grid step.
      key_dim, value_dim: multiples of 128.
      scale: factor on the output.
      gated, delta, packed: with decay, with error correction, with several documents in a row.
      wide: inputs in float32, every product in float32.
    """

    chunk: int
    chunks: int
    heads: int
    keys: int
    key_dim: int
    value_dim: int
    scale: float
    gated: bool
    delta: bool
    packed: bool
    wide: bool

    @property
    def tokens(self) -> int:
        return self.chunk * self.chunks

    @property
    def factors(self) -> bool:
        """Whether read, write and keep are other than 1."""
        return self.gated or self.packed

    @property
    def columns(self) -> tuple[str, ...]:
        """Features of `Gates.columns`, each once a head."""
        names = ("coarse", "fine") if self.gated else ()
        names += ("read", "write") if self.factors else ()
        return names + (("beta",) if self.delta else ())

    @property
    def features(self) -> int:
        return len(self.columns) * self.heads

    def key_of(self, head: int) -> int:
        """The query/key head, among those of the step, that a value head reads."""
        return head * self.keys // self.heads


def count_heads(heads: int, value_heads: int, room: int) -> int:
    """Value heads of a grid step: up to `room`, whole groups of a query/key head or parts."""
    group = value_heads // heads
    fitting = [
        n
        for n in range(1, min(room, value_heads) + 1)
        if value_heads % n == 0 and (n % group == 0 or group % n == 0)
    ]
    return fitting[-1]


def room_for_heads(key_dim: int, value_dim: int, chunk: int, wide: bool) -> int:
    """How many heads VMEM has room for in the gradient's kernel; at least 1."""
    small = MOST_HEADS * LANES**2 // (key_dim * value_dim)
    return max(1, small * 64 // chunk // (2 if wide else 1))


class Gates(NamedTuple):
    """Decays, beta and documents, float32; None where there are none. Or their refs, or blocks.

    Attributes:
      columns_BJTF: the features of `Form.columns`, feature by feature the heads of a step.
      rows_BJNFC: coarse and fine sums of the decays, along lanes.
      start_BT1: the place in its chunk where a token's document begins, 0 if before the chunk.
    """

    columns_BJTF: Any
    rows_BJNFC: Any
    start_BT1: Any


def make_gates(g_BTG, beta_BTG, document_BT, shape: tuple[int, int, int], form: Form) -> Gates:
    """From log decays, beta and document numbers.

    The factors are those of `chunked.py`, with its split of the sums; keep is the last read of a
    chunk.

    Args:
      g_BTG, beta_BTG: float32 or None.
      document_BT: int32 or None.
      shape: B, T, G, with T a multiple of `form.tokens`.
    """
    batch, length, heads = shape
    BNCG = (batch, length // form.chunk, form.chunk, heads)
    features: dict[str, Any] = {}
    rows = start = None
    if beta_BTG is not None:
        features["beta"] = beta_BTG.reshape(BNCG)
    if g_BTG is not None:
        g = jnp.maximum(g_BTG, MIN_LOG_DECAY).reshape(BNCG)
        coarse = jnp.round(g / LOG_DECAY_GRAIN) * LOG_DECAY_GRAIN
        sums = [jnp.cumsum(part, axis=2) for part in (coarse, g - coarse)]
        features |= {
            "coarse": sums[0],
            "fine": sums[1],
            "read": jnp.exp(sums[0] + sums[1]),
            "write": jnp.exp(sum(x[:, :, -1:] - x for x in sums)),
        }
        rows = jnp.stack(sums, axis=2).reshape(*BNCG[:2], 2, form.chunk, -1, form.heads)
        rows = rows.transpose(0, 4, 1, 2, 5, 3)
        rows = rows.reshape(*rows.shape[:3], 2 * form.heads, form.chunk)
    if document_BT is not None:
        document = document_BT.reshape(BNCG[:3])
        last = document[:, :, -1:]
        carried = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0)))
        for name, goal in (("read", carried), ("write", last)):
            factor = features.get(name, jnp.ones(BNCG, F32))
            features[name] = jnp.where((document == goal)[..., None], factor, 0.0)
        place = jnp.arange(form.chunk, dtype=jnp.int32)[None, None]
        before = jnp.concatenate([carried, document[:, :, :-1]], axis=2)
        start = jax.lax.cummax(jnp.where(document != before, place, 0), axis=2)
        start = start.astype(F32).reshape(batch, length, 1)
    columns = None
    if form.columns:
        columns = jnp.stack([features[name] for name in form.columns], axis=3)
        columns = columns.reshape(batch, length, len(form.columns), -1, form.heads)
        columns = columns.transpose(0, 3, 1, 2, 4).reshape(batch, -1, length, form.features)
    return Gates(columns, rows, start)


def each(f: Callable, *lists: Any) -> list[Any]:
    """f over the heads: the operations of one kind in a row."""
    return [f(*items) for items in zip(*lists, strict=True)]


class Read(NamedTuple):
    """One chunk's gates, a list of heads each, whose entries are None where there are none.

    Attributes:
      within_CC: D; the causal mask where nothing decays.
      read_C1, write_C1, beta_C1: columns.
      keep_11: the factor on the state.
    """

    within_CC: list[jax.Array]
    read_C1: list[Any]
    write_C1: list[Any]
    beta_C1: list[Any]
    keep_11: list[Any]


def read_gates(refs: Gates, at: Any, n: Any, form: Form) -> Read:
    """Args: refs of a grid step's blocks; `at` the chunk's tokens, n its number in the step."""
    size, heads = form.chunk, range(form.heads)
    nothing = [None] * form.heads
    columns: dict[str, Any] = dict.fromkeys(("read", "write", "beta"), nothing)
    if form.columns:
        block = refs.columns_BJTF[0, 0, at, :]
        for i, name in enumerate(form.columns):
            first = i * form.heads
            columns[name] = [block[:, first + h : first + h + 1] for h in heads]
    keep = [x[size - 1 :] for x in columns["read"]] if form.factors else nothing
    Ds = _within(refs, at, n, columns, form)
    return Read(Ds, columns["read"], columns["write"], columns["beta"], keep)


def _within(refs: Gates, at: Any, n: Any, columns: dict[str, Any], form: Form) -> list[jax.Array]:
    size, count = form.chunk, form.heads
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    seen = lane <= row
    if refs.start_BT1 is not None:
        seen &= lane.astype(F32) >= refs.start_BT1[0, at, :]
    if refs.rows_BJNFC is None:
        return [seen.astype(F32)] * count
    rows = refs.rows_BJNFC[0, 0, n]
    exponents = [
        (columns["coarse"][h] - rows[h : h + 1])
        + (columns["fine"][h] - rows[count + h : count + h + 1])
        for h in range(count)
    ]
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    return [jnp.exp(jnp.where(seen, x, -jnp.inf)) for x in exponents]


def times(factor: jax.Array | None, x: Any) -> Any:
    return x if factor is None else factor * x


def dot(a: jax.Array, b: jax.Array, axes=NN, *, wide: bool) -> jax.Array:
    """A product with float32 sums: one pass over operands rounded to bfloat16, or in float32."""
    if not wide:
        a, b = a.astype(BF16), b.astype(BF16)
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), preferred_element_type=F32,
        precision=jax.lax.Precision.HIGHEST if wide else None,
    )  # fmt: skip


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """x as a sum of bfloat16 values: what rounding leaves, and the rest of a float32 one."""
    if x.dtype == BF16:
        return x, None
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


def dot_split(a: jax.Array, b: jax.Array, axes=NN, *, wide: bool) -> jax.Array:
    """A product of nearly float32 accuracy: three passes, or two where one operand is bfloat16.

    Only the product of both rests, 2^-16 of the whole, is left out. The passes are written here
    and not left to `Precision.HIGH` so that what runs in interpret mode is what runs on a TPU.
    """
    if wide:
        return dot(a, b, axes, wide=True)
    (high_a, low_a), (high_b, low_b) = _parts(a), _parts(b)
    pairs = [(high_a, high_b)]
    pairs += [] if low_b is None else [(high_a, low_b)]
    pairs += [] if low_a is None else [(low_a, high_b)]
    # Side by side along the contracted axis, the matrix unit sums them. Where that axis is one of
    # lanes only whole ones can be laid so for nothing.
    along_lanes = [x.shape[1] for x, (axis,) in zip((a, b), axes, strict=True) if axis == 1]
    if all(size % LANES == 0 for size in along_lanes):
        lefts, rights = zip(*pairs, strict=True)
        left = jnp.concatenate(lefts, axis=axes[0][0])
        return dot(left, jnp.concatenate(rights, axis=axes[1][0]), axes, wide=False)
    products = [dot(*pair, axes, wide=False) for pair in pairs]
    return functools.reduce(jnp.add, products)


def stack(*parts: jax.Array) -> jax.Array:
    """One below the other: two products with one right side are one product."""
    return jnp.concatenate(parts, axis=0)


class Specs(NamedTuple):
    """Blocks of the arrays of a call, by their kind; `reverse` walks rows from their ends.

    Attributes:
      keys: [B, T, heads x K]; values: [B, T, G x V]; states: [B, G, K, V].
      kept: [B, S, G, K, V]; inverse: [B, J, T, heads x C].
      gates: `Gates`.
    """

    keys: pl.BlockSpec
    values: pl.BlockSpec
    states: pl.BlockSpec
    kept: pl.BlockSpec
    inverse: pl.BlockSpec
    gates: Gates


def specs(form: Form, groups: int, steps: int, *, reverse: bool) -> Specs:
    """Args: groups, value heads a query/key head."""
    tokens, heads, K, V = form.tokens, form.heads, form.key_dim, form.value_dim

    def at(s):
        return steps - 1 - s if reverse else s

    def key_block(j):
        return j * heads // groups // form.keys

    def spec(shape, index):
        return pl.BlockSpec(shape, index)

    return Specs(
        spec((1, tokens, form.keys * K), lambda b, j, s: (b, at(s), key_block(j))),
        spec((1, tokens, heads * V), lambda b, j, s: (b, at(s), j)),
        spec((1, heads, K, V), lambda b, j, s: (b, j, 0, 0)),
        spec((1, 1, heads, K, V), lambda b, j, s: (b, at(s), j, 0, 0)),
        spec((1, 1, tokens, heads * form.chunk), lambda b, j, s: (b, j, at(s), 0)),
        Gates(
            spec((1, 1, tokens, form.features), lambda b, j, s: (b, j, at(s), 0))
            if form.columns
            else None,
            spec((1, 1, form.chunks, 2 * heads, form.chunk), lambda b, j, s: (b, j, at(s), 0, 0))
            if form.gated
            else None,
            spec((1, tokens, 1), lambda b, j, s: (b, at(s), 0)) if form.packed else None,
        ),
    )


def call(
    kernel: Callable,
    form: Form,
    grid: tuple[int, int, int],
    operands: Any,
    in_specs: Any,
    outputs: Any,
    out_specs: Any,
    scratch: Any,
    *,
    name: str,
    interpret: Any,
) -> Any:
    """Runs kernel(operands, outputs, *scratch, form=form) for each row, head block and step.

    Operands, outputs and scratch are trees of arrays; steps follow one another.
    """

    def body(operand_refs, *rest):
        tree = jax.tree.structure(outputs)
        count = len(rest) - len(scratch)
        results = jax.tree.unflatten(tree, jax.tree.leaves(rest[:count]))
        kernel(operand_refs, results, *rest[count:], form=form)

    return pl.pallas_call(
        body,
        name=name,
        grid=grid,
        in_specs=[in_specs],
        out_specs=out_specs,
        out_shape=outputs,
        scratch_shapes=scratch,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
    )(operands)

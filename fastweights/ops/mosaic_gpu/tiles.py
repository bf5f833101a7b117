"""What the Hopper kernels share: layouts, shared-memory tiles, matrix products, and a stand-in.

Every product runs on one warpgroup (128 threads) through wgmma: the left operand is a value in
registers or a tile in shared memory, the right one a tile in shared memory, the sum float32 in
registers. Products are issued without waiting; `read` waits until at most `in_flight` of the
products issued later are still under way.

Pallas' GPU simulator (`interpret=True`, a test on the CPU) knows neither left operands in registers
nor sums that go on from a value, so there the same calls compute with `jnp.dot` on the same tiles.
Copies, barriers, pipelines and layouts are simulated as they are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as _plgpu

plgpu: Any = _plgpu  # the type checker knows only a part of the module
CHUNK = 64  # rows of one wgmma
WIDTH = 64  # rows of S^T a warpgroup of the scans
F32, BF16 = jnp.float32, jnp.bfloat16
SHARED_MEMORY = 227 * 1024  # bytes one block may have
MULTIPROCESSORS = 132  # of an H100 or H200

MATRIX = plgpu.Layout.WGMMA
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)
LOG2_E = 1.4426950408889634
NOTHING = -1e30  # an exponent whose power of two is exactly zero


def tile(*shape: int, width: int = 64) -> Any:
    """Shared memory for bfloat16 matrices as wgmma and the copy engine want them."""
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
    return plgpu.SMEM(shape, BF16, transforms=transforms)


def is_wide(key_dim: int) -> bool:
    """Whether WIDTH rows of S^T take so many registers that their rounded copy finds no place."""
    return key_dim > 128


def computing_warpgroups(value_dim: int, key_dim: int) -> int:
    """How many warpgroups of WIDTH rows of S^T share a block of the scans."""
    return 2 if value_dim % (2 * WIDTH) == 0 and not is_wide(key_dim) else 1


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def in_layout(x: jax.Array) -> jax.Array:
    return plgpu.layout_cast(x, MATRIX)


def zeros(rows: int, columns: int) -> jax.Array:
    return in_layout(jnp.zeros((rows, columns), F32))


def along_rows(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """A vector of shared memory, entry i in all of row i. One buffer serves one direction only."""
    return jax.lax.broadcast_in_dim(plgpu.load(ref, layout=ROW, optimized=False), shape, [0])


def along_columns(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """A vector of shared memory, entry j in all of column j."""
    return jax.lax.broadcast_in_dim(plgpu.load(ref, layout=COLUMN, optimized=False), shape, [1])


def indices(shape: tuple[int, int], hidden_zero: jax.Array | int = 0):
    """Row and column number of each entry."""
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX) + hidden_zero
        for axis in (0, 1)
    )
    return row, column


def power(mask: jax.Array, exponent: jax.Array) -> jax.Array:
    """2^exponent where the mask stands, else 0; masked before the power."""
    return jnp.exp2(jnp.where(mask, exponent, NOTHING))


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as a sum of two bfloat16 numbers, good to 16 bits."""
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


class _Sum:
    """Stands in for an accumulator in the simulator."""

    def __init__(self, value: jax.Array):
        self.value = value


def issue(accumulator: Any, left: Any, right: Any) -> None:
    """accumulator += left @ right, without waiting."""
    if isinstance(accumulator, _Sum):
        left = left if isinstance(left, jax.Array) else left[...]
        accumulator.value += jnp.dot(left, right[...], preferred_element_type=F32)
    else:
        plgpu.wgmma(accumulator, left, right)


def read(accumulator: Any, in_flight: int = 0) -> jax.Array:
    if isinstance(accumulator, _Sum):
        return accumulator.value
    return plgpu.wgmma_accumulator_load(accumulator, wait_n=in_flight)


def with_sums(body: Callable, shapes: Sequence[tuple[int, int]], simulate: bool) -> Any:
    """Runs body(*accumulators that begin at zero) and returns what it returns."""
    if simulate:
        return body(*(_Sum(jnp.zeros(shape, F32)) for shape in shapes))
    return pl.run_scoped(body, *(plgpu.ACC(shape, F32) for shape in shapes))


def continue_sums(body: Callable, values: Sequence[jax.Array], simulate: bool) -> Any:
    """Runs body(accumulators that begin at the values); returns the sums once all have ended."""
    if simulate:
        sums = [_Sum(value) for value in values]
        body(sums)
        return [x.value for x in sums]

    def run(refs):
        body(refs)
        plgpu.wgmma_wait(0)

    return pl.run_state(run)([plgpu.ACC.init(value) for value in values])


def multiply(terms: Sequence[tuple[Any, Any]], shape: tuple[int, int], simulate: bool) -> jax.Array:
    """Sum of the products left @ right."""

    def body(accumulator):
        for left, right in terms:
            issue(accumulator, left, right)
        return read(accumulator)

    return with_sums(body, [shape], simulate)


def hidden_zero(simulate: bool) -> jax.Array | int:
    """0 that the compiler cannot see through.

    Masks and descriptors that depend on it stay inside their loop, where LLVM would otherwise move
    dozens of registers' worth in front of it and then spill them.
    """
    if simulate:
        return 0

    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar))
    def zero(ctx):
        del ctx
        from jax._src.lib.mlir import ir  # type: ignore[reportPrivateImportUsage]
        from jax._src.lib.mlir.dialects import llvm
        from jax.experimental.mosaic import gpu as mgpu

        i32 = ir.IntegerType.get_signless(32)
        value = llvm.inline_asm(i32, [], "mov.u32 $0, 0;", "=r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return zero()


def fence_reads(simulate: bool) -> None:
    """A fence between plain reads and the next copy into a tile, for the simulator's race detector.

    On the chip the barrier before the copy is enough.
    """
    if simulate:
        plgpu.commit_smem()


def slot(i: jax.Array, stages: int) -> jax.Array:
    return jax.lax.rem(i, jnp.int32(stages))


def count_up(count: int | jax.Array, body: Callable, carry: Any) -> Any:
    """The last carry of body(i, carry) -> carry for i from 0, an int32 whatever jax_enable_x64."""

    def turn(i, carry):
        return body(jnp.asarray(i, jnp.int32), carry)

    return jax.lax.fori_loop(0, count, turn, carry)


def loop(begin: Any, end: Any) -> Callable[[Callable], None]:
    """Runs the decorated body(i) for i from begin to end, in int32 as `count_up`."""

    def run(body: Callable) -> None:
        def turn(i, carry):
            body(i + begin)
            return carry

        count_up(end - begin, turn, ())

    return run


def feed(issue_copies: Callable, free: Any, stages: int, count: int | jax.Array) -> None:
    """The copying warpgroup: fills the ring, refills each slot when it is free, drains the ring.

    issue_copies(i, slot) starts the copies of step i. The ring is never longer than count.
    """
    for i in range(stages):
        pl.when(i < count)(functools.partial(issue_copies, jnp.int32(i), i))

    @loop(0, count)
    def _(i):
        here = slot(i, stages)
        plgpu.barrier_wait(free.at[here])
        pl.when(i + stages < count)(lambda: issue_copies(i + stages, here))


def call(
    body: Callable,
    operands: Sequence[jax.Array],
    *,
    name: str,
    out_type: Any,
    blocks: int,
    threads: int,
    scratch: Sequence[Any],
    simulate: bool,
    guard_stores: bool = True,
) -> Any:
    """Starts a kernel of `blocks` blocks of `threads` warpgroups.

    Without guard_stores no barrier of the warpgroup stands before and after each plain store. That
    is for kernels in which no thread stores where another one, or a product under way, may still
    read, and whose copies and products follow a `commit_smem`.

    body(block, warpgroup, operands, results, scratch) gets its two numbers and references. One axis
    counts the blocks, for only the first axis of a CUDA grid may pass 65,535.
    """
    count = len(operands)

    def entry(*refs):
        block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")

        def scoped(*scratch_refs):
            body(block, warpgroup, refs[:count], refs[count:], scratch_refs)

        pl.run_scoped(scoped, *scratch, collective_axes="warpgroup")

    kernel = plgpu.kernel(
        entry,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not guard_stores
        ),
        interpret=plgpu.InterpretGPUParams() if simulate else None,
    )
    with jax.enable_x64(False):  # the kernels count in int32, also where the caller has wider types
        return kernel(*operands)


def digits(index: jax.Array, *sizes: int) -> list[jax.Array]:
    """The place of an index in an array of these sizes, the last of which varies fastest."""
    out = []
    for size in reversed(sizes[1:]):
        out.append(jax.lax.rem(index, jnp.int32(size)))
        index = jax.lax.div(index, jnp.int32(size))
    return [index, *reversed(out)]

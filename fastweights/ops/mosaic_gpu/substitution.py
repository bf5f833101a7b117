"""Inverts two unit lower triangular 32 x 32 blocks by forward substitution, in float32 registers.

One warp does both blocks at once: half a warp a block, a thread two columns of the inverse (column
l and column l + 16). Column x of (I + L)^-1 follows from x_i = e_i - sum_{j<i} L_ij x_j; L is read
from shared memory, four entries at a time, the same for the whole half warp. Nothing but
multiply-adds in float32 touches the numbers: a power series would lose all digits on similar keys.

`reference` computes the same in jnp for the simulator.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastweights.ops.mosaic_gpu.threads import Thread
from fastweights.ops.mosaic_gpu.tiles import F32, MATRIX, plgpu

HALF = 32  # rows of a block
PITCH = 40  # floats a scratch row: 16-byte aligned, and pairs of rows fall on different banks
GAP = 16  # extra floats before the second block, so that the half warps use different banks
SCRATCH = 2 * HALF * PITCH + GAP


def _substitute(thread: Thread, pointer: Any) -> None:
    """Scratch row j of a block holds column j of L; on return, row i holds row i of the inverse."""
    lane, arith = thread.lane(), thread.arith
    block = arith.shrui(lane, thread.number(4))
    column = arith.andi(lane, thread.number(15))
    start = arith.muli(block, thread.number(HALF * PITCH + GAP))
    base = thread.address(pointer, start)
    left = [thread.unit(column, i) for i in range(HALF)]
    # Rows 0 to 15 of the right columns are zero and stay so.
    right = [thread.unit(column, i - 16) for i in range(16, HALF)]
    for j in range(HALF - 1):
        for group in range((j + 1) // 4 * 4, HALF, 4):
            entries = thread.load_many(4, base, j * PITCH + group)
            for i in range(max(group, j + 1), group + 4):
                entry = entries[i - group]
                left[i] = thread.subtract_product(left[i], entry, left[j])
                if j >= 16:
                    right[i - 16] = thread.subtract_product(right[i - 16], entry, right[j - 16])
    thread.utils.warp_barrier()  # every lane has read L before the inverse overwrites it
    out = thread.address(pointer, arith.addi(start, column))
    for i in range(HALF):
        thread.store(out, i * PITCH, left[i])
        thread.store(out, i * PITCH + 16, right[i - 16] if i >= 16 else thread.number(0.0))


def invert_blocks(L_transposed: jax.Array, scratch: Any, worker: jax.Array) -> jax.Array:
    """Inverses of both diagonal blocks.

    Args:
      L_transposed: [64, 32] float32 in wgmma's layout; rows 0 to 31 the strictly upper L^T of the
        first block, rows 32 to 63 that of the second.
      scratch: shared memory of SCRATCH floats, of this warpgroup alone.
      worker: int32, which of the warpgroup's four warps works (warpgroups of one multiprocessor
        should use different ones, for warp i sits on scheduler i).

    Returns:
      [64, 32] float32: the inverse of the first block above that of the second.
    """

    @plgpu.inline_mgpu(
        arg_types=(MATRIX, plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((2 * HALF, HALF), F32, layout=MATRIX),
    )
    def run(ctx, matrix, scratch_ref, worker):
        del ctx
        from jax._src.lib.mlir import ir  # type: ignore[reportPrivateImportUsage]
        from jax._src.lib.mlir.dialects import arith, llvm
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        pointer = utils.memref_ptr(scratch_ref)

        def addresses():
            """Each register pair's index and its place in the scratch memory."""
            registers = np.ndindex(matrix.registers.shape)
            places = matrix.layout.thread_idxs(matrix.shape)
            for index, (row, column) in zip(registers, places, strict=True):
                row, column = arith.index_cast(i32, row), arith.index_cast(i32, column)
                block = arith.shrui(row, utils.c(5, i32))
                offset = arith.addi(arith.muli(row, utils.c(PITCH, i32)), column)
                offset = arith.addi(offset, arith.muli(block, utils.c(GAP, i32)))
                yield index, utils.getelementptr(pointer, [offset], f32)

        for index, address in addresses():
            llvm.store(matrix.registers[index], address, alignment=8)
        utils.warpgroup_barrier()
        warp = arith.andi(utils.warp_idx(sync=True), utils.c(3, i32))
        mine = arith.cmpi(arith.CmpIPredicate.eq, warp, worker.registers.item())
        with utils.when(mine):
            _substitute(Thread(), pointer)
        utils.warpgroup_barrier()
        registers = np.empty(matrix.registers.shape, dtype=object)
        for index, address in addresses():
            registers[index] = llvm.load(pair, address, alignment=8)
        return mgpu.FragmentedArray(_registers=registers, _layout=matrix.layout, _is_signed=None)

    return run(L_transposed, scratch, worker)


def reference(L_transposed: jax.Array) -> jax.Array:
    """`invert_blocks` row by row in jnp."""
    L = jnp.swapaxes(jnp.reshape(L_transposed, (2, HALF, HALF)), -1, -2)
    eye = jnp.eye(HALF, dtype=F32)
    X = jnp.broadcast_to(eye, L.shape)
    for i in range(1, HALF):
        row = eye[i][None] - jnp.sum(L[:, i, :, None] * X, axis=1)
        X = jnp.concatenate([X[:, :i], row[:, None], X[:, i + 1 :]], axis=1)
    return jnp.reshape(X, (2 * HALF, HALF))

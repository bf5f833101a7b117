"""Per-thread instructions, which Pallas itself does not have, for bodies of `plgpu.inline_mgpu`."""

from collections.abc import Sequence
from typing import Any


class Thread:
    """Instructions of one thread on float32 numbers and int32 indices, as MLIR."""

    def __init__(self):
        from jax._src.lib.mlir import ir  # type: ignore[reportPrivateImportUsage]
        from jax._src.lib.mlir.dialects import arith, llvm, math, vector
        from jax.experimental.mosaic.gpu import utils

        self.ir, self.arith, self.llvm = ir, arith, llvm
        self.math, self.vector, self.utils = math, vector, utils
        self.i32, self.f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

    def lane(self) -> Any:
        """Its number in the warp."""
        # With side effects, so that what depends on it is not moved out of the chunk loop.
        return self._asm("mov.u32 $0, %laneid;", self.i32, side_effects=True)

    def in_warpgroup(self) -> Any:
        """Its number in the warpgroup."""
        thread = self.utils.thread_idx()
        return self.arith.andi(thread, self.number(127))

    def number(self, value: int | float) -> Any:
        return self.utils.c(value, self.f32 if isinstance(value, float) else self.i32)

    def index(self, *terms: Any) -> Any:
        """Horner's rule: index(a, n, b) is a * n + b, index(a, n, b, m, c) that times m + c."""
        total, *rest = terms
        for size, digit in zip(rest[::2], rest[1::2], strict=True):
            total = self.arith.muli(total, self._value(size))
            total = self.arith.addi(total, self._value(digit))
        return total

    def digits(self, index: Any, size: int) -> tuple[Any, Any]:
        """Quotient and remainder of a number that is not negative."""
        size = self.number(size)
        return self.arith.divui(index, size), self.arith.remui(index, size)

    def unit(self, column: Any, row: int) -> Any:
        """1 where this thread's column is `row`."""
        equal = self.arith.cmpi(self.arith.CmpIPredicate.eq, column, self.number(row))
        return self.arith.select(equal, self.number(1.0), self.number(0.0))

    def where_below(self, index: Any, bound: int) -> Any:
        """A context whose instructions run only where index < bound."""
        below = self.arith.cmpi(self.arith.CmpIPredicate.slt, index, self.number(bound))
        return self.utils.when(below)

    def pointer(self, ref: Any) -> Any:
        """To the first number of a reference."""
        return self.utils.memref_ptr(ref)

    def address(self, base: Any, offset: Any) -> Any:
        return self.utils.getelementptr(base, [offset], self.f32)

    def load(self, base: Any, offset: int = 0) -> Any:
        return self.llvm.load(self.f32, self.address(base, offset), alignment=4)

    def load4(self, base: Any, offset: int = 0) -> list[Any]:
        kind = self.ir.VectorType.get((4,), self.f32)
        value = self.llvm.load(kind, self.address(base, offset), alignment=16)
        return [
            self.vector.extract(
                value,
                dynamic_position=[],
                static_position=self.ir.DenseI64ArrayAttr.get([i]),
            )
            for i in range(4)
        ]

    def store(self, base: Any, offset: int, value: Any) -> None:
        self.llvm.store(value, self.address(base, offset), alignment=4)

    def store4(self, base: Any, offset: int, values: Sequence[Any]) -> None:
        kind = self.ir.VectorType.get((4,), self.f32)
        value = self.vector.from_elements(kind, list(values))
        self.llvm.store(value, self.address(base, offset), alignment=16)

    def add(self, a: Any, b: Any) -> Any:
        return self.arith.addf(a, b)

    def subtract(self, a: Any, b: Any) -> Any:
        return self.arith.subf(a, b)

    def multiply(self, a: Any, b: Any) -> Any:
        return self.arith.mulf(a, b)

    def divide(self, a: Any, b: Any) -> Any:
        return self.arith.divf(a, b)

    def subtract_product(self, x: Any, a: Any, b: Any) -> Any:
        return self.math.fma(self.arith.negf(a), b, x)

    def larger(self, a: Any, b: Any) -> Any:
        return self.arith.maximumf(a, b)

    def where_less(self, a: Any, b: Any, chosen: Any, other: Any) -> Any:
        """`chosen` where |a| < b, else `other`."""
        smaller = self.arith.cmpf(self.arith.CmpFPredicate.OLT, self.math.absf(a), b)
        return self.arith.select(smaller, chosen, other)

    def power_of_two(self, x: Any) -> Any:
        return self._asm("ex2.approx.ftz.f32 $0, $1;", self.f32, x)

    def _value(self, x: Any) -> Any:
        return self.number(x) if isinstance(x, int) else x

    def _asm(self, code: str, kind: Any, *operands: Any, side_effects: bool = False) -> Any:
        letters = "r" if kind == self.i32 else "f"
        constraints = ",".join([f"={letters}"] + [letters] * len(operands))
        return self.llvm.inline_asm(
            kind, list(operands), code, constraints, has_side_effects=side_effects
        )

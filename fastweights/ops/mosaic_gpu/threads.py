"""Per-thread instructions, which Pallas itself does not have, for bodies of `plgpu.inline_mgpu`."""

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

    def warp(self) -> Any:
        """The number of its warp in the warpgroup."""
        thread = self.utils.thread_idx()
        return self.arith.andi(self.arith.shrui(thread, self.number(5)), self.number(3))

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

    def only_below(self, index: Any, bound: int) -> Any:
        """A context whose instructions run only where index < bound."""
        return self.utils.when(self._below(index, bound))

    def where_below(self, index: Any, bound: int, chosen: Any, other: Any) -> Any:
        return self.arith.select(self._below(index, bound), chosen, other)

    def pointer(self, ref: Any) -> Any:
        """To the first number of a reference."""
        return self.utils.memref_ptr(ref)

    def address(self, base: Any, offset: Any) -> Any:
        return self.utils.getelementptr(base, [offset], self.f32)

    def load(self, base: Any, offset: int = 0) -> Any:
        return self.llvm.load(self.f32, self.address(base, offset), alignment=4)

    def load_many(self, count: int, base: Any, offset: int = 0) -> list[Any]:
        """`count` numbers side by side: 2 or 4, so aligned."""
        kind = self.ir.VectorType.get((count,), self.f32)
        value = self.llvm.load(kind, self.address(base, offset), alignment=4 * count)
        return [
            self.vector.extract(
                value,
                dynamic_position=[],
                static_position=self.ir.DenseI64ArrayAttr.get([i]),
            )
            for i in range(count)
        ]

    def store(self, base: Any, offset: int, value: Any) -> None:
        self.llvm.store(value, self.address(base, offset), alignment=4)

    def store2(self, base: Any, offset: int, first: Any, second: Any) -> None:
        kind = self.ir.VectorType.get((2,), self.f32)
        value = self.vector.from_elements(kind, [first, second])
        self.llvm.store(value, self.address(base, offset), alignment=8)

    def sum_of_others(self, x: Any, lane: Any, *, behind: bool = False) -> tuple[Any, Any]:
        """Sum over the warp's lanes before this one (or behind it), and over all."""
        way, last = ("down", 31) if behind else ("up", 0)
        place = self.arith.subi(self.number(31), lane) if behind else lane

        def shifted(x, distance):
            code = f"shfl.sync.{way}.b32 $0, $1, {distance}, {last}, -1;"
            moved = self._asm(code, self.f32, x)
            return self.where_below(place, distance, self.number(0.0), moved)

        total = x
        for distance in (1, 2, 4, 8, 16):
            total = self.add(total, shifted(total, distance))
        return shifted(total, 1), self.from_lane(31 - last, total)

    def from_lane(self, lane: int, x: Any) -> Any:
        """That lane's value."""
        return self._asm(f"shfl.sync.idx.b32 $0, $1, {lane}, 31, -1;", self.f32, x)

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

    def _below(self, index: Any, bound: int) -> Any:
        return self.arith.cmpi(self.arith.CmpIPredicate.slt, index, self.number(bound))

    def _value(self, x: Any) -> Any:
        return self.number(x) if isinstance(x, int) else x

    def _asm(self, code: str, kind: Any, *operands: Any, side_effects: bool = False) -> Any:
        letters = "r" if kind == self.i32 else "f"
        constraints = ",".join([f"={letters}"] + [letters] * len(operands))
        return self.llvm.inline_asm(
            kind, list(operands), code, constraints, has_side_effects=side_effects
        )

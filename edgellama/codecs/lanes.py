"""Vector code for Numba: float32 lanes as Python values that emit LLVM IR.

Numba has no vector types, so a search that runs many sub-blocks side by side is emitted as one intrinsic. Only generic
vector operations are used: LLVM lowers them to SSE, AVX, AVX-512 or NEON. No fast-math flag is ever set, and nothing
here emits `fma` or `fmuladd`: every lane does the operations of the scalar definition, in its order, rounded one by
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
MAGIC = 12582912.0
"""1.5 * 2**23: adding it to |v| < 2**22 leaves round-half-even(v) in the low mantissa bits."""


class Mask:
    """One bit per lane."""

    def __init__(self, lanes: Lanes, value: Any) -> None:
        self.lanes, self.value = lanes, value

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.lanes, self.lanes.b.and_(self.value, other.value))

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.lanes, self.lanes.b.or_(self.value, other.value))

    def pick(self, yes: Float, no: Float) -> Float:
        """`yes` where set, else `no`."""
        return Float(self.lanes, self.lanes.b.select(self.value, yes.value, no.value))

    def any(self) -> Any:
        """An i1: whether a lane is set."""
        b = self.lanes.b
        bits = b.bitcast(self.value, ir.IntType(self.lanes.width))
        return b.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(self.lanes.width), 0))


class Float:
    """`width` float32 values. Comparisons are ordered, as C's are: false for NaN."""

    def __init__(self, lanes: Lanes, value: Any) -> None:
        self.lanes, self.value = lanes, value

    def _binary(self, op: str, other: Float) -> Float:
        return Float(self.lanes, getattr(self.lanes.b, op)(self.value, other.value))

    def __add__(self, other: Float) -> Float:
        return self._binary("fadd", other)

    def __sub__(self, other: Float) -> Float:
        return self._binary("fsub", other)

    def __mul__(self, other: Float) -> Float:
        return self._binary("fmul", other)

    def __truediv__(self, other: Float) -> Float:
        return self._binary("fdiv", other)

    def __neg__(self) -> Float:
        return Float(self.lanes, self.lanes.b.fneg(self.value))

    def _compare(self, op: str, other: Float) -> Mask:
        return Mask(self.lanes, self.lanes.b.fcmp_ordered(op, self.value, other.value))

    def __lt__(self, other: Float) -> Mask:
        return self._compare("<", other)

    def __gt__(self, other: Float) -> Mask:
        return self._compare(">", other)

    def equals(self, other: Float) -> Mask:
        """Equality, false for NaN."""
        return self._compare("==", other)

    def differs(self, other: Float) -> Mask:
        """Inequality, true for NaN, as C's `!=`."""
        return Mask(self.lanes, self.lanes.b.fcmp_unordered("!=", self.value, other.value))

    def at_most(self, top: Float) -> Float:
        """min(self, top)."""
        return (self < top).pick(self, top)

    def at_least(self, low: Float) -> Float:
        """max(self, low)."""
        return (self > low).pick(self, low)

    def abs(self) -> Float:
        """Magnitude."""
        return self.lanes.call("fabs", self)

    def round_even(self) -> Float:
        """Round half to even, for values within 2**22 only; others must have been ruled out."""
        magic = self.lanes.const(MAGIC)
        return (self + magic) - magic

    def nearest_int(self) -> Float:
        """ggml's nearest_int for any input, wrap-around and NaN included, as a float."""
        b, kind = self.lanes.b, self.lanes.integers
        bits = b.bitcast((self + self.lanes.const(MAGIC)).value, kind)
        low = b.and_(bits, ir.Constant(kind, [0x007FFFFF] * self.lanes.width))
        return Float(
            self.lanes, b.sitofp(b.sub(low, ir.Constant(kind, [0x00400000] * self.lanes.width)), self.lanes.floats)
        )


class Lanes:
    """Emits code into `builder` for vectors of `width` float32."""

    def __init__(self, builder: Any, width: int) -> None:
        self.b, self.width = builder, width
        self.floats, self.integers = ir.VectorType(_F32, width), ir.VectorType(_I32, width)

    def const(self, value: float) -> Float:
        """The same float32 in every lane."""
        return Float(self, ir.Constant(self.floats, [float(np.float32(value))] * self.width))

    def splat(self, scalar: Any) -> Float:
        """An f32 value in every lane."""
        undefined = ir.Constant(self.floats, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return Float(self, self.b.shuffle_vector(first, undefined, ir.Constant(self.integers, [0] * self.width)))

    def call(self, name: str, *args: Float) -> Float:
        """An LLVM float intrinsic that rounds correctly (`fabs`, `sqrt`)."""
        kind = ir.FunctionType(self.floats, [self.floats] * len(args))
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.{name}.v{self.width}f32")
        return Float(self, self.b.call(function, [a.value for a in args]))

    def array(self, address: Any) -> Array:
        """Memory at an integer address, as rows of `width` float32."""
        return Array(self, self.b.inttoptr(address, self.floats.as_pointer()))

    def table(self, values: Sequence[float]) -> Any:
        """A stack array of f32 constants, to be indexed in a runtime loop."""
        kind = ir.ArrayType(_F32, len(values))
        constant = ir.Constant(kind, [ir.Constant(_F32, float(np.float32(v))) for v in values])
        return cgutils.global_constant(self.b.module, "lanes.table", constant)

    @contextlib.contextmanager
    def steps(self, count: int, state: list[Float]) -> Iterator[tuple[Any, list[Float], list[Float]]]:
        """A runtime loop with carried values: yields (index, values, new values to fill), then updates `state`."""
        slots = [cgutils.alloca_once_value(self.b, s.value) for s in state]
        for slot, value in zip(slots, state, strict=True):
            self.b.store(value.value, slot)
        with cgutils.for_range(self.b, ir.Constant(_I64, count), intp=_I64) as loop:
            new: list[Float] = []
            yield loop.index, [Float(self, self.b.load(slot)) for slot in slots], new
            for slot, value in zip(slots, new, strict=True):
                self.b.store(value.value, slot)
        state[:] = [Float(self, self.b.load(slot)) for slot in slots]

    def fold(
        self, n: int, state: Sequence[Float], body: Callable[..., Sequence[Float]], unroll: int = 4
    ) -> list[Float]:
        """`state = body(i, *state)` for i in 0..n-1, in order; unrolled a little: full unrolling compiles slowly."""
        carried = list(state)
        slots = [cgutils.alloca_once_value(self.b, s.value) for s in carried]
        for slot, value in zip(slots, carried, strict=True):
            self.b.store(value.value, slot)
        with cgutils.for_range(self.b, ir.Constant(_I64, n // unroll), intp=_I64) as loop:
            values: Sequence[Float] = [Float(self, self.b.load(slot)) for slot in slots]
            for k in range(unroll):
                index = self.b.add(self.b.mul(loop.index, ir.Constant(_I64, unroll)), ir.Constant(_I64, k))
                values = body(index, *values)
            for slot, value in zip(slots, values, strict=True):
                self.b.store(value.value, slot)
        return [Float(self, self.b.load(slot)) for slot in slots]

    def each(self, n: int, body: Callable[[Any], None]) -> None:
        """`body(i)` for i in 0..n-1."""

        def step(i: Any) -> list[Float]:
            body(i)
            return []

        self.fold(n, [], step)

    def entry(self, table: Any, index: Any) -> Float:
        """Element `index` of a `table`, in every lane."""
        return self.splat(self.b.load(self.b.gep(table, [ir.Constant(_I64, 0), index])))


class Array:
    """Rows of lanes in memory; loads and stores are unaligned."""

    def __init__(self, lanes: Lanes, pointer: Any) -> None:
        self.lanes, self.pointer = lanes, pointer

    def _at(self, row: Any) -> Any:
        return self.lanes.b.gep(self.pointer, [ir.Constant(_I64, row) if isinstance(row, int) else row])

    def __getitem__(self, row: Any) -> Float:
        value = self.lanes.b.load(self._at(row))
        value.align = 4
        return Float(self.lanes, value)

    def __setitem__(self, row: Any, value: Float) -> None:
        self.lanes.b.store(value.value, self._at(row)).align = 4

    def put(self, row: Any, value: Float) -> None:
        """`self[row] = value`, for expressions."""
        self[row] = value

"""Dot products of packed rows with quantized or float activations, several columns at once.

A quantized activation row of k values (k a multiple of 32) holds, in this order: i8[k] values, f32[k / 32] scales,
f32[k / 32] scale * sum of each 32, f32[k / 16] scale * sum of each 16. See `activation_bytes`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgellama.codecs.compiling import intrinsic
from edgellama.engine.jit.kernels.emit import F32, I8, I16, I32, I64, Emit, vector
from edgellama.engine.jit.kernels.types import Packed, Unpacked, eightfold

COLUMNS = 4
"""Columns whose dot products share one unpacking."""
_ZERO8 = ir.Constant(vector(F32, 8), [0.0] * 8)


def activation_bytes(k: int) -> int:
    """Bytes of a quantized activation row."""
    return k + 4 * (k // 32) * 2 + 4 * (k // 16)


def _accumulators(b: Any, n: int) -> list[Any]:
    return [cgutils.alloca_once_value(b, _ZERO8) for _ in range(n)]


def _add(e: Emit, slot: Any, a: Any, b: Any) -> None:
    e.b.store(e.muladd(a, b, e.b.load(slot)), slot)


def _group_scale(e: Emit, packed: Packed, scales: Any, g: int) -> Any:
    """f32[8]: the scale of each lane's four weights in group g."""
    if packed.per_sixteen:
        part, first = scales[g // 4], 2 * (g % 4)
        return e.shuffle(part, [first] * 4 + [first + 1] * 4)
    return e.shuffle(scales, [g] * 8)


def _block(e: Emit, packed: Packed, block: Unpacked, rows: list[tuple[Any, Any, Any, Any]], sums: list[Any]) -> None:
    """Add one block's products of all columns. `rows`: addresses of values, scales and both kinds of sums."""
    b, groups = e.b, packed.groups
    scaled = []
    for column, (_, scales, sums32, sums16) in enumerate(rows):
        if groups == 1:
            d = e.load(scales, 0, F32)
            scaled.append(e.splat(b.fmul(block.scales, d), 8))
            if block.minimums is not None:
                term = e.load(sums32, 0, F32)
                alone = b.insert_element(_ZERO8, term, ir.Constant(I32, 0))
                _add(e, sums[column], alone, e.splat(block.minimums, 8))
            continue
        if packed.per_sixteen:
            for half in range(2):
                _add(e, sums[column], block.minimums[half], e.load(sums16, 32 * half, vector(F32, 8)))
            scaled.append(block.scales)
        else:
            if block.minimums is not None:
                _add(e, sums[column], block.minimums, e.load(sums32, 0, vector(F32, 8)))
            scaled.append(b.fmul(block.scales, e.load(scales, 0, vector(F32, 8))))
    for g in range(groups):
        weights = block.group(g)
        for column, (values, scales, _, _) in enumerate(rows):
            x = e.load(values, 32 * g, vector(I8, 32))
            dot = e.dot_signed(weights, x) if packed.signed else e.dot_bytes(weights, x)
            factor = scaled[column] if groups == 1 else _group_scale(e, packed, scaled[column], g)
            if packed.per_sixteen:
                factor = b.fmul(factor, e.splat(e.load(scales, 4 * g, F32), 8))
            _add(e, sums[column], b.sitofp(dot, vector(F32, 8)), factor)


def packed_dot(packed: Packed, columns: int) -> Any:
    """An intrinsic (row, x, x stride, blocks, out, out stride in bytes): `columns` dot products of one packed row."""

    @intrinsic
    def dot(typingctx: Any, row: Any, x: Any, stride: Any, blocks: Any, out: Any, out_stride: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            row, x, stride, blocks, out, out_stride = args
            e = Emit(b)
            k = b.mul(blocks, e.i64(32 * packed.groups))
            eighth = b.lshr(k, e.i64(3))
            bases = [b.add(x, b.mul(stride, e.i64(column))) for column in range(columns)]
            sums = _accumulators(b, columns)

            def step(kind: Packed, number: Any) -> None:
                """Blocks of `kind` from block `number` of the row on."""
                block = kind.unpack(e, b.add(row, b.mul(number, e.i64(packed.block_bytes))))
                at8 = b.mul(number, e.i64(32 * packed.groups))
                at32, at16 = b.lshr(at8, e.i64(3)), b.lshr(at8, e.i64(2))
                rows = []
                for base in bases:
                    scales = b.add(base, k)
                    sums32 = b.add(scales, eighth)
                    places = (b.add(base, at8), b.add(scales, at32), b.add(sums32, at32))
                    rows.append((*places, b.add(b.add(sums32, eighth), at16)))
                _block(e, kind, block, rows, sums)

            first = e.i64(0)
            if packed.groups == 1:  # scales of eight small blocks at once
                eights = b.lshr(blocks, e.i64(3))
                with cgutils.for_range(b, eights, intp=I64) as loop:
                    step(eightfold(packed), b.shl(loop.index, e.i64(3)))
                first = b.shl(eights, e.i64(3))
            with cgutils.for_range(b, b.sub(blocks, first), intp=I64) as loop:
                step(packed, b.add(first, loop.index))
            for column, slot in enumerate(sums):
                e.store(e.total(b.load(slot)), out, b.mul(out_stride, e.i64(column)))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64), codegen

    return dot


def load_floats(e: Emit, kind: str, base: Any, index: Any, n: int) -> Any:
    """f32[n]: values [index, index + n) of a row of f32, f16 or bf16."""
    b = e.b
    if kind == "f32":
        return e.load(base, b.mul(index, e.i64(4)), vector(F32, n))
    bits = e.load(base, b.mul(index, e.i64(2)), vector(I16, n))
    if kind == "f16":
        return e.half(bits)
    wide = b.shl(b.zext(bits, vector(I32, n)), e.constant(I32, n, 16))
    return b.bitcast(wide, vector(F32, n))


def float_dot(kind: str, columns: int) -> Any:
    """An intrinsic (row, x, x stride, k, out, out stride in bytes): dot products with float32 columns.

    k is a multiple of 8.
    """

    @intrinsic
    def dot(typingctx: Any, row: Any, x: Any, stride: Any, k: Any, out: Any, out_stride: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            row, x, stride, k, out, out_stride = args
            e = Emit(b)
            sums = _accumulators(b, columns)
            with cgutils.for_range(b, b.lshr(k, e.i64(3)), intp=I64) as loop:
                index = b.shl(loop.index, e.i64(3))
                weights = load_floats(e, kind, row, index, 8)
                for column, slot in enumerate(sums):
                    base = b.add(x, b.mul(stride, e.i64(column)))
                    _add(e, slot, weights, e.load(base, b.mul(index, e.i64(4)), vector(F32, 8)))
            for column, slot in enumerate(sums):
                e.store(e.total(b.load(slot)), out, b.mul(out_stride, e.i64(column)))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64), codegen

    return dot

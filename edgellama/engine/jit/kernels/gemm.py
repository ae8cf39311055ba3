"""Products with many columns: rows are unpacked once and used for all of them, columns lie in the vector's lanes.

A panel holds 16 columns. Of bytes: i8[k / 4][16][4] values, f32[k / 32][16] scales, f32[k / 32][16] and f32[k / 16][16]
scale * sum, as in `dots.py`. Of floats: f32[k][16]. An unpacked row holds u8[k] values, then the scales and the
minimums of its groups as f32; or f32[k].

This form of the bytes needs an instruction that adds four products to a lane (VNNI); other hosts keep to `rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgellama.codecs.compiling import intrinsic
from edgellama.engine.jit.kernels import types as packed
from edgellama.engine.jit.kernels.compiled import helper
from edgellama.engine.jit.kernels.dots import load_floats
from edgellama.engine.jit.kernels.emit import F32, I8, I32, I64, Emit, integer_dot, vector
from edgellama.engine.jit.kernels.memory import floats
from edgellama.gguf_io import GGMLType

COLUMNS = 16
ROWS = 4
"""Rows and columns of one tile: its sums stay in registers."""
LEAST_COLUMNS = 8
"""With fewer columns the padding to 16 costs more than it brings."""
_LONG = types.int64
_FLOAT_NAMES = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})


def group_size(kind: GGMLType) -> int:
    """Weights per scale in an unpacked row."""
    return 16 if kind is GGMLType.Q6_K else 32


def unpacked_bytes(kind: GGMLType, k: int) -> int:
    """Bytes of an unpacked row of k values."""
    return 4 * k if kind in _FLOAT_NAMES else k + 8 * (k // group_size(kind))


def panel_bytes(k: int, as_floats: bool) -> int:
    """Bytes of a panel of 16 columns."""
    return COLUMNS * (4 * k if as_floats else k + 8 * (k // 32) + 4 * (k // 16))


def _unpack(kind: packed.Packed) -> Any:
    """An intrinsic (row, blocks, out): unpack one row."""

    @intrinsic
    def unpack(typingctx: Any, row: Any, blocks: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            e = Emit(b)
            row, blocks, out = args
            groups = kind.groups
            k = b.mul(blocks, e.i64(32 * groups))
            scales = b.add(out, k)
            minimums = b.add(scales, b.lshr(k, e.i64(2 if kind.per_sixteen else 3)))
            with cgutils.for_range(b, blocks, intp=I64) as loop:
                block = kind.unpack(e, b.add(row, b.mul(loop.index, e.i64(kind.block_bytes))))
                for g in range(groups):
                    data = block.group(g)
                    if kind.signed:
                        data = b.xor(data, e.constant(I8, 32, -128))
                    e.store(data, out, b.add(b.mul(loop.index, e.i64(32 * groups)), e.i64(32 * g)))
                lows = block.minimums
                if kind.signed:
                    lows = b.fmul(block.scales, ir.Constant(F32, -128.0))
                each = 8 * groups if kind.per_sixteen else 4 * groups
                for base, values in ((scales, block.scales), (minimums, lows)):
                    for place, value in enumerate(values if kind.per_sixteen else [values]):
                        e.store(value, base, b.add(b.mul(loop.index, e.i64(each)), e.i64(32 * place)))
            return context.get_dummy_value()

        return types.void(_LONG, _LONG, _LONG), codegen

    return unpack


def _widen(kind: str) -> Any:
    """An intrinsic (row, k, out): a row of floats as float32."""

    @intrinsic
    def widen(typingctx: Any, row: Any, k: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            e = Emit(b)
            with cgutils.for_range(b, b.lshr(args[1], e.i64(3)), intp=I64) as loop:
                index = b.shl(loop.index, e.i64(3))
                e.store(load_floats(e, kind, args[0], index, 8), args[2], b.shl(index, e.i64(2)))
            return context.get_dummy_value()

        return types.void(_LONG, _LONG, _LONG), codegen

    return widen


def _sums(b: Any) -> list[list[Any]]:
    zero = ir.Constant(vector(F32, 8), [0.0] * 8)
    return [[cgutils.alloca_once_value(b, zero) for _ in range(2)] for _ in range(ROWS)]


def _store_tile(e: Emit, sums: list[list[Any]], y: Any, stride: Any) -> None:
    """Four sums of each of 16 columns, side by side in the column's row of y."""
    b = e.b
    for half in range(2):
        values = [b.load(sums[row][half]) for row in range(ROWS)]
        low, high = (e.shuffle(values[i], range(16), values[i + 1]) for i in (0, 2))
        for lane in range(8):
            four = e.shuffle(low, [lane, 8 + lane, 16 + lane, 24 + lane], high)
            e.store(four, y, b.mul(stride, e.i64(8 * half + lane)))


def _byte_tile(sixteen: bool) -> Any:
    """An intrinsic (rows, bytes per row, panel, k, y, stride): 4 unpacked rows times a panel of bytes."""

    @intrinsic
    def tile(typingctx: Any, rows: Any, size: Any, panel: Any, k: Any, y: Any, stride: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            e = Emit(b)
            rows, size, panel, k, y, stride = args
            group = 16 if sixteen else 32
            bases = [b.add(rows, b.mul(size, e.i64(row))) for row in range(ROWS)]
            count = b.lshr(k, e.i64(4 if sixteen else 5))
            quarter = b.shl(count, e.i64(2))
            panel_scales = b.add(panel, b.shl(k, e.i64(4)))
            eighth = b.shl(k, e.i64(1))  # bytes of f32[k / 32][16]
            panel_sums = b.add(panel_scales, b.shl(eighth, e.i64(1)) if sixteen else eighth)
            sums = _sums(b)
            with cgutils.for_range(b, count, intp=I64) as loop:
                g = loop.index
                zero = ir.Constant(vector(I32, 8), [0] * 8)
                dots = [[zero, zero] for _ in range(ROWS)]
                for four in range(group // 4):
                    place = b.add(b.mul(g, e.i64(16 * group)), e.i64(64 * four))
                    columns = [e.load(panel, b.add(place, e.i64(32 * half)), vector(I8, 32)) for half in range(2)]
                    for row, base in enumerate(bases):
                        word = e.load(base, b.add(b.mul(g, e.i64(group)), e.i64(4 * four)), I32)
                        weights = b.bitcast(e.splat(word, 8), vector(I8, 32))
                        for half in range(2):
                            dots[row][half] = e.add_dot_bytes(dots[row][half], weights, columns[half])
                at = b.mul(b.lshr(g, e.i64(1)) if sixteen else g, e.i64(64))
                d = [e.load(panel_scales, b.add(at, e.i64(32 * half)), vector(F32, 8)) for half in range(2)]
                s = [e.load(panel_sums, b.add(b.mul(g, e.i64(64)), e.i64(32 * h)), vector(F32, 8)) for h in range(2)]
                for row, base in enumerate(bases):
                    place = b.add(b.add(base, k), b.shl(g, e.i64(2)))
                    scale, low = (e.splat(e.load(b.add(place, o), 0, F32), 8) for o in (e.i64(0), quarter))
                    for half in range(2):
                        value = e.muladd(low, s[half], b.load(sums[row][half]))
                        dot = b.sitofp(dots[row][half], vector(F32, 8))
                        b.store(e.muladd(dot, b.fmul(scale, d[half]), value), sums[row][half])
            _store_tile(e, sums, y, stride)
            return context.get_dummy_value()

        return types.void(*[_LONG] * 6), codegen

    return tile


@intrinsic
def _float_tile(typingctx: Any, rows: Any, size: Any, panel: Any, k: Any, y: Any, stride: Any) -> Any:
    """(rows, bytes per row, panel, k, y, stride): 4 rows of float32 times a panel of floats."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        e = Emit(b)
        rows, size, panel, k, y, stride = args
        bases = [b.add(rows, b.mul(size, e.i64(row))) for row in range(ROWS)]
        sums = _sums(b)
        with cgutils.for_range(b, k, intp=I64) as loop:
            place = b.shl(loop.index, e.i64(6))
            columns = [e.load(panel, b.add(place, e.i64(32 * half)), vector(F32, 8)) for half in range(2)]
            for row, base in enumerate(bases):
                weight = e.splat(e.load(base, b.shl(loop.index, e.i64(2)), F32), 8)
                for half in range(2):
                    slot = sums[row][half]
                    b.store(e.muladd(weight, columns[half], b.load(slot)), slot)
        _store_tile(e, sums, y, stride)
        return context.get_dummy_value()

    return types.void(*[_LONG] * 6), codegen


_tile_32, _tile_16 = _byte_tile(sixteen=False), _byte_tile(sixteen=True)
_unpack_q4_0, _unpack_q4_1 = _unpack(packed.Q4_0), _unpack(packed.Q4_1)
_unpack_q5_0, _unpack_q5_1 = _unpack(packed.Q5_0), _unpack(packed.Q5_1)
_unpack_q8_0, _unpack_q4_k = _unpack(packed.Q8_0), _unpack(packed.Q4_K)
_unpack_q5_k, _unpack_q6_k = _unpack(packed.Q5_K), _unpack(packed.Q6_K)
_widen_f32, _widen_f16, _widen_bf16 = _widen("f32"), _widen("f16"), _widen("bf16")

# Unpacking has the arguments (kind, weights, bytes per row, rows, blocks, out, bytes per unpacked row, 0, 0), with
# `kind` one of the numbers in UNPACK.


def unpack_rows(kind: int, w: int, size: int, rows: int, blocks: int, out: int, step: int, _a: int, _b: int) -> None:
    """Unpack rows of any fast type."""
    for r in range(rows):
        source, target = w + r * size, out + r * step
        if kind == 0:
            _widen_f32(source, blocks, target)
        elif kind == 1:
            _widen_f16(source, blocks, target)
        elif kind == 2:
            _widen_bf16(source, blocks, target)
        elif kind == 3:
            _unpack_q4_0(source, blocks, target)
        elif kind == 4:
            _unpack_q4_1(source, blocks, target)
        elif kind == 5:
            _unpack_q5_0(source, blocks, target)
        elif kind == 6:
            _unpack_q5_1(source, blocks, target)
        elif kind == 7:
            _unpack_q8_0(source, blocks, target)
        elif kind == 8:
            _unpack_q4_k(source, blocks, target)
        elif kind == 9:
            _unpack_q5_k(source, blocks, target)
        else:
            _unpack_q6_k(source, blocks, target)


UNPACK: dict[GGMLType, int] = {
    GGMLType.F32: 0,
    GGMLType.F16: 1,
    GGMLType.BF16: 2,
    GGMLType.Q4_0: 3,
    GGMLType.Q4_1: 4,
    GGMLType.Q5_0: 5,
    GGMLType.Q5_1: 6,
    GGMLType.Q8_0: 7,
    GGMLType.Q4_K: 8,
    GGMLType.Q5_K: 9,
    GGMLType.Q6_K: 10,
}

# Tiles have the arguments (unpacked rows, bytes per row, tiles of 4 rows, panels, columns, k, y, y stride, spare): the
# last panel may be partly filled, its product goes to `spare`, float32[16][4], first.


@helper
def _spill(spare: Any, y: Any, stride: Any, columns: Any) -> Any:
    for column in range(columns):
        for i in range(4):
            floats(y + column * stride)[i] = floats(spare)[4 * column + i]


def bytes_32(
    rows: int, step: int, tiles: int, panels: int, columns: int, k: int, y: int, stride: int, spare: int
) -> None:
    for first in range(0, columns, 16):
        panel = panels + first // 16 * (24 * k)
        for t in range(tiles):
            out = y + first * stride + 16 * t
            if columns - first >= 16:
                _tile_32(rows + 4 * t * step, step, panel, k, out, stride)
            else:
                _tile_32(rows + 4 * t * step, step, panel, k, spare, 16)
                _spill(spare, out, stride, columns - first)


def bytes_16(
    rows: int, step: int, tiles: int, panels: int, columns: int, k: int, y: int, stride: int, spare: int
) -> None:
    for first in range(0, columns, 16):
        panel = panels + first // 16 * (24 * k)
        for t in range(tiles):
            out = y + first * stride + 16 * t
            if columns - first >= 16:
                _tile_16(rows + 4 * t * step, step, panel, k, out, stride)
            else:
                _tile_16(rows + 4 * t * step, step, panel, k, spare, 16)
                _spill(spare, out, stride, columns - first)


def floats_1(
    rows: int, step: int, tiles: int, panels: int, columns: int, k: int, y: int, stride: int, spare: int
) -> None:
    for first in range(0, columns, 16):
        panel = panels + first // 16 * (64 * k)
        for t in range(tiles):
            out = y + first * stride + 16 * t
            if columns - first >= 16:
                _float_tile(rows + 4 * t * step, step, panel, k, out, stride)
            else:
                _float_tile(rows + 4 * t * step, step, panel, k, spare, 16)
                _spill(spare, out, stride, columns - first)


def tiles(kind: GGMLType) -> Callable[..., None] | None:
    """The product of unpacked rows of a type with panels, None where this host is better off without."""
    if kind in _FLOAT_NAMES:
        return floats_1
    if integer_dot() != "vnni":
        return None
    return bytes_16 if group_size(kind) == 16 else bytes_32

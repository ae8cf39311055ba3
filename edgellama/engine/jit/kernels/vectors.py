"""Vector loops of the operations: activations, softmax, rows of the cache, quantized activations."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgellama.codecs.compiling import intrinsic
from edgellama.codecs.rounding import bits_of as single_bits
from edgellama.codecs.rounding import to_half
from edgellama.engine.jit.kernels.compiled import helper
from edgellama.engine.jit.kernels.dots import float_dot, load_floats
from edgellama.engine.jit.kernels.emit import F16, F32, I8, I16, I32, I64, Emit, host, vector

dot_f32, dot_f16, dot_bf16 = float_dot("f32", 1), float_dot("f16", 1), float_dot("bf16", 1)
_LONG = types.int64


def _add_scaled(kind: str) -> Any:
    """An intrinsic (row, weight, n, out): out += weight * row, n a multiple of 8."""

    @intrinsic
    def add_scaled(typingctx: Any, row: Any, weight: Any, n: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            e = Emit(b)
            row, weight, n, out = args
            factor = e.splat(weight, 8)
            with cgutils.for_range(b, b.lshr(n, e.i64(3)), intp=I64) as loop:
                index = b.shl(loop.index, e.i64(3))
                place = b.add(out, b.shl(loop.index, e.i64(5)))
                e.store(e.muladd(load_floats(e, kind, row, index, 8), factor, e.load(place, 0, vector(F32, 8))), place)
            return context.get_dummy_value()

        return types.void(_LONG, types.float32, _LONG, _LONG), codegen

    return add_scaled


add_scaled_f32, add_scaled_f16, add_scaled_bf16 = _add_scaled("f32"), _add_scaled("f16"), _add_scaled("bf16")


def _dot_four(kind: str) -> Any:
    """An intrinsic (a, b, c, d, x, n, out): four rows' products with float32 x, n a multiple of 8."""

    @intrinsic
    def dot_four(typingctx: Any, a: Any, b: Any, c: Any, d: Any, x: Any, n: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            e = Emit(b)
            *rows, x, n, out = args
            slots = [cgutils.alloca_once_value(b, ir.Constant(vector(F32, 8), [0.0] * 8)) for _ in rows]
            with cgutils.for_range(b, b.lshr(n, e.i64(3)), intp=I64) as loop:
                index = b.shl(loop.index, e.i64(3))
                values = e.load(x, b.shl(index, e.i64(2)), vector(F32, 8))
                for row, slot in zip(rows, slots, strict=True):
                    b.store(e.muladd(load_floats(e, kind, row, index, 8), values, b.load(slot)), slot)
            pairs = [b.load(slot) for slot in slots]
            low, high = (_halves(e, pairs[i], pairs[i + 1]) for i in (0, 2))
            e.store(_halves(e, _halves(e, low, high), None), out)
            return context.get_dummy_value()

        return types.void(*[_LONG] * 7), codegen

    return dot_four


def _halves(e: Emit, first: Any, second: Any) -> Any:
    """Sums of neighbouring lanes of both vectors; of the one vector [a, a', c, c', b, b', d, d'] the four in order."""
    if second is None:
        return e.b.fadd(e.shuffle(first, [0, 2, 4, 6]), e.shuffle(first, [1, 3, 5, 7]))
    return e.b.fadd(e.shuffle(first, range(0, 16, 2), second), e.shuffle(first, range(1, 16, 2), second))


def _add_four(kind: str) -> Any:
    """An intrinsic (a, b, c, d, weights, n, out): out += the four rows times their float32 weights."""

    @intrinsic
    def add_four(typingctx: Any, a: Any, b: Any, c: Any, d: Any, weights: Any, n: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            e = Emit(b)
            *rows, weights, n, out = args
            factors = [e.splat(e.load(weights, 4 * i, F32), 8) for i in range(4)]
            with cgutils.for_range(b, b.lshr(n, e.i64(3)), intp=I64) as loop:
                index = b.shl(loop.index, e.i64(3))
                place = b.add(out, b.shl(index, e.i64(2)))
                total = e.load(place, 0, vector(F32, 8))
                for row, factor in zip(rows, factors, strict=True):
                    total = e.muladd(load_floats(e, kind, row, index, 8), factor, total)
                e.store(total, place)
            return context.get_dummy_value()

        return types.void(*[_LONG] * 7), codegen

    return add_four


dot_four_f32, dot_four_f16, dot_four_bf16 = _dot_four("f32"), _dot_four("f16"), _dot_four("bf16")
add_four_f32, add_four_f16, add_four_bf16 = _add_four("f32"), _add_four("f16"), _add_four("bf16")


@intrinsic
def exp_block(typingctx: Any, address: Any, eights: Any, highest: Any) -> Any:
    """x = exp(x - highest) for 8 * eights float32 at an address; returns their sum."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        e = Emit(b)
        address, eights, highest = args
        top = e.splat(highest, 8)
        total = cgutils.alloca_once_value(b, ir.Constant(vector(F32, 8), [0.0] * 8))
        with cgutils.for_range(b, eights, intp=I64) as loop:
            place = b.add(address, b.shl(loop.index, e.i64(5)))
            raised = e.exp_or_nan(b.fsub(e.load(place, 0, vector(F32, 8)), top))
            e.store(raised, place)
            b.store(b.fadd(b.load(total), raised), total)
        return e.total(b.load(total))

    return types.float32(_LONG, _LONG, types.float32), codegen


def _gated(kind: str) -> Any:
    """An intrinsic (x, up, out, n): out = x * sigmoid(f(x)) * up, f being x (SiLU) or GELU's polynomial."""

    @intrinsic
    def gated(typingctx: Any, x: Any, up: Any, out: Any, n: Any) -> Any:
        def eight(e: Emit, x: Any, up: Any, out: Any) -> None:
            b = e.b
            value = e.load(x, 0, vector(F32, 8))
            inner = value
            if kind == "gelu":
                square = b.fmul(value, value)
                factor = e.muladd(square, e.constant(F32, 8, 0.044715), e.constant(F32, 8, 1.0))
                inner = b.fmul(b.fmul(value, factor), e.constant(F32, 8, 1.5957691216057308))  # 2 sqrt(2 / pi)
            one = e.constant(F32, 8, 1.0)
            sigmoid = b.fdiv(one, b.fadd(one, e.exp_or_nan(b.fneg(inner))))
            e.store(b.fmul(b.fmul(value, sigmoid), e.load(up, 0, vector(F32, 8))), out)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            e = Emit(b)
            x, up, out, n = args
            with cgutils.for_range(b, b.lshr(n, e.i64(3)), intp=I64) as loop:
                offset = b.shl(loop.index, e.i64(5))
                eight(e, b.add(x, offset), b.add(up, offset), b.add(out, offset))
            return context.get_dummy_value()

        return types.void(_LONG, _LONG, _LONG, _LONG), codegen

    return gated


silu_gate, gelu_gate = _gated("silu"), _gated("gelu")


@intrinsic
def quantize_row(typingctx: Any, x: Any, out: Any, groups: Any) -> Any:
    """Quantize 32 * groups float32 to bytes, scales and sums (`dots.py`); a NaN or infinity makes its scale NaN."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        e = Emit(b)
        x, out, groups = args
        scales = b.add(out, b.shl(groups, e.i64(5)))
        sums32 = b.add(scales, b.shl(groups, e.i64(2)))
        sums16 = b.add(sums32, b.shl(groups, e.i64(2)))
        with cgutils.for_range(b, groups, intp=I64) as loop:
            values = e.load(x, b.shl(loop.index, e.i64(7)), vector(F32, 32))
            highest = e.highest(e.magnitude(values))
            zero, magic = ir.Constant(F32, 0.0), e.constant(F32, 32, 12582912.0)
            empty = b.fcmp_ordered("==", highest, zero)
            inverse = b.select(empty, zero, b.fdiv(ir.Constant(F32, 127.0), highest))
            poison = b.fmul(e.total(values), zero)
            scale = b.fadd(b.fmul(highest, ir.Constant(F32, float(np.float32(1 / 127)))), poison)
            shifted = b.fadd(b.fmul(values, e.splat(inverse, 32)), magic)
            rounded = b.fsub(shifted, magic)
            quants = b.trunc(b.bitcast(shifted, vector(I32, 32)), vector(I8, 32))
            e.store(quants, out, b.shl(loop.index, e.i64(5)))
            low = b.fmul(e.total(e.shuffle(rounded, range(16))), scale)
            high = b.fmul(e.total(e.shuffle(rounded, range(16, 32))), scale)
            e.store(scale, scales, b.shl(loop.index, e.i64(2)))
            e.store(b.fadd(low, high), sums32, b.shl(loop.index, e.i64(2)))
            e.store(low, sums16, b.shl(loop.index, e.i64(3)))
            e.store(high, sums16, b.add(b.shl(loop.index, e.i64(3)), e.i64(4)))
        return context.get_dummy_value()

    return types.void(_LONG, _LONG, _LONG), codegen


@intrinsic
def _half_by_host(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(b.fptrunc(args[0], F16), I16)

    return types.int16(types.float32), codegen


@helper
def _half_by_bits(x: Any) -> Any:
    return np.int16(to_half(x))


half_bits = _half_by_host if host() & {"f16c", "avx512f", "aarch64", "arm64"} else _half_by_bits
"""binary16 bits of a float32, as int16."""

__all__ = [
    "add_four_bf16",
    "add_four_f16",
    "add_four_f32",
    "add_scaled_bf16",
    "add_scaled_f16",
    "add_scaled_f32",
    "dot_bf16",
    "dot_f16",
    "dot_f32",
    "dot_four_bf16",
    "dot_four_f16",
    "dot_four_f32",
    "exp_block",
    "gelu_gate",
    "half_bits",
    "quantize_row",
    "silu_gate",
    "single_bits",
]

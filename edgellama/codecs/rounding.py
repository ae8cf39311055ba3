"""ggml's scalar roundings, bit for bit: nearest_int, roundf, float16 both ways, C's float to int8 conversion."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgellama.codecs.compiling import intrinsic, kernel

_F32, _I32 = ir.FloatType(), ir.IntType(32)


@intrinsic
def bits_of(_context: Any, value: Any) -> Any:
    """float32 -> its bits as int32."""
    del value
    return types.int32(types.float32), lambda _c, b, _s, args: b.bitcast(args[0], _I32)


@intrinsic
def float_of(_context: Any, value: Any) -> Any:
    """int32 bits -> float32."""
    del value
    return types.float32(types.int32), lambda _c, b, _s, args: b.bitcast(args[0], _F32)


@intrinsic
def nearest_int(_context: Any, value: Any) -> Any:
    """float32 -> int32: half to even by the mantissa trick; wraps for |value| >= 2**22, as ggml's does."""
    del value

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        bits = b.bitcast(b.fadd(args[0], ir.Constant(_F32, 12582912.0)), _I32)
        return b.sub(b.and_(bits, ir.Constant(_I32, 0x007FFFFF)), ir.Constant(_I32, 0x00400000))

    return types.int32(types.float32), emit


@intrinsic
def requantize(_context: Any, x: Any, codes: Any, groups: Any, offset: Any, d: Any, middle: Any, top: Any) -> Any:
    """codes = nearest_int((x + offset) / d) + middle, kept within 0..top, for `groups` times 16 values.

    x is the address of float32, codes that of bytes. Vectors of 16, since Numba's loops of divisions stay scalar.
    """
    del x, codes, groups, offset, d, middle, top
    f32, i32 = types.float32, types.int32
    signature = types.void(types.uint64, types.uint64, types.int64, f32, f32, i32, i32)

    def emit(context: Any, b: Any, _s: Any, args: Any) -> Any:
        x_at, codes_at, groups_, offset_, d_, middle_, top_ = args
        floats, words, small = (ir.VectorType(kind, 16) for kind in (_F32, _I32, ir.IntType(8)))
        source, target = b.inttoptr(x_at, floats.as_pointer()), b.inttoptr(codes_at, small.as_pointer())
        offsets, divisors = _splat(b, offset_, floats), _splat(b, d_, floats)
        middles, tops = _splat(b, middle_, words), _splat(b, top_, words)
        with cgutils.for_range(b, groups_) as loop:
            value = b.load(b.gep(source, [loop.index]))
            value.align = 4
            scaled = b.fdiv(b.fadd(value, offsets), divisors)
            bits = b.bitcast(b.fadd(scaled, ir.Constant(floats, [12582912.0] * 16)), words)
            level = b.sub(b.and_(bits, ir.Constant(words, [0x007FFFFF] * 16)), ir.Constant(words, [0x00400000] * 16))
            level = b.add(level, middles)
            level = b.select(b.icmp_signed("<", level, tops), level, tops)
            zeros = ir.Constant(words, [0] * 16)
            level = b.select(b.icmp_signed(">", level, zeros), level, zeros)
            b.store(b.trunc(level, small), b.gep(target, [loop.index])).align = 1
        return context.get_dummy_value()

    return signature, emit


def _splat(b: Any, scalar: Any, kind: Any) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count))


@kernel
def round_half_away(value: Any) -> Any:
    """C's roundf for |value| < 2**23, as int32."""
    whole = np.int32(value)
    rest = np.float32(value - np.float32(whole))
    if rest >= np.float32(0.5):
        return np.int32(whole + 1)
    if rest <= np.float32(-0.5):
        return np.int32(whole - 1)
    return whole


@kernel
def to_half(value: Any) -> Any:
    """float32 -> IEEE 754 binary16 bits, round to nearest even; NaN becomes quiet."""
    bits = np.uint32(bits_of(value))
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude >= np.uint32(0x47800000):  # 65536 and more, infinities, NaN
        special = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else np.uint32(0x7C00)
        return np.uint16(sign | special)
    if magnitude < np.uint32(0x38800000):  # below the smallest normal half: let float addition round
        shifted = bits_of(float_of(np.int32(magnitude)) + np.float32(0.5)) - np.int32(0x3F000000)
        return np.uint16(sign | np.uint32(shifted))
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32(magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd)
    return np.uint16(sign | (rounded >> np.uint32(13)))


@kernel
def from_half(bits: Any) -> Any:
    """IEEE 754 binary16 bits -> float32, exact."""
    sign = np.uint32((np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    exponent = np.uint32((np.uint32(bits) >> np.uint32(10)) & np.uint32(31))
    mantissa = np.uint32(np.uint32(bits) & np.uint32(0x3FF))
    if exponent == np.uint32(0):
        small = np.float32(mantissa) * np.float32(5.9604644775390625e-08)  # 2**-24
        return float_of(np.int32(np.uint32(bits_of(small)) | sign))
    if exponent == np.uint32(31):
        return float_of(np.int32(sign | np.uint32(0x7F800000) | (mantissa << np.uint32(13))))
    return float_of(np.int32(sign | ((exponent + np.uint32(112)) << np.uint32(23)) | (mantissa << np.uint32(13))))


@kernel
def put_half(out: Any, at: Any, value: Any) -> Any:
    """Store `value` as a little-endian half at out[at:at+2] and return it as it was rounded."""
    bits = to_half(value)
    out[at] = np.uint8(bits & np.uint16(255))
    out[at + 1] = np.uint8(bits >> np.uint16(8))
    return from_half(bits)


@kernel
def truncate(value: Any) -> Any:
    """C's (int) of a float as x86 does it, then kept in a byte: out of range and NaN become 0."""
    inside = value if abs(value) < np.float32(2147483648.0) else np.float32(0)
    return np.int32(np.int8(np.int32(inside) & 255))

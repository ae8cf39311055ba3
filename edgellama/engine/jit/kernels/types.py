"""How each fast tensor type unpacks: groups of 32 weights as bytes, with their scales and minimums.

Layouts are ggml's (`ggml-common.h`). A weight is scale * q + minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from edgellama.engine.jit.kernels.emit import F32, I8, I16, I32, Emit, vector

Group = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """One block. `scales` and `minimums` are an f32 (one group), f32[8] (one per group) or two f32[8] (per 16)."""

    group: Group
    """Emits i8[32] of group g."""
    scales: Any
    minimums: Any
    """None for signed types without any."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A block type: bytes, groups of 32, and how to unpack the block at an address."""

    block_bytes: int
    groups: int
    unpack: Callable[[Emit, Any], Unpacked]
    per_sixteen: bool = False
    signed: bool = False
    low: float | None = None
    """The minimum in units of the scale, where it is the same for all blocks."""


def _nibbles(e: Emit, packed: Any) -> Any:
    """u8[32]: the low halves of 16 bytes, then the high ones."""
    low = e.b.and_(packed, e.constant(I8, 16, 15))
    return e.shuffle(low, range(32), e.b.lshr(packed, e.constant(I8, 16, 4)))


def _bits(e: Emit, word: Any, value: int) -> Any:
    """u8[32]: `value` where the bit of the 32-bit word is set."""
    spread = e.shuffle(e.b.bitcast(word, vector(I8, 4)), [lane // 8 for lane in range(32)])
    mask = e.constant(I8, 32, [1 << lane % 8 for lane in range(32)])
    chosen = e.b.icmp_unsigned("!=", e.b.and_(spread, mask), e.constant(I8, 32, 0))
    return e.b.select(chosen, e.constant(I8, 32, value), e.constant(I8, 32, 0))


def _scalar_half(e: Emit, block: Any, offset: int) -> Any:
    return e.half(e.load(block, offset, I16))


def _legacy(bits: int, affine: bool) -> Callable[[Emit, Any], Unpacked]:
    """Q4_0, Q4_1, Q5_0, Q5_1: f16 scale, f16 minimum if affine, fifth bits, nibbles."""

    def unpack(e: Emit, block: Any) -> Unpacked:
        scale = _scalar_half(e, block, 0)
        offset = 4 if affine else 2
        half = ir.Constant(F32, -float(1 << bits - 1))
        minimum = _scalar_half(e, block, 2) if affine else e.b.fmul(scale, half)

        def group(_: int) -> Any:
            data = _nibbles(e, e.load(block, offset + 4 * (bits == 5), vector(I8, 16)))
            return e.b.or_(data, _bits(e, e.load(block, offset, I32), 16)) if bits == 5 else data

        return Unpacked(group, scale, minimum)

    return unpack


def _q8_0(e: Emit, block: Any) -> Unpacked:
    return Unpacked(lambda _: e.load(block, 2, vector(I8, 32)), _scalar_half(e, block, 0), None)


def _k_scales(e: Emit, block: Any, at: int) -> tuple[Any, Any]:
    """Eight scales and eight minimums of 6 bits each, from 12 bytes, as f32[8]."""
    b = e.b
    words = [e.load(block, at + 4 * i, I32) for i in range(3)]

    def c(value: int) -> Any:
        return ir.Constant(I32, value)

    def high(nibbles: Any, tops: Any) -> Any:
        return b.or_(nibbles, b.shl(b.and_(b.lshr(tops, c(6)), c(0x03030303)), c(4)))

    parts = (
        b.and_(words[0], c(0x3F3F3F3F)),
        high(b.and_(words[2], c(0x0F0F0F0F)), words[0]),
        b.and_(words[1], c(0x3F3F3F3F)),
        high(b.and_(b.lshr(words[2], c(4)), c(0x0F0F0F0F)), words[1]),
    )
    packed = ir.Constant(vector(I32, 4), ir.Undefined)
    for i, part in enumerate(parts):
        packed = b.insert_element(packed, part, c(i))
    floats = b.uitofp(b.bitcast(packed, vector(I8, 16)), vector(F32, 16))
    return e.shuffle(floats, range(8)), e.shuffle(floats, range(8, 16))


def _k_affine(bits: int) -> Callable[[Emit, Any], Unpacked]:
    """Q4_K and Q5_K: f16 scale and minimum of the block, 6-bit ones of each group, fifth bits, nibbles."""

    def unpack(e: Emit, block: Any) -> Unpacked:
        b = e.b
        scales, minimums = _k_scales(e, block, 4)
        scales = b.fmul(scales, e.splat(_scalar_half(e, block, 0), 8))
        minimums = b.fmul(minimums, e.splat(b.fneg(_scalar_half(e, block, 2)), 8))
        start = 16 if bits == 4 else 48
        fifth = e.load(block, 16, vector(I8, 32)) if bits == 5 else None
        loaded: dict[int, Any] = {}

        def group(g: int) -> Any:
            pair = loaded.setdefault(g // 2, e.load(block, start + 32 * (g // 2), vector(I8, 32)))
            data = b.lshr(pair, e.constant(I8, 32, 4)) if g % 2 else b.and_(pair, e.constant(I8, 32, 15))
            if fifth is None:
                return data
            bit = b.and_(b.lshr(fifth, e.constant(I8, 32, g)), e.constant(I8, 32, 1))
            return b.or_(data, b.shl(bit, e.constant(I8, 32, 4)))

        return Unpacked(group, scales, minimums)

    return unpack


def _q6_k(e: Emit, block: Any) -> Unpacked:
    b = e.b
    d = e.splat(_scalar_half(e, block, 208), 8)
    scales = [b.fmul(b.sitofp(e.load(block, 192 + 8 * half, vector(I8, 8)), vector(F32, 8)), d) for half in range(2)]
    minimums = [b.fmul(part, e.constant(F32, 8, -32.0)) for part in scales]

    def group(g: int) -> Any:
        half, quarter = divmod(g, 4)
        low = e.load(block, 64 * half + 32 * (quarter % 2), vector(I8, 32))
        low = b.lshr(low, e.constant(I8, 32, 4)) if quarter > 1 else b.and_(low, e.constant(I8, 32, 15))
        top = b.lshr(e.load(block, 128 + 32 * half, vector(I8, 32)), e.constant(I8, 32, 2 * quarter))
        return b.or_(low, b.shl(b.and_(top, e.constant(I8, 32, 3)), e.constant(I8, 32, 4)))

    return Unpacked(group, scales, minimums)


def eightfold(kind: Packed) -> Packed:
    """Eight blocks of a type with one group each, their scales converted together."""

    def unpack(e: Emit, block: Any) -> Unpacked:
        def halves(offset: int) -> Any:
            bits = ir.Constant(vector(I16, 8), ir.Undefined)
            for i in range(8):
                one = e.load(block, i * kind.block_bytes + offset, I16)
                bits = e.b.insert_element(bits, one, ir.Constant(I32, i))
            return e.half(bits)

        singles = [kind.unpack(e, e.at(block, i * kind.block_bytes)) for i in range(8)]
        scales = halves(0)
        if kind.signed:
            minimums = None
        elif kind.low is None:
            minimums = halves(2)
        else:
            minimums = e.b.fmul(scales, e.constant(F32, 8, kind.low))
        return Unpacked(lambda g: singles[g].group(0), scales, minimums)

    return Packed(8 * kind.block_bytes, 8, unpack, signed=kind.signed)


Q4_0 = Packed(18, 1, _legacy(4, affine=False), low=-8.0)
Q4_1 = Packed(20, 1, _legacy(4, affine=True))
Q5_0 = Packed(22, 1, _legacy(5, affine=False), low=-16.0)
Q5_1 = Packed(24, 1, _legacy(5, affine=True))
Q8_0 = Packed(34, 1, _q8_0, signed=True)
Q4_K = Packed(144, 8, _k_affine(4))
Q5_K = Packed(176, 8, _k_affine(5))
Q6_K = Packed(210, 8, _q6_k, per_sixteen=True)

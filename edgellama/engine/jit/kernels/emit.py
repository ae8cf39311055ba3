"""Vector code for the kernels, written as LLVM IR by Python functions.

Numba has no vector types, so the inner loops are emitted inside intrinsics. Everything is generic LLVM but the integer
dot product, which takes the host's own instruction where there is one: AVX-512 VNNI or AVX-VNNI, AVX2, NEON dotprod,
else plain vector operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


def vector(kind: Any, n: int) -> Any:
    """The LLVM type of `n` values."""
    return ir.VectorType(kind, n)


@functools.cache
def host() -> frozenset[str]:
    """Features Numba compiles for, as LLVM names them, and the architecture.

    As for all of Numba, the variables NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override the host's.
    """
    if config.CPU_FEATURES is not None:
        listed = config.CPU_FEATURES
    elif config.CPU_NAME in (None, llvmlite.binding.get_host_cpu_name()):
        listed = get_host_cpu_features()
    else:
        listed = ""
    found = {feature[1:] for feature in listed.split(",") if feature.startswith("+")}
    found.add(llvmlite.binding.get_default_triple().partition("-")[0])
    return frozenset(found)


@functools.cache
def integer_dot() -> str:
    """Which form of the integer dot product this host gets."""
    has = host()
    if {"avx512vnni", "avx512vl"} <= has or "avxvnni" in has:
        return "vnni"
    if "avx2" in has:
        return "avx2"
    if "dotprod" in has and has & {"aarch64", "arm64"}:
        return "dotprod"
    return "plain"


class Emit:
    """Short names over an IRBuilder. Addresses are i64 values."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    # ---- values and memory

    def i64(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def constant(self, kind: Any, n: int, value: Any) -> Any:
        """`value`, or one value per lane, in `n` lanes."""
        lanes = list(value) if isinstance(value, Sequence) else [value] * n
        return ir.Constant(vector(kind, n), lanes)

    def at(self, base: Any, offset: Any) -> Any:
        """base + offset."""
        return self.b.add(base, self.i64(offset) if isinstance(offset, int) else offset)

    def load(self, base: Any, offset: Any, kind: Any) -> Any:
        """Unaligned load."""
        value = self.b.load(self.b.inttoptr(self.at(base, offset), kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value: Any, base: Any, offset: Any = 0) -> None:
        """Unaligned store."""
        self.b.store(value, self.b.inttoptr(self.at(base, offset), value.type.as_pointer())).align = 1

    def call(self, name: str, result: Any, *args: Any) -> Any:
        """An LLVM intrinsic."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    # ---- lanes

    def shuffle(self, first: Any, lanes: Sequence[int], second: Any = None) -> Any:
        other = first if second is None else second
        return self.b.shuffle_vector(first, other, ir.Constant(vector(I32, len(lanes)), list(lanes)))

    def splat(self, scalar: Any, n: int) -> Any:
        one = self.b.insert_element(ir.Constant(vector(scalar.type, n), ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.shuffle(one, [0] * n)

    def lane(self, v: Any, index: int) -> Any:
        return self.b.extract_element(v, ir.Constant(I32, index))

    def total(self, v: Any) -> Any:
        """Sum of all lanes, by halves."""
        n = v.type.count
        while n > 1:
            n //= 2
            v = self.b.fadd(self.shuffle(v, range(n)), self.shuffle(v, range(n, 2 * n)))
        return self.lane(v, 0)

    def highest(self, v: Any) -> Any:
        """Largest lane, by halves."""
        n = v.type.count
        while n > 1:
            n //= 2
            v = self.larger(self.shuffle(v, range(n)), self.shuffle(v, range(n, 2 * n)))
        return self.lane(v, 0)

    # ---- arithmetic

    def _float_name(self, kind: Any) -> str:
        return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"

    def muladd(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, fused where the host can."""
        return self.call(f"llvm.fmuladd.{self._float_name(a.type)}", a.type, a, b, c)

    def larger(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

    def magnitude(self, a: Any) -> Any:
        return self.call(f"llvm.fabs.{self._float_name(a.type)}", a.type, a)

    def half(self, bits: Any) -> Any:
        """float32 of a vector or scalar of binary16 bits."""
        if host() & {"f16c", "avx512f", "aarch64", "arm64"}:
            kind = vector(F16, bits.type.count) if isinstance(bits.type, ir.VectorType) else F16
            wide = vector(F32, bits.type.count) if isinstance(bits.type, ir.VectorType) else F32
            return self.b.fpext(self.b.bitcast(bits, kind), wide)
        return self._half_by_bits(bits)

    def _half_by_bits(self, bits: Any) -> Any:
        """Shift exponent and mantissa into place and scale by 2**112, which also makes denormals right."""
        n = bits.type.count if isinstance(bits.type, ir.VectorType) else 0
        integers, floats = (vector(I32, n), vector(F32, n)) if n else (I32, F32)

        def constant(kind: Any, value: Any) -> Any:
            return ir.Constant(kind, [value] * n if n else value)

        b, wide = self.b, self.b.zext(bits, integers)
        body = b.shl(b.and_(wide, constant(integers, 0x7FFF)), constant(integers, 13))
        scaled = b.bitcast(b.fmul(b.bitcast(body, floats), constant(floats, 2.0**112)), integers)
        special = b.icmp_unsigned(">=", body, constant(integers, 0x0F800000))
        scaled = b.select(special, b.or_(body, constant(integers, 0x7F800000)), scaled)
        sign = b.shl(b.and_(wide, constant(integers, 0x8000)), constant(integers, 16))
        return b.bitcast(b.or_(scaled, sign), floats)

    def add_dot_bytes(self, total: Any, weights: Any, x: Any) -> Any:
        """total + sums over four neighbours of u8[32] weights times i8[32]: i32[8], for VNNI alone."""
        kind = vector(I32, 8)
        args = (weights, x) if _vnni_takes_bytes() else (self.b.bitcast(weights, kind), self.b.bitcast(x, kind))
        return self.call("llvm.x86.avx512.vpdpbusd.256", kind, total, *args)

    def dot_bytes(self, weights: Any, x: Any) -> Any:
        """i32[8]: sums over four neighbours of u7[32] weights (0 to 127) times i8[32]."""
        b, form = self.b, integer_dot()
        zero = ir.Constant(vector(I32, 8), [0] * 8)
        if form == "vnni":
            return self.add_dot_bytes(zero, weights, x)
        if form == "avx2":
            pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), weights, x)
            return self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), pairs, self.constant(I16, 16, 1))
        if form == "dotprod":
            parts = [
                self.call(
                    "llvm.aarch64.neon.sdot.v4i32.v16i8",
                    vector(I32, 4),
                    ir.Constant(vector(I32, 4), [0] * 4),
                    self.shuffle(weights, range(start, start + 16)),
                    self.shuffle(x, range(start, start + 16)),
                )
                for start in (0, 16)
            ]
            return self.shuffle(parts[0], range(8), parts[1])
        total = zero
        for phase in range(4):
            lanes = range(phase, 32, 4)
            a = b.sext(self.shuffle(weights, lanes), vector(I32, 8))
            total = b.add(total, b.mul(a, b.sext(self.shuffle(x, lanes), vector(I32, 8))))
        return total

    def dot_signed(self, weights: Any, x: Any) -> Any:
        """As `dot_bytes` for i8[32] weights: their signs are moved to x where instructions want unsigned ones."""
        if integer_dot() in ("vnni", "avx2"):
            b, zero = self.b, self.constant(I8, 32, 0)
            negative = b.icmp_signed("<", weights, zero)
            size = b.select(negative, b.sub(zero, weights), weights)
            return self.dot_bytes(size, b.select(negative, b.sub(zero, x), x))
        return self.dot_bytes(weights, x)

    def exp(self, x: Any) -> Any:
        """e**x of float32 lanes to about 1e-7 relative; 0 below -87, capped above 88."""
        b, n = self.b, x.type.count
        integers = vector(I32, n)

        def c(value: float) -> Any:
            return self.constant(F32, n, value)

        tiny = b.fcmp_ordered("<", x, c(-87.0))
        bounded = self.larger(self.smaller(x, c(88.0)), c(-87.0))
        magic = c(12582912.0)  # rounds to the nearest integer and leaves it in the low bits
        shifted = self.muladd(bounded, c(1.4426950408889634), magic)
        k = b.fsub(shifted, magic)
        rest = self.muladd(k, c(-0.693145751953125), bounded)  # ln 2 in two parts
        rest = self.muladd(k, c(-1.428606765330187e-06), rest)
        poly = c(1 / 5040)
        for term in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            poly = self.muladd(poly, rest, c(term))
        exponent = b.shl(b.bitcast(shifted, integers), self.constant(I32, n, 23))
        result = b.bitcast(b.add(b.bitcast(poly, integers), exponent), vector(F32, n))
        return b.select(tiny, c(0.0), result)

    def exp_or_nan(self, x: Any) -> Any:
        """As `exp`, but NaN stays NaN."""
        return self.b.select(self.b.fcmp_unordered("uno", x, x), x, self.exp(x))


@functools.cache
def _vnni_takes_bytes() -> bool:
    """LLVM changed the operand types of the VNNI intrinsics from i32 to i8 lanes in version 22."""
    return bool(llvmlite.binding.llvm_version_info[0] >= 22)

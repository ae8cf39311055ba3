"""Products of a range of rows with all columns of a batch: one kernel per tensor type, compiled when it is needed.

Every kernel has the signature (weights, bytes per row, rows, x, x stride, columns, blocks, y, y stride), addresses and
strides in bytes: y[column, row] = dot(weights[row], x[column]). `blocks` is the number of blocks, or of values for
float types, in a row.
"""

from __future__ import annotations

from collections.abc import Callable

from edgellama.engine.jit.kernels import types as packed
from edgellama.engine.jit.kernels.dots import float_dot, packed_dot
from edgellama.gguf_io import GGMLType

_f32_1, _f32_4 = float_dot("f32", 1), float_dot("f32", 4)
_f16_1, _f16_4 = float_dot("f16", 1), float_dot("f16", 4)
_bf16_1, _bf16_4 = float_dot("bf16", 1), float_dot("bf16", 4)
_q4_0_1, _q4_0_4 = packed_dot(packed.Q4_0, 1), packed_dot(packed.Q4_0, 4)
_q4_1_1, _q4_1_4 = packed_dot(packed.Q4_1, 1), packed_dot(packed.Q4_1, 4)
_q5_0_1, _q5_0_4 = packed_dot(packed.Q5_0, 1), packed_dot(packed.Q5_0, 4)
_q5_1_1, _q5_1_4 = packed_dot(packed.Q5_1, 1), packed_dot(packed.Q5_1, 4)
_q8_0_1, _q8_0_4 = packed_dot(packed.Q8_0, 1), packed_dot(packed.Q8_0, 4)
_q4_k_1, _q4_k_4 = packed_dot(packed.Q4_K, 1), packed_dot(packed.Q4_K, 4)
_q5_k_1, _q5_k_4 = packed_dot(packed.Q5_K, 1), packed_dot(packed.Q5_K, 4)
_q6_k_1, _q6_k_4 = packed_dot(packed.Q6_K, 1), packed_dot(packed.Q6_K, 4)


def _f32(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _f32_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _f32_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _f16(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _f16_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _f16_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _bf16(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _bf16_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _bf16_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _q4_0(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _q4_0_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _q4_0_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _q4_1(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _q4_1_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _q4_1_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _q5_0(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _q5_0_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _q5_0_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _q5_1(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _q5_1_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _q5_1_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _q8_0(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _q8_0_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _q8_0_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _q4_k(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _q4_k_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _q4_k_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _q5_k(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _q5_k_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _q5_k_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


def _q6_k(w: int, size: int, rows: int, x: int, step: int, columns: int, blocks: int, y: int, out: int) -> None:
    fours = columns // 4 * 4
    for c in range(0, fours, 4):
        for r in range(rows):
            _q6_k_4(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)
    for c in range(fours, columns):
        for r in range(rows):
            _q6_k_1(w + r * size, x + c * step, step, blocks, y + c * out + 4 * r, out)


KERNELS: dict[GGMLType, Callable[..., None]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
"""The fast types. Others are dequantized when they are loaded."""

FLOATS = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})
"""Types whose kernel takes float32 activations, not quantized ones."""

"""The compiled kernels against definitions in NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgellama.codecs.base import codec
from edgellama.codecs.compiling import kernel
from edgellama.engine.jit.kernels import compiled
from edgellama.engine.jit.kernels.dots import activation_bytes
from edgellama.engine.jit.kernels.memory import call9
from edgellama.engine.jit.kernels.rows import FLOATS, KERNELS
from edgellama.engine.jit.kernels.vectors import exp_block, gelu_gate, quantize_row, silu_gate
from edgellama.gguf_io import GGMLType

Floats = NDArray[np.float32]


@kernel
def _call(function, w, size, rows, x, step, columns, blocks, y, out):  # type: ignore[no-untyped-def]
    call9(function, w, size, rows, x, step, columns, blocks, y, out)


@kernel
def _quantize(x, out, groups):  # type: ignore[no-untyped-def]
    quantize_row(x, out, groups)


@kernel
def _silu(x, up, out, n):  # type: ignore[no-untyped-def]
    silu_gate(x, up, out, n)


@kernel
def _gelu(x, up, out, n):  # type: ignore[no-untyped-def]
    gelu_gate(x, up, out, n)


@kernel
def _exp(x, eights, highest):  # type: ignore[no-untyped-def]
    return exp_block(x, eights, highest)


def quantized(x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """(the kernel's rows, the values they stand for)."""
    columns, k = x.shape
    rows = np.zeros((columns, activation_bytes(k)), np.uint8)
    for column in range(columns):
        _quantize(x[column].ctypes.data, rows[column].ctypes.data, k // 32)
    quants = rows[:, :k].view(np.int8).astype(np.float64)
    scales = rows[:, k : k + k // 8].copy().view(np.float32).astype(np.float64)
    return rows, quants * np.repeat(scales, 32, 1)


def test_activations_are_rounded_to_bytes_by_groups_of_32() -> None:
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    x[1, :32] = 0
    rows, values = quantized(x)
    step = np.abs(x).reshape(3, 8, 32).max(2).repeat(32, 1) / 127
    assert (np.abs(values - x) <= 0.501 * step).all()
    sums32 = rows[:, 256 + 32 : 256 + 64].copy().view(np.float32)
    sums16 = rows[:, 256 + 64 :].copy().view(np.float32)
    np.testing.assert_allclose(sums32, values.reshape(3, 8, 32).sum(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums16, values.reshape(3, 16, 16).sum(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_spoils_its_group(poison: float) -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 40] = poison
    _, values = quantized(x)
    assert np.isfinite(values[0, :32]).all()
    assert np.isnan(values[0, 32:]).all()


@pytest.mark.parametrize("columns", [1, 3, 4, 9])
@pytest.mark.parametrize("kind", list(KERNELS), ids=lambda kind: kind.name)
def test_products_of_packed_rows(kind: GGMLType, columns: int) -> None:
    draw = np.random.default_rng(int(kind) * 10 + columns)
    rows, k = 7, 768
    dense = draw.standard_normal((rows, k)).astype(np.float32) * 10.0 ** draw.integers(-3, 3, (rows, 1))
    weights = np.ascontiguousarray(codec(GGMLQuantizationType(int(kind))).quantize(dense.astype(np.float32)))
    values = dequantize(weights, GGMLQuantizationType(int(kind))).astype(np.float64).reshape(rows, k)
    x = (draw.standard_normal((columns, k)) * 3).astype(np.float32)
    operand, seen = (x, x.astype(np.float64)) if kind in FLOATS else quantized(x)
    y = np.full((columns, rows + 1), np.nan, np.float32)
    blocks = k if kind in FLOATS else k // codec(GGMLQuantizationType(int(kind))).block
    _call(
        compiled.rows(KERNELS[kind]),
        weights.ctypes.data,
        weights.shape[1],
        rows,
        operand.ctypes.data,
        operand.strides[0],
        columns,
        blocks,
        y.ctypes.data,
        y.strides[0],
    )
    expected = seen @ values.T
    size = np.abs(seen) @ np.abs(values).T  # rounding grows with the sum of magnitudes
    assert (np.abs(y[:, :rows] - expected) <= 3e-6 * size).all()
    assert np.isnan(y[:, rows]).all()  # nothing is written behind the rows


def test_the_smallest_and_largest_quants_of_each_type_count_fully() -> None:
    """All bytes set, all clear: every unpacked bit takes part, and nothing saturates."""
    for kind, fill in itertools.product(set(KERNELS) - FLOATS, (0x00, 0xFF)):
        info = codec(GGMLQuantizationType(int(kind)))
        weights = np.full((1, info.row_bytes(256)), fill, np.uint8)
        for block in range(256 // info.block):
            base = block * info.block_bytes
            symmetric = kind in (GGMLType.Q4_0, GGMLType.Q5_0, GGMLType.Q8_0)
            places = [208] if kind is GGMLType.Q6_K else [0] if symmetric else [0, 2]
            for place in places:
                weights[0, base + place : base + place + 2] = np.array([0.5], np.float16).view(np.uint8)
        values = dequantize(weights, GGMLQuantizationType(int(kind))).astype(np.float64).reshape(1, 256)
        x = np.where(np.arange(256) % 3, 1, -1).astype(np.float32)[None]
        rows, seen = quantized(x)
        y = np.zeros((1, 1), np.float32)
        _call(
            compiled.rows(KERNELS[kind]), weights.ctypes.data, weights.shape[1], 1, rows.ctypes.data, rows.shape[1], 1,
            256 // info.block, y.ctypes.data, 4,
        )  # fmt: skip
        expected = float((seen @ values.T)[0, 0])
        assert abs(y[0, 0] - expected) <= 1e-5 * (np.abs(seen) @ np.abs(values).T)[0, 0], kind.name


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates(activation: str) -> None:
    x = np.concatenate([np.linspace(-30, 30, 4000), [-1e30, -200, 200, 1e30, 0, -0.0, 1e-30, np.nan]]).astype(
        np.float32
    )
    up, out = np.full_like(x, 1.5), np.zeros_like(x)
    (_silu if activation == "silu" else _gelu)(x.ctypes.data, up.ctypes.data, out.ctypes.data, len(x))
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "silu":
            expected = wide / (1 + np.exp(-wide)) * 1.5
        else:
            expected = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) * 1.5
    assert np.isnan(out[-1])
    np.testing.assert_allclose(out[:-1], expected[:-1], rtol=3e-6, atol=1e-6)


def test_softmax_block() -> None:
    x = np.array([0, -1, -10, -50, -86, -88, -1000, -np.inf] + [-0.001 * i for i in range(8)], np.float32)
    y = x.copy()
    total = _exp(y.ctypes.data, 2, np.float32(0))
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=3e-7, atol=1e-38)
    assert abs(total - np.exp(x.astype(np.float64)).sum()) < 1e-5

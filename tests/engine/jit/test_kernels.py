"""The compiled kernels against definitions in NumPy."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgellama.engine.jit.kernels import compiled, gemm
from edgellama.engine.jit.kernels.dots import activation_bytes
from edgellama.engine.jit.kernels.memory import call9
from edgellama.engine.jit.kernels.rows import FLOATS, KERNELS
from edgellama.engine.jit.kernels.vectors import exp_block, gelu_gate, quantize_row, silu_gate
from edgellama.gguf_io import GGMLType
from edgellama.gguf_io.types import BLOCKS

Floats = NDArray[np.float32]


@nb.njit
def _call(function, w, size, rows, x, step, columns, blocks, y, out):  # type: ignore[no-untyped-def]
    call9(function, w, size, rows, x, step, columns, blocks, y, out)


@nb.njit
def _quantize(x, out, groups):  # type: ignore[no-untyped-def]
    quantize_row(x, out, groups)


@nb.njit
def _silu(x, up, out, n):  # type: ignore[no-untyped-def]
    silu_gate(x, up, out, n)


@nb.njit
def _gelu(x, up, out, n):  # type: ignore[no-untyped-def]
    gelu_gate(x, up, out, n)


@nb.njit
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


def halves(kind: GGMLType) -> list[int]:
    """Where in a block its float16 numbers lie."""
    if kind is GGMLType.Q6_K:
        return [208]
    return [0] if kind in (GGMLType.Q4_0, GGMLType.Q5_0, GGMLType.Q8_0) else [0, 2]


def with_halves(kind: GGMLType, data: NDArray[np.uint8], values: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Blocks of bytes whose float16 numbers are `values`, float16[rows, blocks, numbers]."""
    blocks = data.reshape(len(data), -1, BLOCKS[kind][1])
    for index, place in enumerate(halves(kind)):
        blocks[:, :, place : place + 2] = np.ascontiguousarray(values[:, :, index, None]).view(np.uint8)
    return data


def random_rows(kind: GGMLType, rows: int, k: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of any bits, with sensible scales."""
    if kind in FLOATS:
        dense = (draw.standard_normal((rows, k)) * 10.0 ** draw.integers(-3, 3, (rows, 1))).astype(np.float32)
        if kind is GGMLType.F16:
            return np.ascontiguousarray(dense.astype(np.float16)).view(np.uint8)
        data = dense.view(np.uint8).reshape(rows, k, 4)
        return np.ascontiguousarray(data[:, :, 2:] if kind is GGMLType.BF16 else data).reshape(rows, -1)
    block, size = BLOCKS[kind]
    data = draw.integers(0, 256, (rows, k // block * size), dtype=np.uint8)
    return with_halves(kind, data, draw.standard_normal((rows, k // block, 2)).astype(np.float16))


def product(kind: GGMLType, weights: NDArray[np.uint8], operand: NDArray[Any], k: int, many: bool) -> Floats:
    """The kernels' product, float32[columns, rows + 1]; the last row is not theirs to write."""
    columns, rows = len(operand), len(weights)
    y = np.full((columns, rows + 1), np.nan, np.float32)
    blocks = k // BLOCKS[kind][0]
    if not many:
        _call(
            compiled.rows(KERNELS[kind]), weights.ctypes.data, weights.shape[1], rows, operand.ctypes.data,
            operand.strides[0], columns, blocks, y.ctypes.data, y.strides[0],
        )  # fmt: skip
        return y
    tiles = gemm.tiles(kind)
    assert tiles is not None
    row, spare = gemm.unpacked_bytes(kind, k), np.zeros(64, np.float32)
    unpacked = np.zeros((rows, row), np.uint8)
    _call(
        compiled.rows(gemm.unpack_rows), gemm.UNPACK[kind], weights.ctypes.data, weights.shape[1], rows, blocks,
        unpacked.ctypes.data, row, 0, 0,
    )  # fmt: skip
    words = np.ascontiguousarray(operand).view(np.int32).reshape(columns, -1)
    panels = np.zeros((-(-columns // 16), words.shape[1], 16), np.int32)
    for column in range(columns):
        panels[column // 16, :, column % 16] = words[column]
    assert panels[0].nbytes == gemm.panel_bytes(k, kind in FLOATS)
    _call(
        compiled.rows(tiles), unpacked.ctypes.data, row, rows // 4, panels.ctypes.data, columns, k, y.ctypes.data,
        y.strides[0], spare.ctypes.data,
    )  # fmt: skip
    return y


@pytest.mark.parametrize("columns", [1, 3, 4, 9, -8, -16, -37])
@pytest.mark.parametrize("kind", list(KERNELS), ids=lambda kind: kind.name)
def test_products_of_packed_rows(kind: GGMLType, columns: int) -> None:
    """Negative numbers of columns take the way for many."""
    if columns < 0 and gemm.tiles(kind) is None:
        pytest.skip("this processor takes the other way")
    draw = np.random.default_rng(int(kind) * 10 + abs(columns))
    rows, k = (12 if columns < 0 else 7), 768
    weights = random_rows(kind, rows, k, draw)
    values = dequantize(weights, GGMLQuantizationType(int(kind))).astype(np.float64).reshape(rows, k)
    x = (draw.standard_normal((abs(columns), k)) * 3).astype(np.float32)
    operand, seen = (x, x.astype(np.float64)) if kind in FLOATS else quantized(x)
    y = product(kind, weights, operand, k, columns < 0)
    expected = seen @ values.T
    size = np.abs(seen) @ np.abs(values).T  # rounding grows with the sum of magnitudes
    assert (np.abs(y[:, :rows] - expected) <= 3e-6 * size).all()
    assert np.isnan(y[:, rows]).all()


@pytest.mark.parametrize("fill", [0x00, 0xFF])
@pytest.mark.parametrize("kind", list(set(KERNELS) - FLOATS), ids=lambda kind: kind.name)
def test_the_smallest_and_largest_quants_count_fully(kind: GGMLType, fill: int) -> None:
    """All bytes set, all clear: every unpacked bit takes part, and nothing saturates."""
    block, size = BLOCKS[kind]
    weights = np.full((4, 256 // block * size), fill, np.uint8)
    with_halves(kind, weights, np.full((4, 256 // block, 2), 0.5, np.float16))
    values = dequantize(weights, GGMLQuantizationType(int(kind))).astype(np.float64).reshape(4, 256)
    x = np.where(np.arange(256) % 3, 1, -1).astype(np.float32)[None].repeat(8, 0)
    rows, seen = quantized(x)
    expected, scale = seen @ values.T, np.abs(seen) @ np.abs(values).T
    for many in (False, True):
        if not many or gemm.tiles(kind) is not None:
            y = product(kind, weights, rows, 256, many)[:, :4]
            assert (np.abs(y - expected) <= 1e-5 * (scale + 1)).all()


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

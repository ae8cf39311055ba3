"""Scalar roundings against NumPy's float16 and C's own functions."""

from __future__ import annotations

import numba as nb
import numpy as np

from edgellama.codecs import rounding


@nb.vectorize(["uint16(float32)"])
def _halves(value: float) -> int:
    return rounding.to_half(value)  # type: ignore[no-any-return]


@nb.vectorize(["float32(uint16)"])
def _floats(bits: int) -> float:
    return rounding.from_half(bits)  # type: ignore[no-any-return]


@nb.vectorize(["int32(float32)"])
def _nearest(value: float) -> int:
    return rounding.nearest_int(value)  # type: ignore[no-any-return]


@nb.vectorize(["int32(float32)"])
def _away(value: float) -> int:
    return rounding.round_half_away(value)  # type: ignore[no-any-return]


def test_every_half_survives_the_way_to_float32() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(_floats(bits), bits.view(np.float16).astype(np.float32), equal_nan=True)


def test_to_half_rounds_as_ieee_does() -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 1_000_000, dtype=np.uint64).astype(np.uint32)
    between = (
        np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)[:, None]
        + np.array([0, 1, 0xFFF, 0x1000, 0x1001], np.uint32)
    ).ravel()
    values = np.concatenate([bits, between]).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        assert np.array_equal(_halves(values), values.astype(np.float16).view(np.uint16))


def test_nearest_int_is_round_half_to_even_in_its_range() -> None:
    values = np.concatenate(
        [np.arange(-4000, 4000) / 2, np.random.default_rng(1).uniform(-4194303, 4194303, 100_000)]
    ).astype(np.float32)
    assert np.array_equal(_nearest(values), np.rint(values).astype(np.int32))


def test_round_half_away_is_roundf() -> None:
    values = np.concatenate(
        [np.arange(-300, 300) / 2, [0.49999997, -0.49999997], np.random.default_rng(2).uniform(-200, 200, 100_000)]
    ).astype(np.float32)
    exact = values.astype(np.float64)
    assert np.array_equal(_away(values), (np.sign(exact) * np.floor(np.abs(exact) + 0.5)).astype(np.int32))

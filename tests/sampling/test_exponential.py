"""The portable exp against extended precision."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgellama.sampling.exponential import exp


def _error_in_last_places(x: np.ndarray) -> np.ndarray:
    true = np.exp(x.astype(np.longdouble))
    unit = np.spacing(np.maximum(true.astype(np.float32), np.float32(1e-45))).astype(np.longdouble)
    return np.abs(exp(x) - true) / unit


def test_within_half_a_unit_in_the_last_place() -> None:
    x = np.concatenate([-np.linspace(0, 104, 300_001), -np.logspace(-12, 0, 20_000)]).astype(np.float32)
    assert _error_in_last_places(x).max() < 0.501


@given(st.lists(st.floats(-(2.0**126), 0, width=32), min_size=1, max_size=50))
def test_any_value(values: list[float]) -> None:
    assert (_error_in_last_places(np.array(values, np.float32)) < 0.501).all()


def test_ends_and_blocks() -> None:
    assert exp(np.array([0, -np.inf, -1e38, -104], np.float32)).tolist() == [1, 0, 0, 0]
    assert exp(np.zeros(0, np.float32)).shape == (0,)
    x = -np.arange(20_000, dtype=np.float32) / 200
    assert np.array_equal(exp(x), np.concatenate([exp(part) for part in np.array_split(x, 7)]))

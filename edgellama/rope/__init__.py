"""Rotary position embeddings: every frequency rule once, read from GGUF keys or a Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import UsageError
from edgellama.rope import rules

Layout = Literal["interleaved", "half"]
"""Which values of a head make a pair: 2 i and 2 i + 1 (ggml's `norm`), or i and i + dimensions / 2 (`neox`)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of one kind of layer."""

    rule: str
    """Name of the rule, for reports: `default`, `linear`, `ntk`, `dynamic`, `yarn`, `longrope`, `llama3`, …"""
    frequencies: NDArray[np.float64]
    """Radians per position, float64[dimensions / 2]."""
    attention_factor: float = 1.0
    """Multiplies sine and cosine."""
    layout: Layout = "half"
    sections: tuple[int, ...] = ()
    """mRoPE: how many pairs follow each position coordinate (time, height, width, extra); empty for one coordinate."""
    sections_interleaved: bool = False
    """mRoPE pairs take turns (Qwen3-VL) instead of lying in blocks (Qwen2-VL)."""

    @property
    def dimensions(self) -> int:
        """Values of a head that are rotated, the first ones; the rest stays."""
        return 2 * len(self.frequencies)

    def angles(self, positions: NDArray[np.integer]) -> NDArray[np.float64]:
        """Angles of `positions`, int[n] or, for mRoPE, int[coordinates, n]: float64[n, dimensions / 2]."""
        if positions.ndim == 1:
            return np.multiply.outer(positions.astype(np.float64), self.frequencies)
        if not self.sections:
            raise UsageError("positions with several coordinates need mRoPE sections")
        chosen = positions.astype(np.float64)[coordinates(self)]
        return np.ascontiguousarray((chosen * self.frequencies[:, None]).T)

    def cos_sin(self, positions: NDArray[np.integer]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Cosine and sine of `angles`, times the attention factor, float64[n, dimensions / 2] each."""
        angles = self.angles(positions)
        return np.cos(angles) * self.attention_factor, np.sin(angles) * self.attention_factor


def coordinates(rope: Rope) -> NDArray[np.intp]:
    """Which position coordinate turns each pair, int[dimensions / 2], as ggml's mRoPE assigns them."""
    counts = [*rope.sections, 0, 0, 0, 0][:4]
    total = sum(counts)
    if total < 1:
        raise UsageError("mRoPE sections are all zero")
    pairs = np.arange(len(rope.frequencies)) % total
    if not rope.sections_interleaved:
        return np.searchsorted(np.cumsum(counts), pairs, side="right").clip(0, 3)
    turn = pairs % 3
    return np.where(pairs < 3 * np.asarray(counts)[turn], turn, 3)


def rotate(values: NDArray[np.float64], cos: NDArray[np.float64], sin: NDArray[np.float64], layout: Layout) -> None:
    """Turn the pairs of `values`, float64[n, heads, head size], in place by cos and sin, float64[n, dimensions / 2]."""
    half = cos.shape[1]
    if layout == "half":
        first, second = values[:, :, :half], values[:, :, half : 2 * half]
    else:
        first, second = values[:, :, 0 : 2 * half : 2], values[:, :, 1 : 2 * half : 2]
    c, s = cos[:, None, :], sin[:, None, :]
    turned = first * s + second * c
    first[:] = first * c - second * s
    second[:] = turned


__all__ = ["Layout", "Rope", "coordinates", "rotate", "rules"]

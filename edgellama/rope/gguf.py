"""RoPE as GGUF files describe it: `{arch}.rope.*` and the tensors `rope_freqs`, `rope_factors_long` and `_short`.

The meaning of the keys is that of llama.cpp's loader and context (`llama-model.cpp`, `llama-context.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import UnsupportedError
from edgellama.rope import Layout, Rope, rules

Get = Callable[[str, object], object]
"""`get("rope.freq_base", 10000.0)`: a key of the architecture, without its prefix."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Per-pair divisors that lie in a file as tensors, float32[dimensions / 2]; None where there is no such tensor."""

    freqs: NDArray[np.float32] | None = None
    """`rope_freqs.weight`."""
    short: NDArray[np.float32] | None = None
    long: NDArray[np.float32] | None = None

    def choose(self, context_tokens: int, original_tokens: int) -> tuple[str, NDArray[np.float32] | None]:
        """The set in force: LongRoPE switches by the context's size, not by the prompt's."""
        if self.freqs is not None:
            return "llama3", self.freqs
        if context_tokens > original_tokens:
            return "longrope", self.long
        return "longrope", self.short


def from_gguf(
    get: Get,
    dimensions: int,
    layout: Layout,
    context_tokens: int,
    *,
    factors: Factors | None = None,
    base: float | None = None,
    scaled: bool = True,
) -> Rope:
    """The rotation of a model's layers in a context of `context_tokens` per sequence.

    `base` overrides the file's (layers with a sliding window have their own), `scaled` False leaves out its scaling
    factor. Raises `UnsupportedError` for a scaling type that is not known.
    """
    kind = str(get("rope.scaling.type", "linear"))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedError(f"RoPE scaling of type {kind!r} is not known", "known are none, linear, yarn, longrope")
    base = _real(get, "rope.freq_base", 10000.0) if base is None else base
    trained = int(_real(get, "context_length", 0))
    original = int(_real(get, "rope.scaling.original_context_length", trained))
    factor = _real(get, "rope.scaling.factor", 0.0) or _real(get, "rope.scale_linear", 0.0) or 1.0
    if kind == "none" or not scaled:
        factor = 1.0
    if alpha := _real(get, "rope.scaling.alpha", 0.0):
        base = rules.ntk_base(dimensions, base, alpha)
    rule, attention = "default" if factor == 1.0 else "linear", _real(get, "rope.scaling.attn_factor", 1.0)
    extrapolation = _real(get, "rope.scaling.yarn_ext_factor", -1.0)
    if extrapolation < 0:
        extrapolation = 1.0 if kind == "yarn" else 0.0
    if extrapolation:
        rule = "yarn"
        multiplier = _real(get, "rope.scaling.yarn_log_multiplier", 0.0)
        attention *= rules.yarn_attention_factor(factor, 1.0 if multiplier else 0.0, multiplier)
        frequencies = rules.yarn(
            dimensions,
            base,
            factor,
            original,
            beta_fast=_real(get, "rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=_real(get, "rope.scaling.yarn_beta_slow", 1.0),
            extrapolation=extrapolation,
        )
    else:
        attention *= _real(get, "rope.scaling.yarn_attn_factor", 1.0)
        frequencies = rules.linear(dimensions, base, factor)
    if factors is not None:
        name, divisors = factors.choose(context_tokens, original)
        if divisors is not None:
            rule = name
            frequencies = frequencies * rules.scaled_by(dimensions, 1.0, divisors)
    return Rope(rule, frequencies, attention, layout, _sections(get))


def _real(get: Get, key: str, default: float) -> float:
    value = get(key, default)
    return float(value) if isinstance(value, (int, float)) else default


def _sections(get: Get) -> tuple[int, ...]:
    value = get("rope.dimension_sections", ())
    return tuple(int(n) for n in value) if isinstance(value, (tuple, list)) and any(value) else ()

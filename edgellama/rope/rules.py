"""Every rule that gives rotary position embeddings their frequencies, in float64.

A frequency is the angle, in radians per position, by which one pair of values of a head turns. Each rule returns them
as float64[dimensions / 2]; rules that also scale the length of queries and keys return that factor beside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import UsageError

Frequencies = NDArray[np.float64]


def default(dimensions: int, base: float) -> Frequencies:
    """base ** (-2 i / dimensions). Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.4.2."""
    _check(dimensions, base)
    return np.power(float(base), -np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)


def linear(dimensions: int, base: float, factor: float) -> Frequencies:
    """Position interpolation: every frequency divided by `factor`. Chen et al. 2023, arXiv 2306.15595.

    Transformers `rope_type: linear`; GGUF `rope.scaling.type: linear`.
    """
    return default(dimensions, base) / _factor(factor)


def ntk(dimensions: int, base: float, factor: float) -> Frequencies:
    """NTK-aware scaling: the base grows so that the slowest pair is interpolated by `factor` and the fastest not at
    all. bloc97 2023; equation in Peng et al., "YaRN", arXiv 2309.00071, section 3.1. GGUF `rope.scaling.alpha`."""
    return default(dimensions, ntk_base(dimensions, base, factor))


def ntk_base(dimensions: int, base: float, factor: float) -> float:
    """base * factor ** (d / (d - 2)), the base with which `ntk` equals the default rule."""
    _check(dimensions, base)
    if dimensions < 4:
        raise UsageError(f"NTK scaling needs at least 4 rotated dimensions, not {dimensions}")
    return float(base * _factor(factor) ** (dimensions / (dimensions - 2)))


def dynamic_ntk(
    dimensions: int, base: float, factor: float, sequence_tokens: int, trained_context_tokens: int
) -> Frequencies:
    """NTK-aware scaling that follows the length of the sequence; the default rule within the trained context.

    emozilla 2023, as Transformers `rope_type: dynamic`: the NTK factor is factor * length / trained - (factor - 1).
    """
    length = max(sequence_tokens, trained_context_tokens)
    stretch = _factor(factor) * length / trained_context_tokens - (factor - 1)
    return ntk(dimensions, base, stretch)


def yarn(
    dimensions: int,
    base: float,
    factor: float,
    trained_context_tokens: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    extrapolation: float = 1.0,
    truncate: bool = True,
) -> Frequencies:
    """NTK-by-parts: pairs turning more than `beta_fast` times within the trained context stay, those turning less
    than `beta_slow` times are interpolated, a ramp lies between. Peng et al. 2023, "YaRN", arXiv 2309.00071, 3.2.

    `truncate` rounds the ramp's ends outwards to whole pairs, `extrapolation` weakens it (GGUF `yarn_ext_factor`).
    """
    extrapolated = default(dimensions, base)
    if trained_context_tokens < 1:
        raise UsageError(f"YaRN needs the trained context, not {trained_context_tokens} tokens")

    def pair(rotations: float) -> float:
        if rotations <= 0 or base == 1:
            raise UsageError(f"YaRN with {rotations} rotations at base {base:g} has no ramp")
        return dimensions * math.log(trained_context_tokens / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    ramp = np.clip((np.arange(dimensions // 2, dtype=np.float64) - low) / max(high - low, 0.001), 0, 1)
    keep = (1 - ramp) * extrapolation
    return extrapolated / _factor(factor) * (1 - keep) + extrapolated * keep


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN multiplies sine and cosine with: 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22).

    DeepSeek-V2 gives `mscale` and `mscale_all_dim` instead: the quotient of the two scales.
    """

    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def scaled_by(dimensions: int, base: float, factors: Sequence[float] | NDArray[np.float32]) -> Frequencies:
    """Every frequency divided by its own factor: LongRoPE (Ding et al. 2024, arXiv 2402.13753) with the searched
    factors of a model, and the tensor `rope_freqs.weight` of GGUF files."""
    divisors = np.asarray(factors, np.float64)
    if divisors.shape != (dimensions // 2,):
        raise UsageError(f"{divisors.size} RoPE factors for {dimensions // 2} frequencies")
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise UsageError("a RoPE factor is not a positive number")
    return default(dimensions, base) / divisors


def longrope_attention_factor(factor: float, trained_context_tokens: int) -> float:
    """sqrt(1 + ln(factor) / ln(trained context)), `factor` being new context / trained. arXiv 2402.13753, as used by
    Phi-3 and Transformers `rope_type: longrope`."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(trained_context_tokens))


def llama3_factors(
    frequencies: Frequencies,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    trained_context_tokens: int,
) -> NDArray[np.float64]:
    """Divisors of Llama 3.1's rule: 1 for pairs that turn `high_freq_factor` times or more within the trained context,
    `factor` for those below `low_freq_factor` turns, a smooth change between.

    From Meta's llama-models (`apply_scaling`); Transformers `rope_type: llama3`. GGUF files carry the result as
    `rope_freqs.weight`.
    """
    if high_freq_factor == low_freq_factor:
        raise UsageError(f"llama3 RoPE with equal low and high frequency factors {low_freq_factor:g}")
    turns = trained_context_tokens * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / _factor(factor) + smooth)
    return divisors


def llama3(
    dimensions: int,
    base: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    trained_context_tokens: int,
) -> Frequencies:
    """The default rule divided by `llama3_factors`."""
    plain = default(dimensions, base)
    return plain / llama3_factors(plain, factor, low_freq_factor, high_freq_factor, trained_context_tokens)


def proportional(head_dimensions: int, base: float, share: float, factor: float = 1.0) -> Frequencies:
    """Only the fastest `share` of a head's pairs turns, with the frequencies of the whole head; the rest stands still.

    Gemma 4; Transformers `rope_type: proportional` (`partial_rotary_factor`). float64[head_dimensions / 2].
    """
    if not 0 <= share <= 1:
        raise UsageError(f"the rotated share of a head is {share}, allowed is 0 to 1")
    frequencies = default(head_dimensions, base) / _factor(factor)
    frequencies[int(share * head_dimensions // 2) :] = 0
    return frequencies


def _check(dimensions: int, base: float) -> None:
    if dimensions < 2 or dimensions % 2:
        raise UsageError(f"RoPE turns pairs: {dimensions} dimensions are not possible")
    if not (math.isfinite(base) and base > 0):
        raise UsageError(f"the RoPE base is {base}, it must be positive")


def _factor(factor: float) -> float:
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"the RoPE factor is {factor}, it must be positive")
    return float(factor)

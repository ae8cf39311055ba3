"""Sampling options: what a request may set, how layers of defaults are merged, and the built-in values."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from edgellama.errors import UsageError


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names and meanings are llama.cpp's long options. None means "not given here"."""

    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """0 switches it off."""
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    """Tokens the penalties look back on; 0 switches them off, -1 means the whole context."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    """None draws one at random; the answer reports it."""
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} is {value}, allowed is {low} to {high}")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repeat_penalty", 0.01, 100.0),
    ("repeat_last_n", -1, 2**31 - 1),
    ("frequency_penalty", -100.0, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("seed", 0, 2**64 - 1),
)

BUILT_IN = SamplingOptions(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    repeat_penalty=1.0,
    repeat_last_n=64,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    ignore_eos=False,
)
"""llama.cpp's own defaults."""


def merge(layers: Iterable[SamplingOptions]) -> SamplingOptions:
    """The first layer that gives a value wins: request, settings, catalogue, GGUF, built-in."""
    values: dict[str, object] = {}
    for layer in layers:
        for name in layer.__struct_fields__:
            value = getattr(layer, name)
            if value is not None:
                values.setdefault(name, value)
    return msgspec.convert(values, SamplingOptions)

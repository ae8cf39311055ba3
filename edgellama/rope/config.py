"""RoPE as a Hugging Face `config.json` describes it, in both spellings: `rope_scaling` with `type`, and
`rope_parameters` with `rope_type`, flat or one entry per layer type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellama.errors import InvalidFileError, UnsupportedError
from edgellama.rope import Rope, rules

_ADVICE = "compare config.json with the model's original one"
_RULE_NAMES = {"su": "longrope", "mrope": "default", "ntk": "ntk"}
"""Older names. `mrope` says only that there are sections."""


@dataclass(frozen=True, slots=True)
class _Parameters:
    """One flat set of parameters and the sizes around it."""

    values: Mapping[str, Any]
    head_dimensions: int
    base: float
    share: float
    """Part of each head that is rotated."""
    trained: int
    """`max_position_embeddings`."""
    original: int
    """The context before it was extended."""
    sequence: int
    """Tokens of the sequence, 0 if unknown."""

    @property
    def dimensions(self) -> int:
        size = int(self.head_dimensions * self.share)
        return size + size % 2

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise InvalidFileError(f"the RoPE parameters of this model lack {name!r}", _ADVICE)
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidFileError(f"the RoPE parameter {name!r} is {value!r}, not a number", _ADVICE)
        return float(value)


def from_config(
    config: Mapping[str, Any], *, layer_type: str | None = None, sequence_tokens: int = 0, head_dimensions: int = 0
) -> Rope:
    """The rotation of a model whose `config.json` holds `config`.

    `layer_type` chooses among parameters given per layer type (`full_attention`, `sliding_attention`).
    `sequence_tokens` matters to the rules that follow the length (dynamic NTK, LongRoPE); `head_dimensions` overrides
    the head size. Raises `InvalidFileError` for missing or senseless values, `UnsupportedError` for unknown rules.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and "hidden_size" not in config:
        config = text
    values = _flat(config, layer_type)
    head = head_dimensions or int(config.get("head_dim") or _head(config))
    trained = int(config.get("max_position_embeddings") or 0)
    original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    share = values.get("partial_rotary_factor")
    if share is None:
        share = config.get("partial_rotary_factor", config.get("rotary_pct"))
    base = values.get("rope_theta") or _base(config, layer_type)
    parameters = _Parameters(
        values, head, float(base), 1.0 if share is None else float(share), trained, int(original or trained),
        sequence_tokens,
    )  # fmt: skip
    name = str(values.get("rope_type") or values.get("type") or "default")
    rule = _RULES.get(_RULE_NAMES.get(name, name))
    if rule is None:
        raise UnsupportedError(f"the RoPE rule {name!r} is not known", "known are " + ", ".join(sorted(_RULES)))
    frequencies, attention = rule(parameters)
    sections = tuple(int(n) for n in values.get("mrope_section") or ())
    return Rope(
        _RULE_NAMES.get(name, name),
        frequencies,
        attention,
        "half",
        sections,
        bool(values.get("mrope_interleaved", False)),
    )


def _flat(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """The parameters for `layer_type`; both spellings, nested or not."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise InvalidFileError(f"the RoPE parameters of this model are {values!r}, not a table", _ADVICE)
    nested = {name: entry for name, entry in values.items() if isinstance(entry, Mapping)}
    if not nested:
        return values
    if layer_type is None:
        layer_type = "full_attention" if "full_attention" in nested else next(iter(nested))
    if layer_type not in nested:
        raise InvalidFileError(f"there are no RoPE parameters for layers of type {layer_type!r}", _ADVICE)
    return nested[layer_type]


def _base(config: Mapping[str, Any], layer_type: str | None) -> float:
    """`rope_theta`, or the local base that Gemma 3 and ModernBERT give for layers with a window."""
    names = ("rope_local_base_freq", "local_rope_theta", "rope_theta") if layer_type == "sliding_attention" else ()
    for name in (*names, "rope_theta", "global_rope_theta", "rotary_emb_base"):
        if config.get(name):
            return float(config[name])
    return 10000.0


def _head(config: Mapping[str, Any]) -> int:
    try:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise InvalidFileError("the model's configuration does not tell its head size", _ADVICE) from error


def _default(p: _Parameters) -> tuple[rules.Frequencies, float]:
    return rules.default(p.dimensions, p.base), 1.0


def _linear(p: _Parameters) -> tuple[rules.Frequencies, float]:
    return rules.linear(p.dimensions, p.base, p.number("factor")), 1.0


def _ntk(p: _Parameters) -> tuple[rules.Frequencies, float]:
    return rules.ntk(p.dimensions, p.base, p.number("factor")), 1.0


def _dynamic(p: _Parameters) -> tuple[rules.Frequencies, float]:
    if "alpha" in p.values and "factor" not in p.values:  # Hunyuan: a fixed NTK factor under this name
        return rules.ntk(p.dimensions, p.base, p.number("alpha")), 1.0
    return rules.dynamic_ntk(p.dimensions, p.base, p.number("factor"), p.sequence, p.trained), 1.0


def _yarn(p: _Parameters) -> tuple[rules.Frequencies, float]:
    factor = p.number("factor", p.trained / p.original if p.original else None)
    frequencies = rules.yarn(
        p.dimensions,
        p.base,
        factor,
        p.original,
        beta_fast=p.number("beta_fast", 32.0) or 32.0,
        beta_slow=p.number("beta_slow", 1.0) or 1.0,
        truncate=bool(p.values.get("truncate", True)),
    )
    given = p.number("attention_factor", -1.0)
    if given >= 0:
        return frequencies, given
    return frequencies, rules.yarn_attention_factor(factor, p.number("mscale", 0.0), p.number("mscale_all_dim", 0.0))


def _longrope(p: _Parameters) -> tuple[rules.Frequencies, float]:
    name = "long_factor" if p.sequence > p.original else "short_factor"
    factors = p.values.get(name)
    if not isinstance(factors, (list, tuple)):
        raise InvalidFileError(f"the RoPE parameters of this model lack {name!r}", _ADVICE)
    factor = p.number("factor", p.trained / p.original if p.original else None)
    given = p.number("attention_factor", -1.0)
    attention = given if given >= 0 else rules.longrope_attention_factor(factor, p.original)
    return rules.scaled_by(p.dimensions, p.base, np.asarray(factors, np.float64)), attention


def _llama3(p: _Parameters) -> tuple[rules.Frequencies, float]:
    low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
    return rules.llama3(p.dimensions, p.base, p.number("factor"), low, high, p.original), 1.0


def _proportional(p: _Parameters) -> tuple[rules.Frequencies, float]:
    return rules.proportional(p.head_dimensions, p.base, p.share, p.number("factor", 1.0)), 1.0


_RULES: dict[str, Callable[[_Parameters], tuple[rules.Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}

"""Rules between a known architecture's numbers: heads, rotary embedding, attention windows, experts.

Each of them stands for an assertion with which llama.cpp stops the process, when loading or at the first token.
"""

from __future__ import annotations

from edgellama.gguf_io.architectures import Architecture
from edgellama.gguf_io.hyperparameters import Hyperparameters

_UNIFORM = ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "expert_feed_forward_length")
_WINDOW_PERIODS = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma-embedding": 6,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "olmo2": 4,
}
"""Every how many layers one sees the whole context, unless `sliding_window_pattern` says otherwise."""
_WINDOW_OPTIONAL = ("gemma3", "olmo2")
_EXAONE_WINDOWED_LAYERS = 64
_GEMMA3N_CACHED_LAYERS = 20


def check(h: Hyperparameters, spec: Architecture) -> None:
    """Check the numbers of a model whose keys passed `hyperparameters.check_keys` and `check_rules`."""
    if h.heads < 1 or h.heads_kv < 1:
        name = "attention.head_count" if h.heads < 1 else "attention.head_count_kv"
        raise h.error(h.key(name), 0, "at least 1")
    for name in _UNIFORM:
        values = h.per_layer(name)
        if len(set(values)) > 1:
            raise h.error(h.key(name), f"{min(values)} to {max(values)}", "the same number for each layer")
    if spec.experts and not h.integer("expert_count"):
        raise h.error(h.key("expert_count"), 0, "at least 1")
    if h.architecture == "olmoe" and h.heads != h.heads_kv:
        raise h.error(h.key("attention.head_count_kv"), h.heads_kv, f"{h.heads}, as many as heads")
    if spec.rope == "mla":
        _check_mla(h)
    else:
        _check_heads(h, spec)
    _check_temperature(h)
    _check_windows(h)


def _check_heads(h: Hyperparameters, spec: Architecture) -> None:
    base = h.key_length
    if base != h.value_length:
        raise h.error(h.key("attention.value_length"), h.value_length, f"the key length {base}")
    for name in ("attention.key_length_swa", "attention.value_length_swa"):
        if h.integer(name, base) != base:
            raise h.error(h.key(name), h.integer(name), f"{base}, as in the other layers")
    if spec.square and h.heads * base != h.embedding:
        found = f"{h.heads} heads of {base}"
        raise h.error(h.key("attention.head_count"), found, f"heads that make up {h.embedding}, the embedding length")
    if spec.rope != "none":
        _check_rope(h, spec.rope)


def _check_rope(h: Hyperparameters, rope: str) -> None:
    for name in ("rope.dimension_count", "rope.dimension_count_swa"):
        rotated = h.integer(name, h.rope_dimensions)
        if rotated % 2 or not 0 < rotated <= h.key_length:
            raise h.error(h.key(name), rotated, f"an even number from 2 to {h.key_length}")
        if rope == "full" and rotated != h.key_length:
            raise h.error(h.key(name), rotated, f"{h.key_length}, the head size")
    for name in ("rope.freq_base", "rope.freq_base_swa"):
        if h.value(name) == 0:
            raise h.error(h.key(name), 0, "a number above 0")
    sections = h.value("rope.dimension_sections")
    if isinstance(sections, tuple):
        counts = [item for item in sections if isinstance(item, int) and item >= 0]
        if len(counts) != 4 or len(sections) != 4 or sum(counts) > h.rope_dimensions:
            expected = f"4 counts that add up to at most {h.rope_dimensions}"
            raise h.error(h.key("rope.dimension_sections"), sections, expected)
    elif isinstance(sections, int) and 4 * sections > h.rope_dimensions:
        raise h.error(h.key("rope.dimension_sections"), sections, f"at most {h.rope_dimensions // 4}")


def _check_mla(h: Hyperparameters) -> None:
    mla = (h.integer("attention.key_length_mla"), h.integer("attention.value_length_mla"))
    if bool(mla[0]) != bool(mla[1]):
        raise h.error(h.key("attention.value_length_mla"), mla[1], "both MLA lengths or none")
    rotated = h.rope_dimensions
    if rotated % 2 or not 0 < rotated < (mla[0] or h.key_length):
        raise h.error(h.key("rope.dimension_count"), rotated, f"an even number below {mla[0] or h.key_length}")
    if mla[0] and (h.key_length != h.integer("attention.kv_lora_rank") + rotated or h.heads_kv != 1):
        found = f"{h.heads_kv} KV heads of {h.key_length}"
        expected = f"1 KV head of {h.integer('attention.kv_lora_rank') + rotated}"
        raise h.error(h.key("attention.key_length"), found, expected)


def _check_temperature(h: Hyperparameters) -> None:
    name = "attention.temperature_length"
    if h.architecture == "deepseek2" and h.value("attention.temperature_scale") and not h.integer(name):
        raise h.error(h.key(name), 0, "at least 1, since there is a temperature scale")


def _windowed(h: Hyperparameters) -> list[bool] | None:
    """Which layers see a window only; None when the model has no windows."""
    period = _WINDOW_PERIODS.get(h.architecture)
    absent = h.architecture in _WINDOW_OPTIONAL and not h.integer("attention.sliding_window")
    if period is None or absent or (h.architecture == "exaone4" and h.trunk_layers != _EXAONE_WINDOWED_LAYERS):
        return None
    pattern = h.value("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return [bool(item) for item in pattern[: h.layers]]
    if isinstance(pattern, int):
        period = pattern
    return [period == 0 or layer % period < period - 1 for layer in range(h.trunk_layers)]


def _check_windows(h: Hyperparameters) -> None:
    windowed = _windowed(h)
    if windowed is None:
        return
    key = h.key("attention.sliding_window_pattern")
    if not any(windowed):
        raise h.error(key, "no layer with a window", "layers with a window")
    if h.architecture == "gemma-embedding" and all(windowed):
        raise h.error(key, "windows in all layers", "layers without a window")
    shared = _GEMMA3N_CACHED_LAYERS
    if h.architecture == "gemma3n" and len(windowed) > shared and windowed[shared - 2 : shared] != [True, False]:
        raise h.error(key, "another pattern", f"layer {shared - 2} with a window and layer {shared - 1} without")

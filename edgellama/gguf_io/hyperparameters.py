"""Metadata of a model: the type and range of every key an engine reads, and the rules between them.

llama.cpp stops the whole process on several of these (GGML_ASSERT), so they are checked before it sees the file.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from edgellama.errors import GGUFError
from edgellama.gguf_io.parse import RawFile
from edgellama.gguf_io.types import ArrayInfo, ValueType, type_label

MAX_LAYERS = 512
MAX_EXPERTS = 1024
_MAX_WIDTH = 2**24

_INT = (ValueType.UINT32,)
_INTS = (ValueType.UINT32, ValueType.INT32, ValueType.BOOL)
_FLOAT = (ValueType.FLOAT32,)


class _Rule(NamedTuple):
    types: tuple[ValueType, ...]
    low: float
    high: float
    per_layer: bool = False


_COUNT = _Rule(_INT, 0, _MAX_WIDTH)
_WIDTH = _Rule(_INT, 1, _MAX_WIDTH)
_LAYER_COUNT = _Rule(_INT, 0, _MAX_WIDTH, per_layer=True)
_EPSILON = _Rule(_FLOAT, 0.0, 1.0)
_FLAG = _Rule((ValueType.BOOL,), 0, 1)
_POSITIVE = _Rule(_FLOAT, 0.0, 1e30)
_REAL = _Rule(_FLOAT, -1e30, 1e30)

_PATTERN = "attention.sliding_window_pattern"

KEY_RULES: dict[str, _Rule] = {
    "context_length": _Rule(_INT, 1, 2**31 - 1),
    "embedding_length": _WIDTH,
    "embedding_length_out": _COUNT,
    "block_count": _Rule(_INT, 1, MAX_LAYERS),
    "vocab_size": _Rule(_INT, 0, 2**31 - 1),
    "feed_forward_length": _LAYER_COUNT,
    "nextn_predict_layers": _Rule(_INT, 0, MAX_LAYERS),
    "leading_dense_block_count": _Rule(_INT, 0, MAX_LAYERS),
    "expert_count": _Rule(_INT, 0, MAX_EXPERTS),
    "expert_used_count": _Rule(_INT, 0, MAX_EXPERTS, per_layer=True),
    "expert_shared_count": _Rule(_INT, 0, MAX_EXPERTS),
    "expert_group_count": _Rule(_INT, 0, MAX_EXPERTS),
    "expert_group_used_count": _Rule(_INT, 0, MAX_EXPERTS),
    "expert_feed_forward_length": _LAYER_COUNT,
    "expert_shared_feed_forward_length": _COUNT,
    "expert_weights_scale": _REAL,
    "expert_weights_norm": _FLAG,
    "expert_gating_func": _Rule(_INT, 0, 4),
    "attention.head_count": _LAYER_COUNT,
    "attention.head_count_kv": _LAYER_COUNT,
    "attention.key_length": _WIDTH,
    "attention.value_length": _WIDTH,
    "attention.key_length_swa": _WIDTH,
    "attention.value_length_swa": _WIDTH,
    "attention.key_length_mla": _WIDTH,
    "attention.value_length_mla": _WIDTH,
    "attention.q_lora_rank": _COUNT,
    "attention.kv_lora_rank": _COUNT,
    "attention.sliding_window": _Rule(_INT, 0, 2**31 - 1),
    _PATTERN: _LAYER_COUNT,
    "attention.layer_norm_epsilon": _EPSILON,
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.causal": _FLAG,
    "attention.max_alibi_bias": _REAL,
    "attention.clamp_kqv": _REAL,
    "attention.temperature_scale": _REAL,
    "attention.temperature_length": _Rule(_INT, 0, 2**31 - 1),
    "attention.scale": _REAL,
    "attn_logit_softcapping": _REAL,
    "final_logit_softcapping": _REAL,
    "logit_scale": _REAL,
    "residual_scale": _REAL,
    "embedding_scale": _REAL,
    "pooling_type": _Rule(_INT, 0, 4),
    "rope.dimension_count": _Rule(_INT, 0, _MAX_WIDTH),
    "rope.dimension_count_swa": _Rule(_INT, 0, _MAX_WIDTH),
    "rope.freq_base": _POSITIVE,
    "rope.freq_base_swa": _POSITIVE,
    "rope.scale_linear": _Rule(_FLOAT, 0.0, 1e6),
    "rope.scaling.factor": _Rule(_FLOAT, 0.0, 1e6),
    "rope.scaling.attn_factor": _REAL,
    "rope.scaling.original_context_length": _Rule(_INT, 1, 2**31 - 1),
    "rope.scaling.finetuned": _FLAG,
    "rope.scaling.yarn_log_multiplier": _REAL,
}
"""Rules by key without the architecture's prefix, after the types llama.cpp insists on."""

ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


class Hyperparameters:
    """Checked numbers of one model, with the defaults llama.cpp gives to missing keys."""

    def __init__(self, raw: RawFile, architecture: str) -> None:
        self._raw = raw
        self.architecture = architecture
        self.layers = self.integer("block_count")

    def error(self, key: str, found: object, expected: object, advice: str = "") -> GGUFError:
        """A `GGUFError` at the place of `key` (prefixed with the architecture if need be)."""
        offset = self._raw.offsets.get(key, 0)
        return GGUFError(self._raw.path, offset, key, str(found), str(expected), advice)

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return self.key(name) in self._raw.metadata

    def require(self, name: str) -> None:
        if not self.has(name):
            key = self.key(name)
            raise self.error(key, "no such key", f"the key that {self.architecture} models need", _CONVERT_AGAIN)

    def value(self, name: str) -> object:
        return self._raw.metadata.get(self.key(name))

    def integer(self, name: str, default: int = 0) -> int:
        """A scalar key, or the first layer's value of a per-layer key."""
        value = self.value(name)
        if isinstance(value, tuple):
            value = value[0] if value else default
        return value if isinstance(value, int) else default

    def per_layer(self, name: str, default: int = 0) -> tuple[int, ...]:
        """A per-layer key as one value per layer."""
        value = self.value(name)
        if isinstance(value, tuple):
            return value
        return (value if isinstance(value, int) else default,) * self.layers

    @property
    def embedding(self) -> int:
        return self.integer("embedding_length")

    @property
    def trunk_layers(self) -> int:
        """Layers without the ones that only predict further tokens (multi-token prediction)."""
        return self.layers - self.integer("nextn_predict_layers")

    @property
    def heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def heads_kv(self) -> int:
        return self.integer("attention.head_count_kv", self.heads)

    @property
    def key_length(self) -> int:
        return self.integer("attention.key_length", self.embedding // self.heads if self.heads else 0)

    @property
    def value_length(self) -> int:
        return self.integer("attention.value_length", self.embedding // self.heads if self.heads else 0)

    @property
    def rope_dimensions(self) -> int:
        return self.integer("rope.dimension_count", self.key_length)


_CONVERT_AGAIN = "convert the model again, or fetch another file of it"


def check_keys(raw: RawFile, architecture: str) -> None:
    """Type and range of each known key of `architecture` that is there."""
    prefix = architecture + "."
    for key, value in raw.metadata.items():
        if not key.startswith(prefix):
            continue
        rule = KEY_RULES.get(key[len(prefix) :])
        if rule is not None:
            _check_value(raw, key, value, rule)
        elif isinstance(value, float) and math.isnan(value):
            raise _error(raw, key, value, "a number")


def _check_value(raw: RawFile, key: str, value: object, rule: _Rule) -> None:
    kind, element = raw.value_types[key]
    if kind is ValueType.ARRAY:
        if not rule.per_layer or element not in _INTS or isinstance(value, ArrayInfo):
            raise _error(raw, key, type_label(kind, element), _expected_type(rule))
    elif kind not in rule.types:
        raise _error(raw, key, type_label(kind), _expected_type(rule))
    for item in value if isinstance(value, tuple) else (value,):
        number = item if isinstance(item, (int, float)) else math.nan
        if not rule.low <= number <= rule.high:
            raise _error(raw, key, item, f"{rule.low:,} to {rule.high:,}")


def _expected_type(rule: _Rule) -> str:
    label = " or ".join(kind.name.lower() for kind in rule.types)
    return f"{label}, or an array of one number per layer" if rule.per_layer else label


def _error(raw: RawFile, key: str, found: object, expected: str) -> GGUFError:
    return GGUFError(raw.path, raw.offsets[key], key, str(found), expected, _CONVERT_AGAIN)


def check_rules(h: Hyperparameters) -> None:
    """Rules between keys that hold for every architecture."""
    for name, rule in KEY_RULES.items():
        value = h.value(name) if rule.per_layer and name != _PATTERN else None
        if isinstance(value, tuple) and len(value) != h.layers:
            raise h.error(h.key(name), f"{len(value)} values", f"{h.layers}, one per layer")
    if h.integer("nextn_predict_layers") >= h.layers:
        raise h.error(h.key("nextn_predict_layers"), h.integer("nextn_predict_layers"), f"less than {h.layers} layers")
    scaling = h.value("rope.scaling.type")
    if scaling is not None and scaling not in ROPE_SCALINGS:
        raise h.error(h.key("rope.scaling.type"), repr(scaling), "one of " + ", ".join(ROPE_SCALINGS))
    _check_experts(h)
    _check_head_counts(h)


def _check_experts(h: Hyperparameters) -> None:
    experts = h.integer("expert_count")
    used = max(h.per_layer("expert_used_count"), default=0)
    groups = h.integer("expert_group_count")
    if used > experts or (experts and not used):
        raise h.error(h.key("expert_used_count"), used, f"1 to {experts} experts" if experts else "0 experts")
    if groups and groups >= experts:
        raise h.error(h.key("expert_group_count"), groups, f"less than {experts} experts")
    if groups > 1:
        if experts % groups:
            raise h.error(h.key("expert_group_count"), groups, f"a divisor of {experts} experts")
        group_used = h.integer("expert_group_used_count")
        if not 0 < group_used < groups:
            raise h.error(h.key("expert_group_used_count"), group_used, f"1 to {groups - 1} of {groups} groups")


def _check_head_counts(h: Hyperparameters) -> None:
    heads = h.per_layer("attention.head_count")
    for layer, (count, count_kv) in enumerate(zip(heads, h.per_layer("attention.head_count_kv", h.heads), strict=True)):
        if count and count_kv and count % count_kv:
            where = f" in layer {layer}" if len(set(heads)) > 1 else ""
            raise h.error(h.key("attention.head_count_kv"), f"{count_kv}{where}", f"a divisor of {count} heads")
        if count > h.embedding:
            raise h.error(h.key("attention.head_count"), count, f"at most {h.embedding}, the embedding length")

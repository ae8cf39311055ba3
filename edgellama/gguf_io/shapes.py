"""Tensors against the architecture: present, of the right shape, of a type an engine can compute with."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import NamedTuple

from edgellama.errors import GGUFError
from edgellama.gguf_io import consistency
from edgellama.gguf_io.architectures import ARCHITECTURES
from edgellama.gguf_io.hyperparameters import Hyperparameters
from edgellama.gguf_io.parse import RawFile
from edgellama.gguf_io.types import NO_WEIGHTS, GGMLType, TensorInfo

_BLOCK = re.compile(r"blk\.(\d+)\.")
_MATRIX_ROWS = ("ffn_gate_inp_shexp.weight",)
"""Tensors of one dimension that are multiplied as matrices."""
_ADDED = ("token_types.weight",)
"""Tensors of two dimensions that are added, not multiplied."""
_SEPARATE = ("attn_q", "attn_k", "attn_v")
_ADVICE = "convert the model again, or fetch another file of it"
_DEEPSEEK_LITE_LAYERS = (26, 27)


class Tensors:
    """All tensors of a model by name, with the file each one lies in."""

    def __init__(self, files: list[RawFile]) -> None:
        self.by_name: dict[str, tuple[TensorInfo, RawFile, int]] = {
            tensor.name: (tensor, raw, entry)
            for raw in files
            for tensor, entry in zip(raw.tensors, raw.tensor_offsets, strict=True)
        }
        self.first = files[0]

    def error(self, name: str, found: object, expected: object) -> GGUFError:
        """A `GGUFError` at the tensor's entry, or at the end of the table for one that is missing."""
        if name in self.by_name:
            _, raw, entry = self.by_name[name]
            return GGUFError(raw.path, entry, f"tensor {name!r}", str(found), str(expected), _ADVICE)
        offset = self.first.data_offset
        return GGUFError(self.first.path, offset, f"tensor {name!r}", str(found), str(expected), _ADVICE)


class Expected(NamedTuple):
    """A tensor an architecture has: `dims` is its shape in the table's words, `vector` asks for type F32."""

    name: str
    shape: tuple[int, ...]
    dims: str
    vector: bool
    optional: bool


class Counts(NamedTuple):
    """Sizes that come from outside the architecture's keys."""

    tokens: int
    token_types: int = 0
    labels: int = 1


def expected_tensors(h: Hyperparameters, counts: Counts, present: Container[str]) -> Iterator[Expected]:
    """Every tensor of a known architecture. `present` decides between fused and separate projections."""
    spec = ARCHITECTURES[h.architecture]
    sizes = _sizes(h, counts)
    for layer in range(-1, h.trunk_layers):
        prefix = "" if layer < 0 else f"blk.{layer}."
        for name, dims, optional in _entries(spec.whole if layer < 0 else spec.layer, sizes, h, layer, present):
            shape = tuple(sizes[dim] for dim in dims.split(","))
            vector = len(shape) == 1 or name.endswith(".bias") or "norm" in name or name in _ADDED
            yield Expected(prefix + name, shape, dims, vector and not name.endswith(_MATRIX_ROWS), optional)


def check_known(h: Hyperparameters, tensors: Tensors, counts: Counts) -> None:
    """Check a model of a known architecture tensor by tensor."""
    spec = ARCHITECTURES[h.architecture]
    for name in ("attention.head_count", *spec.keys):
        h.require(name)
    consistency.check(h, spec)
    for expected in expected_tensors(h, counts, tensors.by_name):
        _check_tensor(tensors, expected)


def check_unknown(h: Hyperparameters, tensors: Tensors, vocabulary: int) -> None:
    """The generic rule for architectures without a table."""
    for name, (tensor, _, _) in tensors.by_name.items():
        match = _BLOCK.match(name)
        if match and int(match[1]) >= h.layers:
            raise tensors.error(name, f"layer {match[1]}", f"less than {h.layers} layers")
        if name == "token_embd.weight" and vocabulary and tensor.shape[1:2] != (vocabulary,):
            raise tensors.error(name, f"shape {tensor.shape}", f"{vocabulary:,} rows, one per token")


def _sizes(h: Hyperparameters, counts: Counts) -> dict[str, int]:
    key, value, rotated = h.key_length, h.value_length, h.rope_dimensions
    feed_forward = h.integer("feed_forward_length")
    used = max(h.integer("expert_used_count"), 1)
    expert_ff = h.integer("expert_feed_forward_length") or feed_forward // used
    if h.architecture == "olmoe":
        expert_ff = feed_forward
    mla_key = h.integer("attention.key_length_mla") or key
    mla_value = h.integer("attention.value_length_mla") or value
    kv_lora = h.integer("attention.kv_lora_rank")
    altup, altup_embd = 4, 256  # constants of Gemma 3n
    return {
        "embd": h.embedding,
        "vocab": counts.tokens,
        "context": h.integer("context_length"),
        "token_types": counts.token_types,
        "labels": counts.labels,
        "head": key,
        "heads": h.heads,
        "heads_kv": h.heads_kv,
        "q": h.heads * key,
        "kv": h.heads_kv * key,
        "qkv": h.heads * key + 2 * h.heads_kv * key,
        "rot_half": rotated // 2,
        "ff": feed_forward,
        "ff_double": 2 * feed_forward,
        "experts": h.integer("expert_count"),
        "ff_exp": expert_ff,
        "ff_exp_double": 2 * expert_ff,
        "ff_shexp": h.integer("expert_shared_feed_forward_length") or feed_forward,
        "ff_shared": expert_ff * h.integer("expert_shared_count"),
        "q_lora": h.integer("attention.q_lora_rank"),
        "kv_lora": kv_lora,
        "mla_q": h.heads * mla_key,
        "mla_nope": mla_key - rotated,
        "mla_v": mla_value,
        "mla_out": h.heads * mla_value,
        "mla_kv_a": kv_lora + rotated,
        "mla_kv_b": h.heads * (mla_key - rotated + mla_value),
        "altup": altup,
        "altup_less": altup - 1,
        "altup_square": altup * altup,
        "altup_embd": altup_embd,
        "altup_layers": altup_embd * h.layers,
        "laurel": 64,
    }


def _holds(condition: str, h: Hyperparameters, layer: int, vocabulary: int) -> bool:
    experts = h.integer("expert_count") > 0 and layer >= h.integer("leading_dense_block_count")
    if h.architecture == "deepseek2":
        experts = layer >= h.integer("leading_dense_block_count")
    tokens = h.integer("vocab_size") if h.has("vocab_size") else vocabulary
    lite = h.trunk_layers in _DEEPSEEK_LITE_LAYERS or (h.trunk_layers == 48 and tokens == 128256)
    low_rank = h.integer("attention.q_lora_rank") > 0 and not lite
    return {
        "longrope": h.value("rope.scaling.type") == "longrope",
        "plainrope": h.value("rope.scaling.type") != "longrope",
        "dense": not experts,
        "moe": experts,
        "shexp": experts and h.integer("expert_shared_feed_forward_length") > 0,
        "qlora": low_rank,
        "noqlora": not low_rank,
        "mla": h.integer("attention.key_length_mla") > 0,
        "nomla": h.integer("attention.key_length_mla") == 0,
    }[condition]


def _entries(
    table: str, sizes: dict[str, int], h: Hyperparameters, layer: int, present: Container[str]
) -> Iterator[tuple[str, str, bool]]:
    for entry in table.split():
        condition, _, rest = entry.rpartition("/")
        if condition and not _holds(condition, h, layer, sizes["vocab"]):
            continue
        if rest == "QKV":
            yield from _attention_entries(f"blk.{layer}.", present)
        elif rest == "EXPS":
            yield from _expert_entries(f"blk.{layer}.", present)
        else:
            name, _, dims = rest.partition(":")
            yield name.removesuffix("?"), dims, name.endswith("?")


def _attention_entries(prefix: str, present: Container[str]) -> Iterator[tuple[str, str, bool]]:
    if f"{prefix}attn_qkv.weight" in present:
        yield "attn_qkv.weight", "embd,qkv", False
        yield "attn_qkv.bias", "qkv", True
    else:
        for name in _SEPARATE:
            yield f"{name}.weight", "embd,q" if name == "attn_q" else "embd,kv", False
    for name in _SEPARATE:
        yield f"{name}.bias", "q" if name == "attn_q" else "kv", True


def _expert_entries(prefix: str, present: Container[str]) -> Iterator[tuple[str, str, bool]]:
    if f"{prefix}ffn_gate_up_exps.weight" in present:
        yield "ffn_gate_up_exps.weight", "embd,ff_exp_double,experts", False
    else:
        yield "ffn_gate_exps.weight", "embd,ff_exp,experts", False
        yield "ffn_up_exps.weight", "embd,ff_exp,experts", False


def _check_tensor(tensors: Tensors, expected: Expected) -> None:
    name = expected.name
    found = tensors.by_name.get(name)
    if found is None:
        if expected.optional:
            return
        raise tensors.error(name, "no such tensor", f"shape {expected.shape}")
    tensor = found[0]
    if _padded(tensor.shape) != _padded(expected.shape):
        raise tensors.error(name, f"shape {tensor.shape}", f"{expected.shape} ({expected.dims})")
    if expected.vector and tensor.type is not GGMLType.F32:
        raise tensors.error(name, f"type {tensor.type.name}", "F32")
    if tensor.type in NO_WEIGHTS:
        raise tensors.error(name, f"type {tensor.type.name}", "a weight type such as F16 or Q4_K")


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape + (1,) * (4 - len(shape))

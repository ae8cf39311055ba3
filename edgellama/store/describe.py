"""What a model file contains, in a form for people and for `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellama.store.names import printable

if TYPE_CHECKING:
    from edgellama.gguf_io import Header

_ROPE_NAMES = (
    "dimension_count",
    "freq_base",
    "scale_linear",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.attn_factor",
    "scaling.finetuned",
    "scaling.yarn_log_multiplier",
)
_TOKEN_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "separator")


def describe(header: Header) -> dict[str, Any]:
    """Plain data about a model file: sizes in bytes, counts, names as the file has them (made printable)."""
    return {
        "architecture": printable(header.architecture),
        "name": _text(header, "general.name"),
        "kind": header.kind,
        "parameters": header.parameters,
        "bytes": header.file_size,
        "bits_per_weight": round(header.weights_bytes * 8 / header.parameters, 2) if header.parameters else None,
        "files": [printable(path, 1000) for path in header.paths],
        "gguf_version": header.version,
        "layers": header.layers,
        "embedding_length": header.embedding_length,
        "heads": max(header.head_counts, default=0),
        "kv_heads": max(header.head_counts_kv, default=0),
        "context_tokens": header.context_tokens,
        "rope": rope(header),
        "tensor_types": {
            kind.name: {"tensors": number, "bytes": nbytes} for kind, (number, nbytes) in header.type_counts.items()
        },
        "tokenizer": tokenizer(header),
        "chat_templates": {printable(name): template for name, template in header.chat_templates.items()},
        "licence": {name: printable(value, 500) for name, value in header.licence.items()},
        "notices": [printable(notice, 500) for notice in header.notices],
    }


def rope(header: Header) -> dict[str, Any]:
    """The file's RoPE keys without their prefix, and whether it carries frequency factors."""
    found: dict[str, Any] = {}
    for name in _ROPE_NAMES:
        value = header.get(f"{header.architecture}.rope.{name}")
        if isinstance(value, bool | int | float):
            found[name] = value
        elif isinstance(value, str):
            found[name] = printable(value)
    factors = [tensor.name for tensor in header.tensors if "rope_freqs" in tensor.name or "rope_factors" in tensor.name]
    if factors:
        found["factors"] = sorted({printable(name) for name in factors})[:4]
    return found


def tokenizer(header: Header) -> dict[str, Any]:
    """Kind, size and special tokens of the file's tokenizer."""
    ids = {name: header.get(f"tokenizer.ggml.{name}_token_id") for name in _TOKEN_IDS}
    return {
        "model": _text(header, "tokenizer.ggml.model"),
        "pre": _text(header, "tokenizer.ggml.pre"),
        "tokens": header.vocabulary_tokens,
        "special_tokens": {name: value for name, value in ids.items() if isinstance(value, int)},
        "adds_bos": header.get("tokenizer.ggml.add_bos_token"),
        "adds_eos": header.get("tokenizer.ggml.add_eos_token"),
    }


def tensors(header: Header) -> list[dict[str, Any]]:
    """Every tensor: name, shape (fastest dimension first), type, bytes."""
    return [
        {
            "name": printable(tensor.name),
            "shape": [int(size) for size in tensor.shape],
            "type": tensor.type.name,
            "bytes": tensor.nbytes,
        }
        for tensor in header.tensors
    ]


def _text(header: Header, key: str) -> str:
    return printable(header.text(key))

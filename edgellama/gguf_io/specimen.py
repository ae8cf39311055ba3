"""Tiny random models of any known architecture: specimens for tests, fuzzing and demonstrations.

A specimen loads and decodes in a few milliseconds, and says nothing sensible.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from edgellama.gguf_io.architectures import ARCHITECTURES
from edgellama.gguf_io.hyperparameters import Hyperparameters
from edgellama.gguf_io.parse import Options, RawFile, parse
from edgellama.gguf_io.shapes import Counts, expected_tensors
from edgellama.gguf_io.types import BLOCKS, GGMLType, ValueType
from edgellama.gguf_io.writer import TensorSpec, Typed, writing

_MOST_BYTES = 64 * 2**20
_EXPERT_LAYERS = ("qwen2moe", "qwen3moe", "olmoe", "deepseek2", "gpt-oss")
_WINDOWED = ("gemma2", "gemma3", "gemma3n", "gemma-embedding", "gpt-oss", "cohere2", "exaone4")


def vocabulary(kind: str) -> dict[str, object]:
    """Tokenizer keys of a small vocabulary: `llama` (SentencePiece), `gpt2` (BPE) or `bert` (WordPiece)."""
    if kind == "llama":
        texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        types = [2, 3, 3] + [6] * 256
        texts += ["▁", "a", "b", "▁a", "ab", "▁ab", "<|im_end|>"]
        types += [1] * 6 + [3]
    elif kind == "gpt2":
        texts = [_byte_letter(byte) for byte in range(256)] + ["Ġa", "ab", "<|endoftext|>"]
        types = [1] * 258 + [3]
    else:
        texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁a", "▁b", "c", "▁ab"]
        types = [3] * 5 + [1] * 4
    keys: dict[str, object] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": Typed(types, ValueType.ARRAY, ValueType.INT32),
    }
    if kind == "llama":
        keys["tokenizer.ggml.scores"] = [-float(index) for index in range(len(texts))]
    elif kind == "gpt2":
        keys |= {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["Ġ a", "a b"]}
        keys |= {"tokenizer.ggml.bos_token_id": 258, "tokenizer.ggml.eos_token_id": 258}
    else:
        ids = {"bos": 2, "eos": 3, "seperator": 3, "unknown": 1, "padding": 0, "mask": 4}
        keys |= {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
        keys["tokenizer.ggml.token_type_count"] = 2
    return keys


def _byte_letter(byte: int) -> str:
    """The letter that GPT-2's byte-level BPE writes for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))


def metadata(architecture: str, *, layers: int = 2, width: int = 64) -> dict[str, object]:
    """Keys of a tiny model of a known architecture, vocabulary included."""
    spec = ARCHITECTURES[architecture]
    keys: dict[str, object] = {
        "context_length": 128,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": 2 * width,
        "attention.head_count": 4,
        "attention.head_count_kv": 4 if architecture in ("olmoe", "bert", "nomic-bert", "gpt2") else 2,
        "logit_scale": 0.5,
        "attention.sliding_window": 16,
    }
    if architecture == "gemma-embedding":
        keys["attention.sliding_window_pattern"] = 2
    for name in spec.keys:
        if "epsilon" in name:
            keys[name] = 1e-5
    if architecture not in _WINDOWED:
        del keys["attention.sliding_window"]
    if "logit_scale" not in spec.keys:
        del keys["logit_scale"]
    if architecture in _EXPERT_LAYERS:
        keys |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": width}
    if architecture == "deepseek2":
        rank, rotated = 32, 8
        keys |= {"leading_dense_block_count": 1, "expert_shared_count": 1, "attention.head_count_kv": 1}
        keys |= {"attention.q_lora_rank": 24, "attention.kv_lora_rank": rank, "rope.dimension_count": rotated}
        keys |= {"attention.key_length": rank + rotated, "attention.value_length": rank}
        keys |= {"attention.key_length_mla": 16, "attention.value_length_mla": 16}
    kind = "bert" if "bert" in architecture else "llama"
    named = {f"{architecture}.{name}": value for name, value in keys.items()}
    return {"general.architecture": architecture, **named, **vocabulary(kind)}


def build(
    path: str | os.PathLike[str],
    architecture: str = "llama",
    *,
    keys: Mapping[str, object] | None = None,
    tensor_type: GGMLType = GGMLType.F32,
    optional: bool = False,
    layers: int = 2,
    width: int = 64,
    seed: int = 0,
) -> None:
    """Write a specimen. `keys` replaces or adds metadata (None removes a key); `optional` adds optional tensors."""
    values = metadata(architecture, layers=layers, width=width) | dict(keys or {})
    values = {key: value for key, value in values.items() if value is not None}
    target = Path(path)
    with writing(target, values):
        pass
    block = BLOCKS[tensor_type][0]
    specs = [
        TensorSpec(item.name, item.shape, GGMLType.F32 if item.vector or item.shape[0] % block else tensor_type)
        for item in expected_tensors(*_plan(parse(os.fspath(target), Options())), frozenset())
        if optional or not item.optional
    ]
    if sum(spec.nbytes for spec in specs) > _MOST_BYTES:
        raise ValueError(f"a specimen of more than {_MOST_BYTES:,} bytes")
    with writing(target, values, specs) as out:
        for index, spec in enumerate(specs):
            out.write(spec.name, _data(spec, seed + index))


def _plan(raw: RawFile) -> tuple[Hyperparameters, Counts]:
    tokens = raw.metadata.get("tokenizer.ggml.tokens")
    types = raw.metadata.get("tokenizer.ggml.token_type_count")
    architecture = str(raw.metadata["general.architecture"])
    counts = Counts(len(tokens) if isinstance(tokens, tuple) else 0, types if isinstance(types, int) else 0)
    return Hyperparameters(raw, architecture), counts


def _data(spec: TensorSpec, seed: int) -> bytes:
    """Small random weights, ones for norms; zeros in block-quantized types."""
    import random

    if "norm" in spec.name and spec.name.endswith(".weight"):
        return struct.pack("<f", 1.0) * (spec.nbytes // 4)
    if spec.type is GGMLType.F32:
        draw = random.Random(seed).uniform  # noqa: S311
        return struct.pack(f"<{spec.nbytes // 4}f", *(draw(-0.2, 0.2) for _ in range(spec.nbytes // 4)))
    return bytes(spec.nbytes)

"""The validated header of a model, and what the other rooms ask of it."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Literal

from edgellama.errors import GGUFError
from edgellama.gguf_io import hyperparameters, shapes, splits, vocabulary
from edgellama.gguf_io.architectures import ARCHITECTURES
from edgellama.gguf_io.parse import Options, RawFile
from edgellama.gguf_io.source import Source
from edgellama.gguf_io.types import (
    MAX_STRING_BYTES,
    SCALAR_FORMATS,
    ArrayInfo,
    GGMLType,
    TensorInfo,
    ValueType,
)

Kind = Literal["model", "vocabulary", "adapter", "projector", "imatrix", "other"]

_SAMPLING = "general.sampling."
_TEMPLATE = "tokenizer.chat_template"
_LICENCE_KEYS = ("general.license", "general.license.name", "general.license.link")


class Header:
    """A GGUF file (or set of split files) that passed every check. Metadata is that of the first file."""

    def __init__(self, files: list[RawFile]) -> None:
        first = files[0]
        self.path = first.path
        self.paths: tuple[str, ...] = tuple(raw.path for raw in files)
        self.version = first.version
        self.alignment = first.alignment
        self.data_offset = first.data_offset
        self.file_size = sum(raw.size for raw in files)
        """Bytes of all files together."""
        self.metadata: Mapping[str, object] = first.metadata
        self.value_types: Mapping[str, tuple[ValueType, ValueType | None]] = first.value_types
        """Type of each metadata value, and of its elements for arrays."""
        self.tensors: tuple[TensorInfo, ...] = tuple(
            tensor._replace(split=index) for index, raw in enumerate(files) for tensor in raw.tensors
        )
        self.notices: tuple[str, ...] = tuple(notice for raw in files for notice in raw.notices)
        """What a caller should tell the user about this file."""
        self.header_bytes: tuple[int, ...] = tuple(raw.data_offset for raw in files)
        self.kind: Kind = _kind(first, self.tensors)
        self._key_offsets = dict(first.offsets)
        self._keys_end = first.tensor_offsets[0] if first.tensor_offsets else first.data_offset

    def __repr__(self) -> str:
        return f"Header({self.path!r}, {self.architecture}, {len(self.tensors)} tensors)"

    @property
    def architecture(self) -> str:
        """`general.architecture`, empty if there is none."""
        return self.text("general.architecture")

    @property
    def is_known(self) -> bool:
        """Whether the architecture's tensors were checked one by one."""
        return self.architecture in ARCHITECTURES

    def get(self, key: str, default: object = None) -> object:
        """A metadata value. `{arch}` at the start of `key` stands for the architecture."""
        return self.metadata.get(key.replace("{arch}", self.architecture, 1), default)

    def text(self, key: str, default: str = "") -> str:
        """A string value."""
        value = self.metadata.get(key, default)
        return value if isinstance(value, str) else default

    def number(self, name: str, default: int = 0) -> int:
        """An integer of the architecture: `number("block_count")`. Per-layer values give their maximum."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, tuple):
            value = max(value, default=default)
        return value if isinstance(value, int) else default

    def real(self, name: str, default: float = 0.0) -> float:
        """A float of the architecture: `real("rope.freq_base")`."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        return float(value) if isinstance(value, (int, float)) else default

    def array(self, key: str) -> tuple[object, ...]:
        """Any array in full, read from the file if it was left there; empty without such a key."""
        value = self.metadata.get(key, ())
        if isinstance(value, ArrayInfo):
            return _read_array(self.path, key, value)
        return value if isinstance(value, tuple) else ()

    def array_length(self, key: str) -> int:
        """Element count of an array without reading it."""
        value = self.metadata.get(key, ())
        if isinstance(value, ArrayInfo):
            return value.length
        return len(value) if isinstance(value, tuple) else 0

    def tensor(self, name: str) -> TensorInfo | None:
        """The tensor of that name."""
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def encoded_metadata(self) -> dict[str, bytes]:
        """Every metadata value of the first file as the bytes after its key, in the file's order."""
        keys = list(self._key_offsets)
        starts = [*self._key_offsets.values(), self._keys_end]
        with Source(self.path) as source:
            source.skip(starts[0], "metadata")
            data = source.take(starts[-1] - starts[0], "metadata")
        spans = zip(keys, starts, starts[1:], strict=False)
        return {key: data[a - starts[0] + 8 + len(key.encode()) : b - starts[0]] for key, a, b in spans}

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensor data, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def type_counts(self) -> dict[GGMLType, tuple[int, int]]:
        """Tensors and bytes per tensor type, largest first."""
        counts: dict[GGMLType, tuple[int, int]] = {}
        for tensor in self.tensors:
            number, nbytes = counts.get(tensor.type, (0, 0))
            counts[tensor.type] = (number + 1, nbytes + tensor.nbytes)
        return dict(sorted(counts.items(), key=lambda item: -item[1][1]))

    @property
    def layers(self) -> int:
        return self.number("block_count")

    @property
    def context_tokens(self) -> int:
        """The context the model was trained for."""
        return self.number("context_length")

    @property
    def has_learned_positions(self) -> bool:
        """Whether positions beyond `context_tokens` do not exist: llama.cpp aborts on them."""
        return self.tensor("position_embd.weight") is not None

    @property
    def embedding_length(self) -> int:
        return self.number("embedding_length")

    @property
    def vocabulary_tokens(self) -> int:
        """Tokens in the vocabulary; without one, what the model declares."""
        return self.array_length("tokenizer.ggml.tokens") or self.number("vocab_size")

    def _per_layer(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, tuple):
            return tuple(int(item) for item in value)
        return (value,) * self.layers if isinstance(value, int) else default

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Attention heads per layer."""
        return self._per_layer("attention.head_count", (0,) * self.layers)

    @property
    def head_counts_kv(self) -> tuple[int, ...]:
        """Heads of the KV cache per layer."""
        return self._per_layer("attention.head_count_kv", self.head_counts)

    @property
    def key_length(self) -> int:
        """Numbers per head and token in the K cache."""
        heads = max(self.head_counts, default=0)
        return self.number("attention.key_length", self.embedding_length // heads if heads else 0)

    @property
    def value_length(self) -> int:
        """Numbers per head and token in the V cache."""
        heads = max(self.head_counts, default=0)
        return self.number("attention.value_length", self.embedding_length // heads if heads else 0)

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name; the unnamed one is `default`."""
        found: dict[str, str] = {}
        for key, value in self.metadata.items():
            if isinstance(value, str) and key == _TEMPLATE:
                found["default"] = value
            elif isinstance(value, str) and key.startswith(_TEMPLATE + "."):
                found.setdefault(key[len(_TEMPLATE) + 1 :], value)
        return found

    @property
    def sampling_defaults(self) -> dict[str, object]:
        """`general.sampling.*` without the prefix."""
        return {
            key[len(_SAMPLING) :]: value
            for key, value in self.metadata.items()
            if key.startswith(_SAMPLING) and isinstance(value, (bool, int, float, str))
        }

    @property
    def licence(self) -> dict[str, str]:
        """What the file says about its licence: `license`, `license.name`, `license.link`."""
        return {key.removeprefix("general."): self.text(key) for key in _LICENCE_KEYS if self.text(key)}


def _kind(raw: RawFile, tensors: tuple[TensorInfo, ...]) -> Kind:
    declared = raw.metadata.get("general.type")
    if declared == "adapter" or any(tensor.name.endswith(".lora_a") for tensor in tensors):
        return "adapter"
    if declared == "mmproj" or raw.metadata.get("general.architecture") == "clip":
        return "projector"
    if declared == "imatrix":
        return "imatrix"
    if "tokenizer.ggml.model" in raw.metadata and not tensors:
        return "vocabulary"
    return "model" if declared in (None, "model") else "other"


def _read_array(path: str, key: str, info: ArrayInfo) -> tuple[object, ...]:
    with Source(path) as source:
        source.skip(info.offset, key)
        if info.type is ValueType.STRING:
            strings = source.strings(info.length, MAX_STRING_BYTES, key, keep=True)
            return tuple(item.decode(errors="replace") for item in strings)
        data = source.take(info.nbytes, key)
    return struct.unpack(f"<{info.length}{SCALAR_FORMATS[info.type]}", data)


def read(path: str | os.PathLike[str], *, arrays: bool = False) -> Header:
    """Validate a GGUF file, or all files of a split model, and read its header by plain file reads.

    Accepts models, vocabulary-only files, adapters, projectors and imatrix files (`Header.kind` tells); what is no
    model gets the structural checks alone. `arrays` also reads arrays of more than 1024 elements.
    Raises `GGUFError`, `InvalidFileError` for what cannot be read, `NotFoundError`.
    """
    files = splits.parse_all(os.fspath(path), Options(arrays))
    header = Header(files)
    if header.kind in ("model", "vocabulary"):
        notices = _check(header, files)
        header.notices = tuple(notice for raw in files for notice in raw.notices) + notices
    for raw in files:
        raw.captured.clear()
    return header


def require_model(header: Header) -> None:
    """Raise `GGUFError` unless the file can be loaded to generate or embed text."""
    if header.kind == "model" and header.tensors:
        return
    found = {"vocabulary": "a vocabulary without weights", "other": header.text("general.type", "other")}
    raise GGUFError(
        header.path, 0, "general.type", found.get(header.kind, f"a {header.kind}"), "a model", "name a model file"
    )


def _check(header: Header, files: list[RawFile]) -> tuple[str, ...]:
    raw = files[0]
    architecture = raw.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        offset = raw.offsets.get("general.architecture", 0)
        raise GGUFError(raw.path, offset, "general.architecture", "no name", "the name of the model's architecture")
    if "tokenizer.ggml.model" in raw.metadata or header.kind == "vocabulary":
        vocabulary.check(raw)
    if header.kind == "vocabulary":
        return ()
    hyperparameters.check_keys(raw, architecture)
    h = hyperparameters.Hyperparameters(raw, architecture)
    for name in ("context_length", "embedding_length", "block_count"):
        h.require(name)
    hyperparameters.check_rules(h)
    tensors = shapes.Tensors(files)
    _check_placement(files)
    tokens = vocabulary.token_count(raw) or h.integer("vocab_size")
    if not header.is_known:
        shapes.check_unknown(h, tensors, tokens)
        return (f"the architecture {architecture!r} is not known here: only the general checks were made",)
    vocabulary.require(raw)
    token_types = raw.metadata.get("tokenizer.ggml.token_type_count")
    labels = header.array_length(f"{architecture}.classifier.output_labels") or 1
    counts = shapes.Counts(tokens, token_types if isinstance(token_types, int) else 0, labels)
    shapes.check_known(h, tensors, counts)
    return ()


def _check_placement(files: list[RawFile]) -> None:
    """llama.cpp maps tensors in place and aborts when the first one is not on a 32-byte boundary."""
    for raw in files:
        if raw.tensors and raw.data_offset % 32:
            found = f"tensor data at byte {raw.data_offset:,}"
            where = raw.offsets.get("general.alignment", 0)
            raise GGUFError(
                raw.path, where, "general.alignment", found, "a multiple of 32", "write it with alignment 32"
            )

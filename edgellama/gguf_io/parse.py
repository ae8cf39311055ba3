"""The bytes of one GGUF file: preamble, metadata and tensor table, with every structural rule checked on the way.

What a file means (architecture, tokenizer, shapes) is checked by the other modules; here nothing is trusted: no
length is used before it is held against the file's size and our limits, and memory stays bounded.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from edgellama.gguf_io.source import DOWNLOAD_AGAIN, Source
from edgellama.gguf_io.types import (
    BLOCKS,
    DEFAULT_ALIGNMENT,
    INLINE_ARRAY_ELEMENTS,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_ARRAY_ELEMENTS,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_STRING_BYTES,
    MAX_TENSOR_NAME_BYTES,
    MAX_TENSORS,
    MAX_TOKENS,
    REMOVED_TYPES,
    SCALAR_BYTES,
    SCALAR_FORMATS,
    ArrayInfo,
    GGMLType,
    TensorInfo,
    ValueType,
)

TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"  # noqa: S105
SCORES = "tokenizer.ggml.scores"

_SCALARS = {kind: struct.Struct("<" + code) for kind, code in SCALAR_FORMATS.items()}
_VALUE_TYPES: dict[int, ValueType] = {int(kind): kind for kind in ValueType}
_TENSOR_TYPES: dict[int, GGMLType] = {int(kind): kind for kind in GGMLType}
_SMALLEST_KEY = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8

_OTHER_MAGICS = (
    (b"", "an empty file", DOWNLOAD_AGAIN),
    (b"FUGG", "a byte-swapped GGUF file", "convert it to little-endian on the machine that wrote it"),
    (b"lmgg", "a GGML file of 2023", "convert it to GGUF, or fetch a GGUF file of the model"),
    (b"fmgg", "a GGMF file of 2023", "convert it to GGUF, or fetch a GGUF file of the model"),
    (b"tjgg", "a GGJT file of 2023", "convert it to GGUF, or fetch a GGUF file of the model"),
    (b"algg", "a LoRA file of 2023", "convert the adapter to GGUF"),
    (
        b"PK\x03\x04",
        "a zip archive",
        "unpack it; a checkpoint that is not GGUF: fetch its GGUF version (edgellama pull NAME)",
    ),
    (b"vers", "a Git LFS pointer, not the file itself", "run `git lfs pull`, or fetch it with edgellama pull"),
    (b"<!do", "a web page", "the download was answered with a page; fetch it again with edgellama pull"),
    (b"<!DO", "a web page", "the download was answered with a page; fetch it again with edgellama pull"),
    (b"<htm", "a web page", "the download was answered with a page; fetch it again with edgellama pull"),
)


class RawFile:
    """What one file holds. `captured` keeps the tokenizer arrays that the vocabulary check needs."""

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self.size = source.size
        self.version = 0
        self.alignment = DEFAULT_ALIGNMENT
        self.data_offset = 0
        self.metadata: dict[str, object] = {}
        self.value_types: dict[str, tuple[ValueType, ValueType | None]] = {}
        self.offsets: dict[str, int] = {}
        """File offset of each key, for messages."""
        self.tensors: list[TensorInfo] = []
        self.tensor_offsets: list[int] = []
        """File offset of each tensor's entry."""
        self.captured: dict[str, list[bytes] | bytes] = {}
        self.notices: list[str] = []


class Options(NamedTuple):
    """`arrays` reads every array; `capture` keeps raw tokenizer arrays for the vocabulary check."""

    arrays: bool = False
    capture: bool = True


def parse(path: str, options: Options) -> RawFile:
    """Read and check the structure of one file. Raises `GGUFError`, `InvalidFileError` or `NotFoundError`."""
    with Source(path) as source:
        raw = RawFile(source)
        tensors, keys = _preamble(source, raw)
        for _ in range(keys):
            _key_value(source, raw, options)
        _alignment(source, raw)
        names: set[str] = set()
        for _ in range(tensors):
            _tensor(source, raw, names)
        _data_section(source, raw)
        return raw


def _preamble(source: Source, raw: RawFile) -> tuple[int, int]:
    magic = source.take(min(4, source.size), "magic")
    if magic != MAGIC:
        for start, what, advice in _OTHER_MAGICS:
            if magic == start or (start and magic.startswith(start)):
                raise source.error("magic", what, "GGUF", advice, offset=0)
        raise source.error("magic", repr(magic)[1:], "'GGUF'", "this is no GGUF file", offset=0)
    raw.version = version = source.u32("version")
    if version & 0xFFFF == 0 and version:
        raise source.error(
            "byte order",
            f"a big-endian file (version {int.from_bytes(version.to_bytes(4, 'little'), 'big')})",
            "little-endian",
            "convert it with gguf-convert-endian, or fetch the little-endian file of the model",
            offset=4,
        )
    if version not in (2, 3):
        advice = (
            "version 1 was used for some weeks of 2023; convert the model again, or fetch a newer file"
            if version == 1
            else "a newer edgellama may read it, or the file is damaged"
        )
        raise source.error("version", version, "2 or 3", advice, offset=4)
    tensors = source.u64("tensor count")
    keys = source.u64("key count")
    _count(source, "tensor count", tensors, MAX_TENSORS, _SMALLEST_TENSOR, 8)
    _count(source, "key count", keys, MAX_KEYS, _SMALLEST_KEY, 16)
    return tensors, keys


def _count(source: Source, field: str, count: int, limit: int, smallest: int, offset: int) -> None:
    if count > limit:
        raise source.error(field, f"{count:,}", f"at most {limit:,}", offset=offset)
    if count * smallest > source.remaining:
        raise source.error(
            field,
            f"{count:,} in a file of {source.size:,} bytes",
            f"at most {source.remaining // smallest:,} that fit",
            DOWNLOAD_AGAIN,
            offset=offset,
        )


def _name(source: Source, limit: int, field: str) -> str:
    start = source.offset
    data = source.string(limit, field)
    if not data:
        raise source.error(field, "an empty name", "a name", offset=start)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise source.error(field, f"{data[:40]!r}, no UTF-8", "UTF-8 text", offset=start) from None
    if "\0" in text:
        raise source.error(field, f"{text[:40]!r} with a zero byte", "text without zero bytes", offset=start)
    return text


def _key_value(source: Source, raw: RawFile, options: Options) -> None:
    start = source.offset
    key = _name(source, MAX_KEY_BYTES, f"key {len(raw.metadata)}")
    if key in raw.metadata:
        raise source.error(key, f"a second time (first at byte {raw.offsets[key]})", "each key once", offset=start)
    raw.offsets[key] = start
    kind = _value_type(source, key)
    if kind is ValueType.ARRAY:
        element = _value_type(source, key)
        if element is ValueType.ARRAY:
            raise source.error(key, "an array of arrays", "an array of plain values", offset=start)
        raw.value_types[key] = (kind, element)
        raw.metadata[key] = _array(source, raw, key, element, options)
        return
    raw.value_types[key] = (kind, None)
    if kind is ValueType.STRING:
        raw.metadata[key] = _text(raw, key, source.string(MAX_STRING_BYTES, key))
        return
    data = source.take(SCALAR_BYTES[kind], key)
    if kind is ValueType.BOOL and data[0] > 1:
        raise source.error(key, f"boolean byte {data[0]}", "0 or 1", offset=source.offset - 1)
    raw.metadata[key] = _SCALARS[kind].unpack(data)[0]


def _value_type(source: Source, key: str) -> ValueType:
    offset = source.offset
    number = source.u32(f"{key} (type)")
    kind = _VALUE_TYPES.get(number)
    if kind is None:
        raise source.error(f"{key} (type)", number, "a value type from 0 to 12", offset=offset)
    return kind


def _text(raw: RawFile, key: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raw.notices.append(f"{key} is no valid UTF-8; the bad bytes were replaced")
        return data.decode(errors="replace")


def _array(source: Source, raw: RawFile, key: str, element: ValueType, options: Options) -> object:
    start = source.offset
    length = source.u64(f"{key} (length)")
    smallest = 8 if element is ValueType.STRING else SCALAR_BYTES[element]
    if length * smallest > source.remaining:
        raise source.error(
            key,
            f"{length:,} elements of {smallest} bytes or more",
            f"at most {source.remaining:,} bytes, which is the rest of the file",
            DOWNLOAD_AGAIN,
            offset=start,
        )
    limit = MAX_TOKENS if key == TOKENS else MAX_ARRAY_ELEMENTS
    if length > limit:
        raise source.error(key, f"{length:,} elements", f"at most {limit:,}", offset=start)
    inline = options.arrays or length <= INLINE_ARRAY_ELEMENTS
    begin = source.offset
    if element is ValueType.STRING:
        capture = options.capture and key == TOKENS
        strings = source.strings(length, MAX_STRING_BYTES, key, keep=inline or capture)
        if capture:
            raw.captured[key] = strings
        if not inline:
            return ArrayInfo(element, length, begin, source.offset - begin)
        return tuple(item.decode(errors="replace") for item in strings)
    return _numbers(source, raw, key, ArrayInfo(element, length, begin, length * smallest), options)


def _numbers(source: Source, raw: RawFile, key: str, info: ArrayInfo, options: Options) -> object:
    inline = options.arrays or info.length <= INLINE_ARRAY_ELEMENTS
    capture = options.capture and key in (TOKEN_TYPES, SCORES)
    if not (inline or capture or info.type is ValueType.BOOL):
        source.skip(info.nbytes, key)
        return info
    data = source.take(info.nbytes, key)
    if info.type is ValueType.BOOL and data.translate(None, b"\0\1"):
        raise source.error(key, "a boolean byte above 1", "0 or 1", offset=info.offset)
    if capture:
        raw.captured[key] = data
    return struct.unpack(f"<{info.length}{SCALAR_FORMATS[info.type]}", data) if inline else info


def _alignment(source: Source, raw: RawFile) -> None:
    key = "general.alignment"
    if key not in raw.metadata:
        return
    value = raw.metadata[key]
    where = raw.offsets[key]
    if raw.value_types[key] != (ValueType.UINT32, None) or not isinstance(value, int):
        found = raw.value_types[key][0].name.lower()
        raise source.error(key, f"type {found}", "type uint32", offset=where)
    if value < 1 or value & (value - 1) or value > MAX_ALIGNMENT:
        raise source.error(key, value, f"a power of two up to {MAX_ALIGNMENT}", offset=where)
    raw.alignment = value


def _tensor(source: Source, raw: RawFile, names: set[str]) -> None:
    start = source.offset
    name = _name(source, MAX_TENSOR_NAME_BYTES, f"tensor {len(raw.tensors)} name")
    if name in names:
        raise source.error(f"tensor {name!r}", "the name a second time", "each name once", offset=start)
    names.add(name)
    field = f"tensor {name!r}"
    dimensions = source.u32(f"{field} dimension count")
    if dimensions > MAX_DIMENSIONS:
        raise source.error(f"{field} dimension count", dimensions, f"at most {MAX_DIMENSIONS}", offset=start)
    shape = struct.unpack(f"<{dimensions}Q", source.take(8 * dimensions, f"{field} shape"))
    elements = 1
    for size in shape:
        elements *= size
    if not 0 < elements <= MAX_ELEMENTS:
        raise source.error(f"{field} shape", shape, "1 to 2^63 - 1 elements", offset=start)
    kind, nbytes = _layout(source, field, shape, elements)
    offset = source.u64(f"{field} offset")
    if offset % raw.alignment:
        raise source.error(f"{field} offset", offset, f"a multiple of {raw.alignment}", offset=source.offset - 8)
    raw.tensors.append(TensorInfo(name, shape, kind, offset, nbytes))
    raw.tensor_offsets.append(start)


def _layout(source: Source, field: str, shape: tuple[int, ...], elements: int) -> tuple[GGMLType, int]:
    number = source.u32(f"{field} type")
    kind = _TENSOR_TYPES.get(number)
    if kind is None:
        removed = REMOVED_TYPES.get(number)
        advice = f"{removed[0]} was removed from ggml; fetch or make the {removed[1]} file" if removed else ""
        found = f"{number} ({removed[0]})" if removed else str(number)
        raise source.error(f"{field} type", found, "a known tensor type", advice, offset=source.offset - 4)
    block, size = BLOCKS[kind]
    row = shape[0] if shape else 1
    if row % block:
        raise source.error(
            f"{field} row", f"{row} elements", f"a multiple of {block} for {kind.name}", offset=source.offset - 4
        )
    return kind, elements // block * size


def _data_section(source: Source, raw: RawFile) -> None:
    end = source.offset
    raw.data_offset = -(-end // raw.alignment) * raw.alignment if raw.tensors else end
    _check_layout(source, raw)
    raw.tensors = [tensor._replace(offset=raw.data_offset + tensor.offset) for tensor in raw.tensors]
    for tensor in raw.tensors:
        if tensor.offset + tensor.nbytes > raw.size:
            raise source.error(
                f"tensor {tensor.name!r} data",
                f"a file of {raw.size:,} bytes",
                f"{tensor.offset + tensor.nbytes:,} bytes or more",
                DOWNLOAD_AGAIN,
                offset=tensor.offset,
            )


def _check_layout(source: Source, raw: RawFile) -> None:
    """Tensors must lie back to back in table order, each padded to the alignment, as every reader expects."""
    expected = 0
    for tensor, entry in zip(raw.tensors, raw.tensor_offsets, strict=True):
        if tensor.offset != expected:
            problem = "overlaps the tensor before it" if tensor.offset < expected else "leaves a gap"
            raise source.error(
                f"tensor {tensor.name!r} offset", f"{tensor.offset:,}, which {problem}", f"{expected:,}", offset=entry
            )
        expected += -(-tensor.nbytes // raw.alignment) * raw.alignment

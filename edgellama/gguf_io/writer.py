"""Crash-safe streaming writing of GGUF files: the header first with its final sizes, then tensor data in order."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from edgellama.errors import DiskFullError
from edgellama.files import free_bytes, replacing
from edgellama.gguf_io.types import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMENSIONS,
    MAX_KEY_BYTES,
    MAX_TENSOR_NAME_BYTES,
    SCALAR_FORMATS,
    GGMLType,
    ValueType,
    tensor_bytes,
)

VERSION = 3


class Typed(NamedTuple):
    """A metadata value of a given type; `element` is the type of an array's elements."""

    value: object
    type: ValueType
    element: ValueType | None = None


class Encoded(NamedTuple):
    """A metadata value as the bytes that follow its key, type included: copied from another file unread."""

    data: bytes


class TensorSpec(NamedTuple):
    """A tensor to write: ggml's dimension order."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.shape, self.type)


def _string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def _infer(value: object) -> Typed:
    if isinstance(value, Typed):
        return value
    if isinstance(value, (str, bytes)):
        return Typed(value, ValueType.STRING)
    if isinstance(value, Sequence):
        if not value:
            raise ValueError("an empty array needs a type: Typed([], ValueType.ARRAY, element)")
        kinds = {_infer(item).type for item in value}
        integers = {ValueType.UINT32, ValueType.INT32}
        element = ValueType.INT32 if kinds == integers else kinds.pop()
        return Typed(value, ValueType.ARRAY, element)
    if isinstance(value, bool):
        return Typed(value, ValueType.BOOL)
    if isinstance(value, float):
        return Typed(value, ValueType.FLOAT32)
    if isinstance(value, int):
        small = ValueType.UINT32 if value >= 0 else ValueType.INT32
        large = ValueType.UINT64 if value >= 0 else ValueType.INT64
        return Typed(value, small if -(2**31) <= value < 2**32 else large)
    raise TypeError(f"{type(value).__name__} is no metadata value")


def _encode(value: object) -> bytes:
    if isinstance(value, Encoded):
        return value.data
    typed = _infer(value)
    if typed.type is ValueType.STRING and isinstance(typed.value, (str, bytes)):
        return struct.pack("<I", typed.type) + _string(typed.value)
    if typed.type is not ValueType.ARRAY:
        return struct.pack("<I" + SCALAR_FORMATS[typed.type], typed.type, typed.value)
    if not isinstance(typed.value, Sequence) or typed.element is None:
        raise TypeError("an array needs a sequence and the type of its elements")
    head = struct.pack("<IIQ", typed.type, typed.element, len(typed.value))
    if typed.element is ValueType.STRING:
        return head + b"".join(_string(item) for item in typed.value)
    return head + struct.pack(f"<{len(typed.value)}{SCALAR_FORMATS[typed.element]}", *typed.value)


def _named(name: str, limit: int) -> bytes:
    data = name.encode()
    if not 0 < len(data) <= limit or b"\0" in data:
        raise ValueError(f"{name!r} is no valid name: 1 to {limit} bytes without zero bytes")
    return _string(data)


def header_bytes(
    metadata: Mapping[str, object], tensors: Sequence[TensorSpec], alignment: int = DEFAULT_ALIGNMENT
) -> bytes:
    """Preamble, metadata and tensor table, padded to where the data begins. Keys keep their order.

    Python values get the type converters use (bool, float32, string, uint32 or int32, 64 bits beyond); `Typed` says
    otherwise. An alignment other than 32 is written as `general.alignment`.
    """
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("two tensors have the same name")
    values = dict(metadata)
    if alignment != DEFAULT_ALIGNMENT:
        values["general.alignment"] = Typed(alignment, ValueType.UINT32)
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(values))]
    for key, value in values.items():
        parts += [_named(key, MAX_KEY_BYTES), _encode(value)]
    offset = 0
    for tensor in tensors:
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise ValueError(f"{tensor.name}: {len(tensor.shape)} dimensions, at most {MAX_DIMENSIONS} are possible")
        parts += [
            _named(tensor.name, MAX_TENSOR_NAME_BYTES),
            struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape, tensor.type, offset),
        ]
        offset += _padded(tensor.nbytes, alignment)
    header = b"".join(parts)
    return header.ljust(_padded(len(header), alignment), b"\0") if tensors else header


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


class GGUFWriter:
    """Writes tensor data in the order of the header, in chunks of any size; every size is checked."""

    def __init__(self, stream: BinaryIO, tensors: Sequence[TensorSpec], alignment: int) -> None:
        self._stream = stream
        self._tensors = tensors
        self._alignment = alignment
        self._index = 0
        self._written = 0

    def write(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Append `data` to tensor `name`, which must be the one that comes next."""
        if self._index >= len(self._tensors) or self._tensors[self._index].name != name:
            raise ValueError(f"tensor {name!r} is not the next one")
        tensor = self._tensors[self._index]
        view = memoryview(data).cast("B")
        if self._written + view.nbytes > tensor.nbytes:
            raise ValueError(f"tensor {name!r} has {tensor.nbytes:,} bytes, got {self._written + view.nbytes:,}")
        self._stream.write(view)
        self._written += view.nbytes
        if self._written == tensor.nbytes:
            self._stream.write(b"\0" * (_padded(tensor.nbytes, self._alignment) - tensor.nbytes))
            self._index += 1
            self._written = 0

    def finish(self) -> None:
        """Raise `ValueError` unless every tensor is complete."""
        if self._index < len(self._tensors):
            tensor = self._tensors[self._index]
            raise ValueError(f"tensor {tensor.name!r} has {self._written:,} of {tensor.nbytes:,} bytes")


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Iterable[TensorSpec] = (),
    *,
    alignment: int = DEFAULT_ALIGNMENT,
) -> Iterator[GGUFWriter]:
    """Write a GGUF file: `with writing(path, metadata, tensors) as out: out.write(name, chunk)`.

    `path` appears complete or not at all. Raises `DiskFullError` before the first byte when the disk is too small,
    `ValueError` for a tensor that is missing, out of order or of the wrong size.
    """
    target = Path(path)
    specs = tuple(tensors)
    header = header_bytes(metadata, specs, alignment)
    size = len(header) + sum(_padded(tensor.nbytes, alignment) for tensor in specs)
    free = free_bytes(target.absolute().parent)
    if size > free:
        raise DiskFullError(f"{target}: {size:,} bytes are needed, {free:,} are free there", "free some space")
    with replacing(target) as stream:
        stream.write(header)
        writer = GGUFWriter(stream, specs, alignment)
        yield writer
        writer.finish()

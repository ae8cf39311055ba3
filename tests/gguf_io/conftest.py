"""Hand-made GGUF bytes, so that a test can break exactly one thing."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgellama import gguf_io
from edgellama.errors import GGUFError

SCALARS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i")}
SCALARS |= {"f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: str, value: Any) -> bytes:
    """One key: `kind` is a scalar's name, `str`, or `[name]` for arrays."""
    if kind == "str":
        return string(key) + struct.pack("<I", 8) + string(value)
    if kind == "[str]":
        return string(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(string(item) for item in value)
    number, code = SCALARS[kind.strip("[]")]
    if kind.startswith("["):
        return string(key) + struct.pack(f"<IIQ{len(value)}{code}", 9, number, len(value), *value)
    return string(key) + struct.pack("<I" + code, number, value)


def tensor(name: str | bytes, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + data if tensors else head + data


OTHER = pair("general.type", "str", "config")
"""A kind of file that gets the structural checks alone."""

Refuse = Callable[..., GGUFError]


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    """`refuse(bytes)` reads them as a file and returns the error; a file that passes fails the test."""

    def run(data: bytes, name: str = "broken.gguf") -> GGUFError:
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(GGUFError) as caught:
            gguf_io.read(path)
        assert caught.value.path == str(path)
        assert 0 <= caught.value.offset <= max(len(data), caught.value.offset if "data" in caught.value.field else 0)
        return caught.value

    return run


@pytest.fixture
def craft() -> Any:
    """The makers of bytes: `craft.gguf(...)`, `craft.pair(...)`, `craft.tensor(...)`, `craft.string(...)`."""

    class Makers:
        gguf = staticmethod(gguf)
        pair = staticmethod(pair)
        tensor = staticmethod(tensor)
        string = staticmethod(string)
        other = OTHER

    return Makers

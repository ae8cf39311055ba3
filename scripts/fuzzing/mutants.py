"""Good headers, and what chance makes of them."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator
from pathlib import Path

from edgellama import gguf_io
from edgellama.gguf_io import specimen
from edgellama.gguf_io.types import GGMLType

INTERESTING = [0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513, 1024, 65535]
INTERESTING += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"), 1e-45, 0.5, 1e6]
Field = tuple[int, int, str]
"""Offset, size in bytes and kind of one field: `length`, `type`, `int`, `float`, `text`."""


def walk(data: bytes) -> Iterator[Field]:
    """Fields of a well-formed header, by an own small parser."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    tensors, keys = struct.unpack_from("<QQ", data, 8)
    yield from ((0, 4, "text"), (4, 4, "int"), (8, 8, "length"), (16, 8, "length"))
    at = 24

    def string() -> Iterator[Field]:
        nonlocal at
        (n,) = struct.unpack_from("<Q", data, at)
        yield at, 8, "length"
        yield at + 8, n, "text"
        at += 8 + n

    def value(kind: int) -> Iterator[Field]:
        nonlocal at
        if kind == 8:
            yield from string()
        else:
            yield at, sizes[kind], "float" if kind in (6, 12) else "int"
            at += sizes[kind]

    for _ in range(keys):
        yield from string()
        (kind,) = struct.unpack_from("<I", data, at)
        yield at, 4, "type"
        at += 4
        if kind != 9:
            yield from value(kind)
            continue
        element, n = struct.unpack_from("<IQ", data, at)
        yield at, 4, "type"
        yield at + 4, 8, "length"
        at += 12
        for _ in range(n):
            yield from value(element)
    for _ in range(tensors):
        yield from string()
        (n,) = struct.unpack_from("<I", data, at)
        yield at, 4, "type"
        yield from ((at + 4 + 8 * i, 8, "int") for i in range(n))
        yield at + 4 + 8 * n, 4, "type"
        yield at + 8 + 8 * n, 8, "int"
        at += 16 + 8 * n


class Base:
    """One good file to mutate: its header, its fields and where its data begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = gguf_io.read(path)
        self.bytes = path.read_bytes()
        self.head = bytearray(self.bytes[: self.header.data_offset])
        self.fields = [field for field in walk(self.bytes) if field[1]]
        self.rare = [field for field in self.fields if field[2] != "text"]
        self.scalars = self._scalars()

    def _scalars(self) -> list[Field]:
        """Values of plain keys: what a model's author would get wrong."""
        found = []
        previous = ""
        for field in self.fields:
            if previous == "type" and field[2] in ("int", "float"):
                found.append(field)
            previous = field[2]
        return found


def mutate(base: Base, draw: random.Random) -> tuple[bytearray, int]:
    """A mutated header and the size the file shall have."""
    head = bytearray(base.head)
    size = len(base.bytes)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.random()
        if kind < 0.15:
            for _ in range(draw.randint(1, 8)):
                head[draw.randrange(len(head))] = draw.randrange(256)
        elif kind < 0.25:
            head[draw.randrange(len(head))] ^= 1 << draw.randrange(8)
        elif kind < 0.6:
            overwrite(head, draw.choice(base.scalars), draw)
        elif kind < 0.85:
            overwrite(head, draw.choice(base.rare), draw)
        elif kind < 0.93:
            size = draw.choice((draw.randrange(max(size, 1)), draw.choice(base.fields)[0], max(size - 1, 0), size + 1))
        else:
            splice(head, base, draw)
    return head, size


def overwrite(head: bytearray, field: Field, draw: random.Random) -> None:
    offset, size, kind = field
    if offset + size > len(head):
        return
    if kind == "float" and draw.random() < 0.8:
        with contextlib.suppress(OverflowError):
            struct.pack_into("<f" if size == 4 else "<d", head, offset, draw.choice(FLOATS))
        return
    old = int.from_bytes(head[offset : offset + size], "little")
    step = draw.choice((draw.choice(INTERESTING), old + draw.choice((-1, 1)), old * 2, old // 2, draw.randrange(64)))
    head[offset : offset + size] = (step % 256**size).to_bytes(size, "little")


def splice(head: bytearray, base: Base, draw: random.Random) -> None:
    start, stop = sorted(draw.choice(base.fields)[0] for _ in range(2))
    part = head[start : min(stop, start + 256)]
    where = draw.choice(base.fields)[0]
    if draw.random() < 0.5:
        head[where:where] = part
    else:
        del head[where : where + len(part)]


def bases(folder: Path, names: list[str]) -> list[Base]:
    found = []
    for index, name in enumerate(names or sorted(gguf_io.ARCHITECTURES)):
        path = folder / f"{name}.gguf"
        kind = (GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0)[index % 4]
        keys = specimen.vocabulary("gpt2") if index % 3 == 1 and "bert" not in name else {}
        if keys:
            keys |= {"tokenizer.ggml.scores": None}
        specimen.build(path, name, keys=keys, tensor_type=kind, seed=index)
        found.append(Base(path))
    return found

"""Every way to break the bytes: typed error, right field, right place, no hang, no allocation."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from edgellama import gguf_io
from edgellama.errors import EdgellamaError, GGUFError, InvalidFileError, NotFoundError


def test_smallest_files(tmp_path: Path, craft: Any) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(craft.gguf([craft.other], [craft.tensor("a", [3]), craft.tensor("b", [2], 1, 32)], bytes(36)))
    header = gguf_io.read(path)
    found = [(t.name, t.shape, t.type.name, t.nbytes) for t in header.tensors]
    assert found == [("a", (3,), "F32", 12), ("b", (2,), "F16", 4)]
    assert header.tensors[1].offset == header.data_offset + 32
    assert header.kind == "other"
    path.write_bytes(craft.gguf([craft.other], version=2))
    assert gguf_io.read(path).version == 2


@pytest.mark.parametrize(
    ("data", "found", "advice"),
    [
        (b"", "empty", "fetch it again"),
        (b"GG", "GG", "no GGUF"),
        (b"lmgg" + bytes(40), "2023", "GGUF"),
        (b"tjgg" + bytes(40), "2023", "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS pointer", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page", "fetch it again"),
        (b"PK\x03\x04" + bytes(40), "zip", "unpack"),
        (b"FUGG" + bytes(40), "byte-swapped", "little-endian"),
    ],
)
def test_other_formats_are_named(refuse: Any, data: bytes, found: str, advice: str) -> None:
    error = refuse(data)
    assert error.field == "magic"
    assert error.offset == 0
    assert found in error.found
    assert advice in error.advice


@pytest.mark.parametrize(("version", "word"), [(1, "2023"), (0, ""), (4, "newer"), (99, "newer")])
def test_versions(refuse: Any, craft: Any, version: int, word: str) -> None:
    error = refuse(craft.gguf(version=version))
    assert (error.field, error.found, error.expected, error.offset) == ("version", str(version), "2 or 3", 4)
    assert word in error.advice


def test_big_endian(refuse: Any) -> None:
    error = refuse(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert error.field == "byte order"
    assert "version 3" in error.found


@pytest.mark.parametrize("count", [2, 2**16 + 1, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("which", ["tensor count", "key count"])
def test_counts_against_file_size(refuse: Any, which: str, count: int) -> None:
    counts = (count, 0) if which == "tensor count" else (0, count)
    error = refuse(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(20))
    assert error.field == which
    assert error.offset == (8 if which == "tensor count" else 16)


@pytest.mark.parametrize("key", ["", "a"])
@pytest.mark.parametrize("element", [0, 7, 8, 10])
def test_array_of_2_63_elements(refuse: Any, craft: Any, key: str, element: int) -> None:
    """gguf 0.19.0 never comes back from these 48 and 49 bytes."""
    array = craft.string(key) + struct.pack("<IIQ", 9, element, 2**63)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array
    error = refuse(data)
    assert error.field.startswith(key or "key 0")
    for length in range(len(data)):
        refuse(data[:length])


def test_hostile_lengths_allocate_nothing(refuse: Any, craft: Any) -> None:
    tracemalloc.start()
    try:
        for length in (2**20, 2**31, 2**40, 2**63, 2**64 - 1):
            for kind in range(13):
                refuse(craft.gguf([craft.string("k") + struct.pack("<IIQ", 9, kind, length)]))
            refuse(craft.gguf([craft.string("k") + struct.pack("<IQ", 8, length)]))
            refuse(craft.gguf([struct.pack("<Q", length)]) + bytes(64))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_sparse_giant_is_refused_by_our_limits(tmp_path: Path, craft: Any) -> None:
    """A sparse file makes any length fit; the header limit still holds."""
    path = tmp_path / "sparse.gguf"
    for kind, length in ((8, 2**22 + 1), (0, 2**22 + 1), (8, 2**40), (0, 2**40)):
        with path.open("wb") as stream:
            stream.write(craft.gguf([craft.string("k") + struct.pack("<IIQ", 9, kind, length)]))
            stream.truncate(2**43 if length > 2**30 else 2**30)
        with pytest.raises(GGUFError):
            gguf_io.read(path)
    strings = [craft.string(f"k{i}") + struct.pack("<IQ", 8, 2**24) for i in range(9)]
    with path.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 9))
        for item in strings:
            stream.write(item)
            stream.seek(2**24, 1)
        stream.truncate()
    with pytest.raises(GGUFError, match="a header of"):
        gguf_io.read(path)


def test_nested_arrays_are_refused_at_any_depth(refuse: Any, craft: Any) -> None:
    inner = struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQB", 0, 1, 7)
    error = refuse(craft.gguf([craft.string("deep") + struct.pack("<I", 9) + inner]))
    assert error.field == "deep"
    assert error.found == "an array of arrays"


@pytest.mark.parametrize("number", [13, 255, 2**31, 2**32 - 1])
def test_unknown_value_types(refuse: Any, craft: Any, number: int) -> None:
    error = refuse(craft.gguf([craft.string("k") + struct.pack("<IQ", number, 0)]))
    assert error.field == "k (type)"
    assert error.found == str(number)
    error = refuse(craft.gguf([craft.string("k") + struct.pack("<IIQ", 9, number, 0)]))
    assert error.field == "k (type)"


@pytest.mark.parametrize(
    ("key", "found"),
    [("", "empty"), (b"\xff\xfe", "no UTF-8"), ("a\0b", "zero byte"), ("x" * 65536, "65,536 bytes")],
)
def test_bad_keys(refuse: Any, craft: Any, key: str | bytes, found: str) -> None:
    error = refuse(craft.gguf([craft.pair(key, "u32", 1)]))
    assert error.field.startswith("key 0")
    assert found in error.found


def test_duplicate_key(refuse: Any, craft: Any) -> None:
    error = refuse(craft.gguf([craft.pair("k", "u32", 1), craft.pair("k", "f32", 1.0)]))
    assert (error.field, error.offset) == ("k", 24 + 17)
    assert "first at byte 24" in error.found


@pytest.mark.parametrize("byte", [2, 128, 255])
def test_booleans(refuse: Any, craft: Any, byte: int) -> None:
    assert refuse(craft.gguf([craft.pair("k", "bool", byte)])).expected == "0 or 1"
    assert refuse(craft.gguf([craft.pair("k", "[bool]", [0, 1, byte])])).expected == "0 or 1"
    assert refuse(craft.gguf([craft.pair("k", "[bool]", [0] * 5000 + [byte])])).expected == "0 or 1"


@pytest.mark.parametrize("value", [0, 3, 33, 2**21, 2**31])
def test_alignment_values(refuse: Any, craft: Any, value: int) -> None:
    error = refuse(craft.gguf([craft.pair("general.alignment", "u32", value)]))
    assert (error.field, error.found) == ("general.alignment", str(value))


@pytest.mark.parametrize("kind", ["u64", "i32", "u8", "[u32]", "str"])
def test_alignment_type(refuse: Any, craft: Any, kind: str) -> None:
    value = {"[u32]": [32], "str": "32"}.get(kind, 32)
    error = refuse(craft.gguf([craft.pair("general.alignment", kind, value)]))
    assert error.expected == "type uint32"


@pytest.mark.parametrize(
    ("entry", "field", "word"),
    [
        (("a" * 64, [1]), "name", "64 bytes"),
        (("", [1]), "name", "empty"),
        ((b"\xc3(", [1]), "name", "UTF-8"),
        (("a", [0]), "shape", "(0,)"),
        (("a", [1, 0, 2]), "shape", "(1, 0, 2)"),
        (("a", [2**63]), "shape", str(2**63)),
        (("a", [2**32, 2**32]), "shape", str(2**32)),
        (("a", [4194305, 4194305, 211106198978564]), "shape", "4194305"),
        (("a", [1, 1, 1, 1, 1]), "dimension count", "5"),
        (("a", [31], 2), "row", "31 elements"),
        (("a", [255], 12), "row", "255 elements"),
        (("a", [1], 4), "type", "Q4_2"),
        (("a", [32], 31), "type", "Q4_0_4_4"),
        (("a", [1], 43), "type", "43"),
        (("a", [1], 2**32 - 1), "type", str(2**32 - 1)),
        (("a", [1], 0, 1), "offset", "1"),
        (("a", [1], 0, 32), "offset", "gap"),
        (("a", [2**40], 0, 0), "data", "a file of"),
    ],
)
def test_bad_tensor(refuse: Any, craft: Any, entry: tuple[Any, ...], field: str, word: str) -> None:
    error = refuse(craft.gguf([craft.other], [craft.tensor(*entry)], bytes(256)))
    assert error.field.endswith(field)
    assert word in error.found


def test_removed_type_names_its_successor(refuse: Any, craft: Any) -> None:
    assert "Q4_0" in refuse(craft.gguf([craft.other], [craft.tensor("a", [32], 33)], bytes(64))).advice


def test_second_tensor(refuse: Any, craft: Any) -> None:
    def second(*entry: Any) -> GGUFError:
        return refuse(craft.gguf([craft.other], [craft.tensor("a", [16]), craft.tensor(*entry)], bytes(256)))

    assert "a second time" in second("a", [1], 0, 64).found
    assert "overlaps" in second("b", [1], 0, 32).found
    assert "overlaps" in second("b", [1], 0, 0).found
    assert "gap" in second("b", [1], 0, 96).found


def test_truncated_data_names_tensor_and_sizes(refuse: Any, craft: Any) -> None:
    entries = [craft.tensor("one", [8]), craft.tensor("two", [8], 0, 32)]
    whole = craft.gguf([craft.other], entries, bytes(64))
    error = refuse(whole[:-1])
    assert error.field == "tensor 'two' data"
    assert error.found == f"a file of {len(whole) - 1} bytes"
    assert error.expected.startswith(f"{len(whole)} bytes")
    assert error.offset == len(whole) - 32


def test_every_truncation_is_a_typed_error(tmp_path: Path, craft: Any) -> None:
    keys = [
        craft.other,
        craft.pair("n", "u32", 1),
        craft.pair("t", "[str]", ["x", "yy"]),
        craft.pair("f", "[f32]", [1]),
    ]
    whole = craft.gguf(keys, [craft.tensor("a", [8, 2]), craft.tensor("b", [32], 8, 64)], bytes(64 + 34))
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(GGUFError):
            gguf_io.read(path)
    path.write_bytes(whole)
    assert len(gguf_io.read(path).tensors) == 2


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        gguf_io.read(tmp_path / "absent.gguf")
    with pytest.raises(InvalidFileError, match="folder"):
        gguf_io.read(tmp_path)
    with pytest.raises(EdgellamaError):
        gguf_io.read("a\0b.gguf")


@pytest.mark.skipif(not hasattr(__import__("os"), "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InvalidFileError, match="regular"):
        gguf_io.read(tmp_path / "pipe.gguf")


def test_strings_across_chunks(tmp_path: Path, craft: Any) -> None:
    """Reading in chunks finds the same strings wherever a chunk ends."""
    texts = ["x" * (index % 300) for index in range(20000)]
    path = tmp_path / "long.gguf"
    path.write_bytes(craft.gguf([craft.other, craft.pair("s", "[str]", texts), craft.pair("after", "u32", 7)]))
    header = gguf_io.read(path)
    info = header.get("s")
    assert isinstance(info, gguf_io.ArrayInfo)
    assert info.length == 20000
    assert header.get("after") == 7
    assert list(header.array("s")) == texts
    assert gguf_io.read(path, arrays=True).get("s") == tuple(texts)


def test_bad_utf8_in_a_value_is_told(tmp_path: Path, craft: Any) -> None:
    path = tmp_path / "value.gguf"
    path.write_bytes(craft.gguf([craft.other, craft.pair("general.name", "str", b"caf\xe9")]))
    header = gguf_io.read(path)
    assert header.text("general.name") == "caf�"
    assert "general.name" in header.notices[0]

"""The writer, read back by the gguf package; crash safety; sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgellama import gguf_io
from edgellama.errors import DiskFullError
from edgellama.gguf_io import GGMLType, TensorSpec, Typed, ValueType, header_bytes, writing

KEYS: dict[str, Any] = {
    "general.architecture": "marsupial",
    "general.type": "config",
    "a.bool": True,
    "a.count": 7,
    "a.negative": -7,
    "a.large": 2**40,
    "a.low": -(2**40),
    "a.real": 0.5,
    "a.double": Typed(0.1, ValueType.FLOAT64),
    "a.small": Typed(200, ValueType.UINT8),
    "a.words": ["", "é", "日本"],
    "a.numbers": [1, -2, 3],
    "a.reals": [0.25, 0.5],
    "a.flags": [True, False],
    "a.none": Typed([], ValueType.ARRAY, ValueType.STRING),
    "a.bytes": Typed([1, 255], ValueType.ARRAY, ValueType.UINT8),
}


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_equal_to_the_gguf_packages_reading(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "ours é.gguf"
    generator = np.random.default_rng(1)
    arrays = {"one": generator.standard_normal((3, 5)).astype(np.float32), "two": np.arange(34 * 2, dtype=np.uint8)}
    specs = [TensorSpec("one", (5, 3), GGMLType.F32), TensorSpec("two", (64,), GGMLType.Q8_0)]
    with writing(path, KEYS, specs, alignment=alignment) as out:
        out.write("one", arrays["one"].tobytes()[:7])
        out.write("one", memoryview(arrays["one"].tobytes())[7:])
        out.write("two", bytearray(arrays["two"].tobytes()))
    theirs = gguf.GGUFReader(path)
    found = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.") and k != "a.none"}
    expected = {key: value.value if isinstance(value, Typed) else value for key, value in KEYS.items()}
    del expected["a.none"]
    if alignment != 32:
        expected["general.alignment"] = alignment
    assert found == expected
    assert np.array_equal(theirs.tensors[0].data, arrays["one"])
    assert theirs.tensors[1].data.tobytes() == arrays["two"].tobytes()
    assert all(int(tensor.data_offset) % alignment == 0 for tensor in theirs.tensors)
    ours = gguf_io.read(path)
    assert [t.offset for t in ours.tensors] == [int(t.data_offset) for t in theirs.tensors]
    assert ours.get("a.none") == ()
    types = {key: f.types[0].name for key, f in theirs.fields.items()}
    assert (types["a.count"], types["a.negative"], types["a.real"]) == ("UINT32", "INT32", "FLOAT32")
    assert (types["a.large"], types["a.low"], types["a.double"]) == ("UINT64", "INT64", "FLOAT64")


def test_byte_identical_to_the_gguf_packages_writer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "marsupial")
    writer.add_uint32("marsupial.block_count", 2)
    writer.add_string("general.name", "pouch")
    writer.add_array("marsupial.list", [1.5, 2.5])
    writer.add_tensor("w", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    keys = {"general.architecture": "marsupial", "marsupial.block_count": 2, "general.name": "pouch"}
    with writing(
        tmp_path / "ours.gguf", keys | {"marsupial.list": [1.5, 2.5]}, [TensorSpec("w", (3, 2), GGMLType.F32)]
    ) as out:
        out.write("w", np.ones((2, 3), np.float32).tobytes())
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_nothing_appears_before_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    specs = [TensorSpec("w", (8,), GGMLType.F32)]

    def attempt(*chunks: tuple[str, int]) -> None:
        with writing(path, {}, specs) as out:
            for name, size in chunks:
                out.write(name, bytes(size))

    for chunks, message in (
        ((), "0 of 32 bytes"),
        ((("w", 16),), "16 of 32 bytes"),
        ((("w", 33),), "32 bytes"),
        ((("v", 32),), "not the next"),
        ((("w", 32), ("w", 1)), "not the next"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt(*chunks)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_disk_space_is_checked_first(tmp_path: Path) -> None:
    specs = [TensorSpec("w", (2**50,), GGMLType.F32)]
    with pytest.raises(DiskFullError, match="bytes are needed"), writing(tmp_path / "m.gguf", {}, specs):
        pytest.fail("nothing may be written")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "specs"),
    [
        ({"": 1}, []),
        ({"a\0": 1}, []),
        ({"k": []}, []),
        ({}, [TensorSpec("", (1,), GGMLType.F32)]),
        ({}, [TensorSpec("n" * 64, (1,), GGMLType.F32)]),
        ({}, [TensorSpec("n", (1, 1, 1, 1, 1), GGMLType.F32)]),
        ({}, [TensorSpec("n", (31,), GGMLType.Q8_0)]),
        ({}, [TensorSpec("n", (1,), GGMLType.F32)] * 2),
    ],
)
def test_what_cannot_be_written(keys: dict[str, Any], specs: list[TensorSpec]) -> None:
    with pytest.raises(ValueError):
        header_bytes(keys, specs)

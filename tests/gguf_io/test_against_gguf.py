"""Valid files by the gguf package's writer: accepted, and equal to what its reader finds."""

from __future__ import annotations

import io
import struct
import tempfile
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellama import gguf_io
from edgellama.errors import GGUFError
from edgellama.gguf_io.types import BLOCKS, SCALAR_BYTES

_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
_FLOATS = st.floats(width=32, allow_nan=False)
_SCALARS = st.one_of(
    st.tuples(st.just("UINT8"), st.integers(0, 255)),
    st.tuples(st.just("INT16"), st.integers(-(2**15), 2**15 - 1)),
    st.tuples(st.just("UINT32"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("INT64"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("UINT64"), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("FLOAT32"), _FLOATS),
    st.tuples(st.just("FLOAT64"), st.floats(allow_nan=False)),
    st.tuples(st.just("BOOL"), st.booleans()),
    st.tuples(st.just("STRING"), st.text(st.characters(codec="utf-8"), max_size=40)),
)
_ARRAYS = st.one_of(
    st.tuples(st.just("INT32"), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=2000)),
    st.tuples(st.just("FLOAT32"), st.lists(_FLOATS, min_size=1, max_size=20)),
    st.tuples(st.just("BOOL"), st.lists(st.booleans(), min_size=1, max_size=20)),
    st.tuples(st.just("STRING"), st.lists(st.text(st.characters(codec="utf-8"), max_size=9), min_size=1, max_size=9)),
)
_TENSOR_TYPES = [kind for kind in gguf_io.GGMLType if kind.name in gguf.GGMLQuantizationType.__members__]
_TENSORS = st.lists(
    st.tuples(
        st.sampled_from([kind for kind in _TENSOR_TYPES if kind.name != "Q8_1"]),
        st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ),
    max_size=5,
)
_FILES = st.tuples(
    st.dictionaries(_NAMES, st.one_of(_SCALARS, _ARRAYS), max_size=8), _TENSORS, st.sampled_from([8, 32, 64, 4096])
)


def _write(path: Path, keys: dict[str, Any], tensors: list[Any], alignment: int) -> None:
    writer = gguf.GGUFWriter(path, "edge-grammar")
    writer.add_type("config")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, (kind, value) in keys.items():
        value_type = gguf.GGUFValueType[kind]
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=value_type)
        else:
            writer.add_key_value(key, value, value_type)
    for index, (kind, shape) in enumerate(tensors):
        _, size = BLOCKS[kind]
        rows = list(reversed(shape[1:]))
        raw = np.zeros((*rows, shape[0] * size), np.uint8)
        writer.add_tensor(f"tensor {index}", raw, raw_dtype=gguf.GGMLQuantizationType[kind.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _same(ours: object, field: Any) -> bool:
    theirs = field.contents()
    return (list(ours) if isinstance(ours, tuple) else ours) == theirs


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(_FILES)
def test_valid_files_read_equal(file: tuple[dict[str, Any], list[Any], int]) -> None:
    keys, tensors, alignment = file
    keys = {key: value for key, value in keys.items() if not key.startswith(("general.", "GGUF.", "split."))}
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        path = Path(folder) / "grammar.gguf"
        _write(path, keys, tensors, alignment)
        ours = gguf_io.read(path, arrays=True)
        theirs = gguf.GGUFReader(path)
        fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
        assert set(ours.metadata) == set(fields)
        for key, field in fields.items():
            assert _same(ours.metadata[key], field), key
        assert ours.alignment == theirs.alignment
        if tensors:
            assert ours.data_offset == theirs.data_offset
        found = [(t.name, list(t.shape), t.type.name, t.offset, t.nbytes) for t in ours.tensors]
        expected = [
            (t.name, [int(n) for n in t.shape], t.tensor_type.name, int(t.data_offset), int(t.n_bytes))
            for t in theirs.tensors
        ]
        assert found == expected
        del theirs


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(_FILES, st.data())
def test_broken_files_raise_gguf_error_only(file: tuple[dict[str, Any], list[Any], int], data: st.DataObject) -> None:
    """Change, cut or insert bytes anywhere: the file is read, or GGUFError is raised, and nothing else."""
    keys, tensors, alignment = file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grammar.gguf"
        keys = {key: value for key, value in keys.items() if not key.startswith(("general.", "GGUF."))}
        _write(path, keys, tensors, alignment)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content)))
            patch = data.draw(st.one_of(st.binary(max_size=9), st.sampled_from(_EDGES)))
            if data.draw(st.booleans()):
                content[at : at + len(patch)] = patch
            else:
                content[at:at] = patch
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
        arrays = data.draw(st.booleans())
        with suppress(GGUFError):
            gguf_io.read(path, arrays=arrays)


_EDGES = [struct.pack("<Q", value) for value in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)]


def test_type_table_equals_the_gguf_package() -> None:
    for kind in _TENSOR_TYPES:
        if kind.name == "Q8_1":  # the package counts four bytes too many; ggml itself is asked below
            continue
        assert BLOCKS[kind] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]], kind
        assert kind == gguf.GGMLQuantizationType[kind.name]
    assert {kind.name: int(kind) for kind in gguf_io.ValueType} == {k.name: k.value for k in gguf.GGUFValueType}
    assert SCALAR_BYTES.keys() == set(gguf_io.ValueType) - {gguf_io.ValueType.STRING, gguf_io.ValueType.ARRAY}


@pytest.mark.llamacpp
def test_type_table_equals_ggml() -> None:
    """Every number ggml knows, with its block and byte sizes, asked from the library itself."""
    import ctypes

    llama_cpp = pytest.importorskip("llama_cpp")
    library = Path(llama_cpp.__file__).parent / "lib"
    found = sorted(library.glob("*ggml-base*"))
    if not found:
        pytest.skip(f"no ggml library in {library}")
    ggml = ctypes.CDLL(str(found[0]))
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    for number in range(43):
        block, size = int(ggml.ggml_blck_size(number)), int(ggml.ggml_type_size(number))
        assert BLOCKS.get(number, (0, 0)) == (block, size), number

"""Models in several files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgellama import gguf_io
from edgellama.errors import GGUFError
from edgellama.gguf_io import GGMLType, TensorSpec, Typed, ValueType, specimen, writing
from edgellama.gguf_io.splits import split_name

U16, I32 = ValueType.UINT16, ValueType.INT32


def _whole(folder: Path) -> gguf_io.Header:
    specimen.build(folder / "whole.gguf", "llama", width=32, tensor_type=GGMLType.F16)
    return gguf_io.read(folder / "whole.gguf", arrays=True)


def _split(folder: Path, count: int = 3, **changes: dict[str, Any]) -> list[Path]:
    """Write a specimen in parts as gguf-split does; `changes` by part number (`part1`) replace keys."""
    whole = _whole(folder)
    base = {key: Typed(whole.metadata[key], *whole.value_types[key]) for key in whole.metadata}
    size = -(-len(whole.tensors) // count)
    paths = []
    for index in range(count):
        keys: dict[str, Any] = dict(base) if index == 0 else {}
        keys |= {"split.no": Typed(index, U16), "split.count": Typed(count, U16)}
        keys["split.tensors.count"] = Typed(len(whole.tensors), I32)
        keys |= changes.get(f"part{index}", {})
        specs = [TensorSpec(t.name, t.shape, t.type) for t in whole.tensors[index * size : (index + 1) * size]]
        paths.append(folder / split_name("model é", index, count))
        with writing(paths[-1], {k: v for k, v in keys.items() if v is not None}, specs) as out:
            for spec in specs:
                out.write(spec.name, bytes(spec.nbytes))
    return paths


def test_any_part_opens_the_whole(tmp_path: Path) -> None:
    paths = _split(tmp_path)
    whole = gguf_io.read(tmp_path / "whole.gguf")
    for path in paths:
        header = gguf_io.read(path)
        assert header.path == str(paths[0])
        assert header.paths == tuple(str(p) for p in paths)
        assert header.parameters == whole.parameters
        assert header.weights_bytes == whole.weights_bytes
        assert header.file_size == sum(p.stat().st_size for p in paths)
        assert {t.split for t in header.tensors} == {0, 1, 2}
        assert header.architecture == "llama"


def test_parts_by_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "marsupial", split_max_tensors=2)
    writer.add_block_count(5)
    writer.add_context_length(8)
    writer.add_embedding_length(4)
    for index in range(5):
        writer.add_tensor(f"blk.{index}.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = gguf_io.read(tmp_path / "theirs-00002-of-00003.gguf")
    assert [t.name for t in header.tensors] == [f"blk.{index}.weight" for index in range(5)]
    for tensor in header.tensors:
        with Path(header.paths[tensor.split]).open("rb") as stream:
            stream.seek(tensor.offset)
            assert np.frombuffer(stream.read(tensor.nbytes), np.float32).tolist() == [1.0] * 16


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    paths = _split(tmp_path)
    paths[missing].unlink()
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(paths[(missing + 1) % 3])
    assert paths[missing].name in caught.value.found
    assert "3 parts" in caught.value.expected


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"part1": {"split.no": Typed(2, U16)}}, "split.no"),
        ({"part1": {"split.no": None}}, "split.no"),
        ({"part2": {"split.count": Typed(4, U16)}}, "split.count"),
        ({"part2": {"split.count": None}}, "split.count"),
        ({"part1": {"split.no": Typed(1, ValueType.UINT32)}}, "split.no"),
        ({"part0": {"split.count": Typed(3, ValueType.UINT32)}}, "split.count"),
        ({"part0": {"split.count": Typed(65535, U16)}}, "split.count"),
        ({"part0": {"split.tensors.count": Typed(99, I32)}}, "split.tensors.count"),
        ({"part0": {"split.tensors.count": None}}, "split.tensors.count"),
        ({"part0": {"split.tensors.count": Typed(21, ValueType.UINT64)}}, "split.tensors.count"),
        ({"part2": {"split.tensors.count": Typed(1, I32)}}, "split.tensors.count"),
        ({"part1": {"general.architecture": "qwen2"}}, "general.architecture"),
    ],
)
def test_inconsistent_parts(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(_split(tmp_path, **changes)[0])
    assert caught.value.field == field


def test_parts_of_other_sets_and_names(tmp_path: Path) -> None:
    paths = _split(tmp_path)
    shutil.copy(paths[0], tmp_path / "renamed.gguf")
    with pytest.raises(GGUFError, match="another name"):
        gguf_io.read(tmp_path / "renamed.gguf")
    shutil.copy(paths[1], tmp_path / split_name("other", 0, 3))
    with pytest.raises(GGUFError, match="another name"):
        gguf_io.read(tmp_path / split_name("other", 0, 3))
    shutil.copy(paths[0], paths[1])
    with pytest.raises(GGUFError):
        gguf_io.read(paths[0])


def test_the_same_tensor_in_two_parts(tmp_path: Path) -> None:
    paths = _split(tmp_path, 2)
    first = gguf_io.read(paths[0])
    specs = [TensorSpec(t.name, t.shape, t.type) for t in first.tensors if t.split == 0]
    keys = {"split.no": Typed(1, U16), "split.count": Typed(2, U16)}
    keys["split.tensors.count"] = Typed(len(first.tensors), I32)
    with writing(paths[1], keys, specs) as out:
        for spec in specs:
            out.write(spec.name, bytes(spec.nbytes))
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(paths[0])
    assert "also in" in caught.value.found


def test_a_truncated_part_is_named(tmp_path: Path) -> None:
    paths = _split(tmp_path)
    with paths[1].open("r+b") as stream:
        stream.truncate(paths[1].stat().st_size - 64)
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(paths[0])
    assert caught.value.path == str(paths[1])


def test_a_whole_file_with_the_name_of_a_part(tmp_path: Path) -> None:
    _whole(tmp_path)
    part = tmp_path / split_name("whole", 0, 2)
    shutil.copy(tmp_path / "whole.gguf", part)
    assert "part 1 of 2" in gguf_io.read(part).notices[0]


@pytest.mark.llamacpp
def test_llama_cpp_loads_the_parts(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    paths = _split(tmp_path)
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(paths[0]).encode(), options)
    assert model
    assert llama_cpp.llama_model_n_params(model) == gguf_io.read(paths[0]).parameters
    llama_cpp.llama_model_free(model)

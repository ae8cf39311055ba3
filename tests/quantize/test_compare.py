"""Comparing files: figures against NumPy on the dequantized whole, whatever the slabs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from edgellama.cli.main import main
from edgellama.gguf_io import TensorSpec, read, writing
from edgellama.quantize import Options, compare, quantize_file


def test_errors_are_those_of_the_dequantized_tensors(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_model("small", layers=2), tmp_path / "b.gguf"
    quantize_file(source, target, Options(recipe="Q6_K", threads=2))
    monkeypatch.setattr(compare, "SLAB_WEIGHTS", 1000)
    result = compare.compare(source, target, threads=2)
    assert not result.same
    assert result.metadata["general.file_type"][1] == 18
    left, right = ({t.name: t for t in GGUFReader(path).tensors} for path in (source, target))
    assert [t.name for t in result.tensors] == [t.name for t in read(source).tensors]
    for tensor in result.tensors:
        x, y = (dequantize(side[tensor.name].data, side[tensor.name].tensor_type).ravel() for side in (left, right))
        gap = (x - y).astype(np.float64)
        assert tensor.rmse == pytest.approx(np.sqrt((gap**2).mean()), rel=1e-5)
        assert tensor.relative_rmse == pytest.approx(np.linalg.norm(gap) / np.linalg.norm(x), rel=1e-5)
        assert tensor.largest == pytest.approx(np.abs(gap).max(), rel=1e-6)
        assert tensor.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-5)
        assert tensor.same == tensor.name.endswith("norm.weight")


def test_a_file_equals_itself_and_other_models_are_told(
    make_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_model("small", layers=2)
    assert main(["diff", str(source), str(source)]) == 0
    assert "the same model" in capsys.readouterr().out
    other = make_model("grown", layers=3, width=512)
    assert main(["diff", str(source), str(other), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not said["same"]
    assert said["metadata"]["llama.block_count"] == [2, 3]
    assert any(name.startswith("blk.2.") for name in said["only_b"])
    assert said["shapes"]["output_norm.weight"] == [[256], [512]]
    assert main(["diff", str(source), str(tmp_path / "none.gguf")]) == 3


def test_integer_tensors_are_compared_as_numbers(tmp_path: Path) -> None:
    from edgellama.gguf_io import GGMLType

    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path, last in zip(paths, (4, 9), strict=True):
        with writing(path, {"general.type": "imatrix"}, [TensorSpec("t", (4,), GGMLType.I32)]) as out:
            out.write("t", np.array([1, 2, 3, last], "<i4").tobytes())
    (tensor,) = compare.compare(*paths).tensors
    assert tensor.largest == 5

"""llama.cpp's own quantizer as the oracle, and small models whose layers make every rule speak."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgellama.gguf_io import GGMLType, TensorSpec, read, specimen, writing
from edgellama.quantize.imatrix import Imatrix

MakeModel = Callable[..., Path]
Native = Callable[..., None]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`make(name, architecture, layers, width, type, keys)` writes a random model with weights like real ones."""
    folder = tmp_path_factory.mktemp("sources")

    def make(
        name: str,
        architecture: str = "llama",
        layers: int = 8,
        width: int = 256,
        type: GGMLType = GGMLType.BF16,
        keys: Mapping[str, object] | None = None,
    ) -> Path:
        path = folder / f"{name}.gguf"
        if path.exists():
            return path
        shapes = folder / f"{name}.shapes.gguf"
        specimen.build(shapes, architecture, layers=layers, width=width, keys=keys, tensor_type=GGMLType.F16)
        header = read(shapes)
        rng = np.random.default_rng(len(header.tensors))
        specs = [TensorSpec(t.name, t.shape, type if len(t.shape) > 1 else GGMLType.F32) for t in header.tensors]
        values = specimen.metadata(architecture, layers=layers, width=width) | dict(keys or {})
        with writing(path, values, specs) as out:
            for spec in specs:
                weights = (rng.standard_t(4, int(np.prod(spec.shape))) * 0.02).astype(np.float32)
                out.write(spec.name, _packed(weights, spec.type))
        return path

    return make


def _packed(weights: NDArray[np.float32], kind: GGMLType) -> bytes:
    if kind is GGMLType.BF16:
        return (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return weights.astype(np.float16 if kind is GGMLType.F16 else np.float32).tobytes()


@pytest.fixture(scope="session")
def native() -> Native:
    """`native(source, target, file_type, matrix=None, pure=..., ...)` runs llama_model_quantize."""
    library: Any = pytest.importorskip("llama_cpp.llama_cpp")

    def quantize(source: Path, target: Path, file_type: int, matrix: Imatrix | None = None, **flags: Any) -> None:
        parameters = library.llama_model_quantize_default_params()
        parameters.nthread, parameters.ftype = 2, file_type
        keep = [_matrix(library, parameters, matrix)] if matrix else []
        patterns = flags.pop("patterns", ())
        if patterns:
            overrides = (library.llama_model_tensor_override * (len(patterns) + 1))()
            for slot, (regex, kind) in zip(overrides, patterns, strict=False):
                slot.pattern, slot.type = regex.encode(), int(kind)
            overrides[len(patterns)].type = 43
            parameters.tt_overrides = overrides
            keep.append(overrides)
        layers = flags.pop("prune", ())
        if layers:
            array = (ctypes.c_int32 * (len(layers) + 1))(*layers, -1)
            parameters.prune_layers = array
            keep.append(array)
        for name, value in flags.items():
            setattr(parameters, name, value)
        code = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
        assert code == 0
        assert keep is not None

    return quantize


def _matrix(library: Any, parameters: Any, matrix: Imatrix) -> Any:
    entries = (library.llama_model_imatrix_data * (len(matrix.entries) + 1))()
    for slot, (name, values) in zip(entries, matrix.entries.items(), strict=False):
        slot.name, slot.size = name.encode(), values.size
        slot.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    overrides = (library.llama_model_kv_override * 5)()
    texts = [("quantize.imatrix.file", matrix.path), ("quantize.imatrix.dataset", matrix.datasets[0])]
    numbers = [
        ("quantize.imatrix.entries_count", len(matrix.entries)),
        ("quantize.imatrix.chunks_count", matrix.chunks),
    ]
    for slot, (key, text) in zip(overrides, texts, strict=False):
        slot.tag, slot.key, slot.value.val_str = 3, key.encode(), text.encode()[:127]
    for index, (key, number) in enumerate(numbers, len(texts)):
        overrides[index].tag, overrides[index].key, overrides[index].value.val_i64 = 0, key.encode(), number
    parameters.imatrix, parameters.kv_overrides = entries, overrides
    return entries, overrides

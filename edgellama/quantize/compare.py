"""What differs between two GGUF files: metadata, tensor types, and the error of each tensor, in bounded memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellama.gguf_io import ArrayInfo, Header, TensorInfo, read
from edgellama.gguf_io.types import BLOCKS
from edgellama.quantize.source import SourceFile, to_float32

SLAB_WEIGHTS = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Error of one tensor of B against A. `cosine` is None where one of them is zero."""

    name: str
    shape: tuple[int, ...]
    types: tuple[str, str]
    rmse: float
    relative_rmse: float
    """RMSE over A's root mean square."""
    largest: float
    cosine: float | None

    @property
    def same(self) -> bool:
        """Whether all values are equal."""
        return self.largest == 0


@dataclass(slots=True)
class Comparison:
    """All differences. Metadata values are None where a key is missing."""

    metadata: dict[str, tuple[object, object]] = field(default_factory=dict)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Tensors whose shapes differ; their values are not compared."""
    tensors: list[TensorDifference] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether both files hold the same model."""
        plain = not (self.metadata or self.only_a or self.only_b or self.shapes)
        return plain and all(t.same and t.types[0] == t.types[1] for t in self.tensors)


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    threads: int = 0,
    on_progress: Callable[[float, str], None] | None = None,
) -> Comparison:
    """Compare two files. Raises GGUFError, InvalidFileError, UnsupportedError."""
    first, second = read(a), read(b)
    result = Comparison(metadata=_metadata(first, second))
    mine, theirs = {t.name: t for t in first.tensors}, {t.name: t for t in second.tensors}
    result.only_a = [name for name in mine if name not in theirs]
    result.only_b = [name for name in theirs if name not in mine]
    pairs = []
    for name, tensor in mine.items():
        other = theirs.get(name)
        if other is not None and _trimmed(tensor) != _trimmed(other):
            result.shapes[name] = tensor.shape, other.shape
        elif other is not None:
            pairs.append((tensor, other))
    total = sum(tensor.elements for tensor, _ in pairs)
    files = [SourceFile(path) for path in first.paths], [SourceFile(path) for path in second.paths]
    done = 0
    try:
        with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
            work = pool.map(lambda pair: _difference(pair[0], pair[1], files), pairs)
            for (tensor, _), difference in zip(pairs, work, strict=True):
                result.tensors.append(difference)
                done += tensor.elements
                if on_progress is not None:
                    on_progress(done / max(1, total), tensor.name)
    finally:
        for file in (*files[0], *files[1]):
            file.close()
    return result


def _trimmed(tensor: TensorInfo) -> tuple[int, ...]:
    shape = tensor.shape
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _metadata(first: Header, second: Header) -> dict[str, tuple[object, object]]:
    mine, theirs = first.encoded_metadata(), second.encoded_metadata()
    return {
        key: (_shown(first.get(key)), _shown(second.get(key)))
        for key in (*mine, *(key for key in theirs if key not in mine))
        if mine.get(key) != theirs.get(key)
    }


def _shown(value: object) -> object:
    if isinstance(value, ArrayInfo):
        return f"{value.length} x {value.type.name.lower()}"
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return value


@dataclass(slots=True)
class _Sums:
    a: float = 0.0
    b: float = 0.0
    ab: float = 0.0
    error: float = 0.0
    largest: float = 0.0

    def add(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
        gap = a - b
        self.a += float(np.vdot(a, a))
        self.b += float(np.vdot(b, b))
        self.ab += float(np.vdot(a, b))
        self.error += float(np.vdot(gap, gap))
        self.largest = max(self.largest, float(np.abs(gap).max(initial=0.0)))


def _difference(a: TensorInfo, b: TensorInfo, files: tuple[list[SourceFile], list[SourceFile]]) -> TensorDifference:
    sums = _Sums()
    for left, right in zip(_slabs(a, files[0][a.split]), _slabs(b, files[1][b.split]), strict=True):
        sums.add(left, right)
    scale = math.sqrt(sums.a * sums.b)
    return TensorDifference(
        a.name,
        a.shape,
        (a.type.name, b.type.name),
        math.sqrt(sums.error / a.elements),
        math.sqrt(sums.error / sums.a) if sums.a else 0.0,
        sums.largest,
        min(1.0, sums.ab / scale) if scale else None,
    )


def _slabs(tensor: TensorInfo, file: SourceFile) -> Iterator[NDArray[np.float32]]:
    """A tensor's values in slabs of whole rows, float32[n]; integers are read as such."""
    k = tensor.shape[0]
    block, size = BLOCKS[tensor.type]
    stride, rows = k // block * size, tensor.elements // k
    step = max(1, SLAB_WEIGHTS // k)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = file.read(tensor.offset + first * stride, count * stride, tensor.name)
        file.forget(tensor.offset + first * stride, raw.nbytes)
        integers = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}
        if tensor.type.name in integers:
            yield raw.view(integers[tensor.type.name]).astype(np.float32).reshape(-1)
        else:
            yield to_float32(raw.reshape(count, stride), tensor.type).reshape(-1)

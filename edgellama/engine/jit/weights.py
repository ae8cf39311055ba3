"""Tensors of a validated file, mapped read-only from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from edgellama.errors import EngineLoadError, UnsupportedError
from edgellama.gguf_io import GGMLType, Header, TensorInfo
from edgellama.gguf_io.types import BLOCKS

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix (or stack of matrices) as it lies in the file."""

    name: str
    type: GGMLType
    data: Bytes
    """uint8[matrices, rows, bytes per row]."""
    columns: int
    """Values per row, the length of the vectors it is multiplied with."""

    @property
    def rows(self) -> int:
        """Length of the product."""
        return int(self.data.shape[1])

    @property
    def matrices(self) -> int:
        """1, or the number of experts."""
        return int(self.data.shape[0])

    def floats(self, rows: slice | NDArray[np.integer] | None = None, matrix: int = 0) -> NDArray[np.float32]:
        """Rows of one matrix, dequantized: float32[rows, columns]."""
        data = self.data[matrix] if rows is None else self.data[matrix, rows]
        if self.type is GGMLType.F32:
            return np.ascontiguousarray(data).view(np.float32)
        from gguf.quants import dequantize

        values: NDArray[np.float32] = dequantize(np.ascontiguousarray(data), GGMLQuantizationType(int(self.type)))
        return values.reshape(len(data), self.columns)

    def vector(self) -> NDArray[np.float32]:
        """All values, for norms and biases: float32[n]."""
        return self.floats().reshape(-1)

    def slabs(self, matrix: int = 0, most: int = 1 << 22) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        """(first row, end, dequantized rows) in parts of about `most` values."""
        step = max(1, most // max(1, self.columns))
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            yield start, stop, self.floats(slice(start, stop), matrix)


def load_weights(header: Header, *, mapped: bool, on_tensor: Callable[[float], None]) -> dict[str, Weight]:
    """All tensors of `header` by name. `mapped` False reads them into memory instead.

    `on_tensor(fraction)` is called after each one. Raises `EngineLoadError` when a file changed since it was validated.
    """
    files = [_open(path, mapped) for path in header.paths]
    found: dict[str, Weight] = {}
    for done, tensor in enumerate(header.tensors, 1):
        found[tensor.name] = _weight(tensor, files[tensor.split], header.paths[tensor.split])
        on_tensor(done / len(header.tensors))
    return found


def _open(path: str, mapped: bool) -> Bytes:
    try:
        if mapped:
            return np.asarray(np.memmap(path, np.uint8, "r"))
        return np.fromfile(path, np.uint8)
    except (OSError, ValueError) as error:
        raise EngineLoadError(f"{path}: the model's weights cannot be read: {error}") from error


def _weight(tensor: TensorInfo, file: Bytes, path: str) -> Weight:
    if tensor.offset + tensor.nbytes > len(file):
        raise EngineLoadError(f"{path}: tensor {tensor.name!r} ends behind the file's end: it changed while loading")
    if int(tensor.type) not in {int(known) for known in GGMLQuantizationType}:
        raise UnsupportedError(
            f"the JIT engine cannot read tensors of type {tensor.type.name} ({tensor.name})", "use the engine llamacpp"
        )
    shape = tensor.shape + (1,) * (3 - len(tensor.shape))
    block, size = BLOCKS[tensor.type]
    row_bytes = shape[0] // block * size
    data = file[tensor.offset : tensor.offset + tensor.nbytes].reshape(shape[2], shape[1], row_bytes)
    return Weight(tensor.name, tensor.type, data, shape[0])

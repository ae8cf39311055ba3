"""Keys and values of all cells, per layer, in one of the cache's types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import KVType
from edgellama.engine.jit.model import Model
from edgellama.errors import MemoryShortageError, UnsupportedError
from edgellama.rope import rotate

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
TYPES: tuple[KVType, ...] = ("f32", "f16", "bf16", "q8_0")
_Q8_BLOCK = 32


def row_bytes(kind: KVType, width: int) -> int:
    """Bytes of one head's vector of `width` values."""
    if kind == "f32":
        return 4 * width
    if kind in ("f16", "bf16"):
        return 2 * width
    return width // _Q8_BLOCK * (2 + _Q8_BLOCK)


def check_type(kind: KVType, width: int, name: str) -> None:
    """Raise `UnsupportedError` for a cache type this engine lacks or a head it does not divide."""
    if kind not in TYPES:
        raise UnsupportedError(f"{name} {kind}: the JIT engine keeps its cache in {', '.join(TYPES)}")
    if kind == "q8_0" and width % _Q8_BLOCK:
        raise UnsupportedError(f"{name} q8_0 needs heads of a multiple of 32 values, not {width}", "use f16")


def encode(values: Floats, kind: KVType) -> Bytes:
    """float64[..., width] -> uint8[..., row bytes], rounding as ggml does."""
    single = np.ascontiguousarray(values, np.float32)
    if kind == "f32":
        return single.view(np.uint8)
    if kind == "f16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).view(np.uint8)
    if kind == "bf16":
        bits = single.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.ascontiguousarray(rounded.astype(np.uint16)).view(np.uint8)
    blocks = single.reshape(*single.shape[:-1], -1, _Q8_BLOCK)
    scale = np.abs(blocks).max(-1) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = blocks * inverse[..., None]
    quants = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    packed = np.empty((*blocks.shape[:-1], 2 + _Q8_BLOCK), np.uint8)
    packed[..., :2] = scale.astype(np.float16)[..., None].view(np.uint8)
    packed[..., 2:] = quants.view(np.uint8)
    return packed.reshape(*single.shape[:-1], -1)


def decode(data: Bytes, kind: KVType) -> Floats:
    """uint8[..., row bytes] -> float64[..., width]."""
    data = np.ascontiguousarray(data)
    if kind == "f32":
        return data.view(np.float32).astype(np.float64)
    if kind == "f16":
        return data.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    blocks = data.reshape(*data.shape[:-1], -1, 2 + _Q8_BLOCK)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    values: Floats = blocks[..., 2:].view(np.int8) * scale
    return values.reshape(*data.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class LayerStore:
    """One layer: uint8[heads, cells, row bytes] each."""

    keys: Bytes
    values: Bytes


class Storage:
    """The cache's memory. Pages that no token has touched take none."""

    def __init__(self, model: Model, cells: int, key_type: KVType, value_type: KVType) -> None:
        check_type(key_type, model.key_length, "kv_type_key")
        check_type(value_type, model.value_length, "kv_type_value")
        self._model, self.key_type, self.value_type = model, key_type, value_type
        sizes = row_bytes(key_type, model.key_length), row_bytes(value_type, model.value_length)
        try:
            self.layers = tuple(
                LayerStore(*(np.zeros((layer.heads_kv, cells, size), np.uint8) for size in sizes))
                for layer in model.layers
            )
        except MemoryError as error:
            total = sum(layer.heads_kv * cells * sum(sizes) for layer in model.layers)
            raise MemoryShortageError(
                f"the KV cache for {cells:,} tokens needs {total:,} bytes", "use a smaller context or fewer sequences"
            ) from error

    def store(self, layer: int, cells: NDArray[np.int32], keys: Floats, values: Floats) -> None:
        """Write float64[n, heads, width] into `cells`."""
        self.layers[layer].keys[:, cells] = encode(keys.transpose(1, 0, 2), self.key_type)
        self.layers[layer].values[:, cells] = encode(values.transpose(1, 0, 2), self.value_type)

    def keys(self, layer: int, cells: NDArray[np.int32]) -> Floats:
        """float64[heads, n, width]."""
        return decode(self.layers[layer].keys[:, cells], self.key_type)

    def values(self, layer: int, cells: NDArray[np.int32]) -> Floats:
        """float64[heads, n, width]."""
        return decode(self.layers[layer].values[:, cells], self.value_type)

    def relocate(self, after: NDArray[np.int32], before: NDArray[np.int32], delta: int) -> None:
        """Copy cells `before` to `after`, turning their keys by `delta` positions."""
        copied = after != before
        for layer, store in zip(self._model.layers, self.layers, strict=True):
            store.values[:, after[copied]] = store.values[:, before[copied]]
            if layer.rope < 0:
                store.keys[:, after[copied]] = store.keys[:, before[copied]]
                continue
            rope = self._model.ropes[layer.rope]
            angles = rope.angles(np.array([delta]))
            keys = self.keys(layer.index, before)
            rotate(keys, np.cos(angles), np.sin(angles), rope.layout)
            store.keys[:, after] = encode(keys, self.key_type)

    def gather(self, cells: NDArray[np.int32]) -> bytes:
        """The content of `cells`, layer after layer."""
        parts = [part[:, cells].tobytes() for store in self.layers for part in (store.keys, store.values)]
        return b"".join(parts)

    def gathered_bytes(self, cells: int) -> int:
        """Length of `gather` for that many cells."""
        return sum(
            part.shape[0] * part.shape[2] * cells for store in self.layers for part in (store.keys, store.values)
        )

    def scatter(self, cells: NDArray[np.int32], data: memoryview) -> None:
        """Write what `gather` returned into `cells`."""
        offset = 0
        for store in self.layers:
            for part in (store.keys, store.values):
                heads, _, size = part.shape
                count = heads * len(cells) * size
                part[:, cells] = np.frombuffer(data, np.uint8, count, offset).reshape(heads, len(cells), size)
                offset += count

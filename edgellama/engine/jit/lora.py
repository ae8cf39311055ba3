"""LoRA adapters from GGUF files: y = W x + scale * alpha / rank * B (A x). Hu et al. 2021, arXiv 2106.09685."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import LoraAdapter
from edgellama.engine.jit.weights import Weight, load_weights
from edgellama.errors import EngineLoadError, InvalidFileError, UnsupportedError
from edgellama.gguf_io import GGMLType, Header, read

Pair = tuple[Weight, Weight]
_A, _B = ".lora_a", ".lora_b"
_STEP = 8
"""Ranks are filled up with zeros to a multiple of this: kernels take rows of whole vectors."""
_ADVICE = "use the adapter with the model it was made for"


def load_adapters(
    adapters: tuple[LoraAdapter, ...], header: Header, tensors: Mapping[str, Weight]
) -> dict[str, tuple[Pair, ...]]:
    """The pairs (A, scaled B) of every matrix that adapters change, by the matrix's name.

    Raises `NotFoundError`, `InvalidFileError` for what is no adapter, `EngineLoadError` for one of another model,
    `UnsupportedError` for adapted tensors this engine does not adapt.
    """
    found: dict[str, tuple[Pair, ...]] = {}
    for adapter in adapters:
        for name, pair in _pairs(adapter, header, tensors):
            found[name] = (*found.get(name, ()), pair)
    return found


def _pairs(adapter: LoraAdapter, header: Header, tensors: Mapping[str, Weight]) -> list[tuple[str, Pair]]:
    file = read(adapter.path)
    kind = file.text("adapter.type")
    if file.kind != "adapter" or kind != "lora":
        raise InvalidFileError(f"{adapter.path}: this is no LoRA adapter but {kind or 'a ' + file.kind}")
    if file.architecture != header.architecture:
        raise EngineLoadError(
            f"{adapter.path}: an adapter for {file.architecture} models, the model is {header.architecture}", _ADVICE
        )
    alpha = file.get("adapter.lora.alpha", 0.0)
    parts = load_weights(file, mapped=False, on_tensor=lambda _: None)
    names = [name.removesuffix(_A) for name in parts if name.endswith(_A)]
    if len(parts) != 2 * len(names):
        raise InvalidFileError(f"{adapter.path}: {len(parts)} tensors are no whole number of LoRA pairs")
    return [
        (name, _pair(adapter, name, parts, tensors, float(alpha) if isinstance(alpha, (int, float)) else 0.0))
        for name in names
    ]


def _pair(
    adapter: LoraAdapter, name: str, parts: Mapping[str, Weight], tensors: Mapping[str, Weight], alpha: float
) -> Pair:
    base, a, b = tensors.get(name), parts[name + _A], parts.get(name + _B)
    if base is None or b is None:
        missing = "the model has no such tensor" if base is None else "its second half is missing"
        raise EngineLoadError(f"{adapter.path}: tensor {name!r}: {missing}", _ADVICE)
    if base.matrices > 1 or not name.startswith("blk.") or a.matrices > 1:
        raise UnsupportedError(
            f"the JIT engine cannot adapt {name!r} ({adapter.path})", "use the engine llamacpp for this adapter"
        )
    down, up = a.floats(), b.floats()
    rank = len(down)
    if down.shape[1] != base.columns or up.shape != (base.rows, rank):
        raise EngineLoadError(
            f"{adapter.path}: tensor {name!r} has shapes {down.shape} and {up.shape}, the model's matrix is "
            f"{(base.rows, base.columns)}",
            _ADVICE,
        )
    scale = adapter.scale * alpha / rank if alpha else adapter.scale
    whole = -(-rank // _STEP) * _STEP
    filled_down, filled_up = np.zeros((whole, down.shape[1]), np.float32), np.zeros((len(up), whole), np.float32)
    filled_down[:rank], filled_up[:, :rank] = down, up * np.float32(scale)
    return _matrix(name + _A, filled_down), _matrix(name + _B, filled_up)


def _matrix(name: str, values: NDArray[np.float32]) -> Weight:
    return Weight(name, GGMLType.F32, values.view(np.uint8)[None], values.shape[1])

"""LoRA adapters of the JIT engine against merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgellama.engine import jit
from edgellama.engine.base import Batch, EngineOptions, LoraAdapter
from edgellama.errors import EngineLoadError, InvalidFileError, NotFoundError, UnsupportedError
from edgellama.gguf_io import GGMLType, TensorSpec, writing

Rows = NDArray[np.float32]
TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, 260, 20)]
ADAPTED = {"attn_q": (128, 128), "attn_k": (64, 128), "attn_output": (128, 128), "ffn_down": (128, 256)}


def write_adapter(path: Path, tensors: dict[str, Rows], *, architecture: str = "llama", alpha: float = 8.0) -> Path:
    keys = {"general.type": "adapter", "general.architecture": architecture, "adapter.type": "lora"}
    specs = [TensorSpec(name, data.shape[::-1], GGMLType.F32) for name, data in tensors.items()]
    with writing(path, {**keys, "adapter.lora.alpha": alpha}, specs) as out:
        for name, data in tensors.items():
            out.write(name, np.ascontiguousarray(data, np.float32).tobytes())
    return path


def pairs(rank: int, seed: int = 1) -> dict[str, Rows]:
    draw = np.random.default_rng(seed)
    found: dict[str, Rows] = {}
    for layer in range(2):
        for name, (rows, columns) in ADAPTED.items():
            base = f"blk.{layer}.{name}.weight"
            found[f"{base}.lora_a"] = (draw.standard_normal((rank, columns)) * 0.1).astype(np.float32)
            found[f"{base}.lora_b"] = (draw.standard_normal((rows, rank)) * 0.1).astype(np.float32)
    return found


def logits(path: Path, exact: bool, *loras: LoraAdapter) -> Rows:
    options = EngineOptions(context_tokens=64, threads=1, kv_type_key="f32", kv_type_value="f32", loras=loras)
    with jit.load(str(path), options, exact=exact) as engine:
        assert engine.capabilities.lora
        return engine.decode(Batch.one_sequence(TOKENS, 0, logits="all")).copy()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_adapters_equal_merged_weights(
    write_tiny_llama: Callable[..., Path], tmp_path: Path, exact: bool, rank: int
) -> None:
    first, second = pairs(rank), pairs(rank, seed=2)

    def merge(name: str, weights: Rows) -> Rows:
        for found, scale in ((first, 0.5 * 8 / rank), (second, -1.5)):
            if f"{name}.lora_a" in found:
                weights = weights + np.float32(scale) * found[f"{name}.lora_b"] @ found[f"{name}.lora_a"]
        return weights

    plain, merged = write_tiny_llama(tmp_path / "m.gguf"), write_tiny_llama(tmp_path / "merged.gguf", change=merge)
    adapters = (
        LoraAdapter(str(write_adapter(tmp_path / "1.gguf", first)), 0.5),
        LoraAdapter(str(write_adapter(tmp_path / "2.gguf", second, alpha=0.0)), -1.5),  # no alpha: no division
    )
    expected, found = logits(merged, exact), logits(plain, exact, *adapters)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert np.abs(logits(plain, exact) - expected).max() > 0.3


def test_wrong_adapters_are_refused(write_tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf")
    good = pairs(4)
    half = {name: data for name, data in good.items() if not name.endswith("blk.0.attn_q.weight.lora_b")}
    wide = good | {"blk.0.attn_q.weight.lora_a": np.zeros((4, 64), np.float32)}
    unknown = {name.replace("blk.0", "blk.7"): data for name, data in good.items()}
    table = {"token_embd.weight.lora_a": np.zeros((4, 128), np.float32)}
    table["token_embd.weight.lora_b"] = np.zeros((273, 4), np.float32)
    cases: list[tuple[type[Exception], Path]] = [
        (NotFoundError, tmp_path / "none.gguf"),
        (InvalidFileError, model),
        (InvalidFileError, write_adapter(tmp_path / "half.gguf", half)),
        (EngineLoadError, write_adapter(tmp_path / "wide.gguf", wide)),
        (EngineLoadError, write_adapter(tmp_path / "unknown.gguf", unknown)),
        (EngineLoadError, write_adapter(tmp_path / "other.gguf", good, architecture="qwen2")),
        (UnsupportedError, write_adapter(tmp_path / "table.gguf", table)),
    ]
    for error, path in cases:
        with pytest.raises(error):
            logits(model, False, LoraAdapter(str(path)))

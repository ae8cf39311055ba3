"""Small random models of every family, with everything random that a family may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from edgellama.gguf_io import GGMLType, TensorSpec, read, specimen, writing

MakeModel = Callable[..., Path]
_BIASED = ("qwen2", "qwen2moe", "seed_oss", "llama")
_MORE_KEYS: dict[str, dict[str, object]] = {
    "gemma": {"attention.key_length": 32, "attention.value_length": 32},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": {"rope.freq_base": 1e6, "rope.freq_base_swa": 5000.0, "final_logit_softcapping": 4.0},
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 2.0},
    "granitemoe": {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 32},
    "phi3": {"rope.dimension_count": 12},
    "qwen3": {"attention.key_length": 32, "attention.value_length": 32},
}


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """`make(architecture, keys={}, vectors={}, width=64)` writes a model; `vectors` adds tensors of one dimension."""

    def make(
        architecture: str,
        keys: Mapping[str, object] | None = None,
        vectors: Mapping[str, np.ndarray] | None = None,
        width: int = 64,
        layers: int = 7,
    ) -> Path:
        added = {**_MORE_KEYS.get(architecture, {}), **(keys or {})}
        named = {f"{architecture}.{name}": value for name, value in added.items()}
        path = tmp_path / f"{architecture}.gguf"
        specimen.build(path, architecture, keys=named, layers=layers, width=width)
        values = specimen.metadata(architecture, layers=layers, width=width) | named
        tensors = _random(path, architecture, layers) | dict(vectors or {})
        specs = [TensorSpec(name, data.shape[::-1], GGMLType.F32) for name, data in tensors.items()]
        with writing(path, values, specs) as out:
            for name, data in tensors.items():
                out.write(name, np.ascontiguousarray(data, np.float32).tobytes())
        return path

    return make


def _random(path: Path, architecture: str, layers: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(sum(architecture.encode()))
    found: dict[str, np.ndarray] = {}
    for tensor in read(path).tensors:
        data = draw.standard_normal(tensor.shape[::-1])
        norm = "norm" in tensor.name
        found[tensor.name] = 1 + 0.3 * data if norm else data * (1.5 / np.sqrt(tensor.shape[0]))
        if tensor.name == "token_embd.weight":
            found[tensor.name] = data
    if architecture in _BIASED:
        for layer in range(layers):
            for name in ("attn_q", "attn_k", "attn_v"):
                rows = found[f"blk.{layer}.{name}.weight"].shape[0]
                found[f"blk.{layer}.{name}.bias"] = draw.standard_normal(rows)
    return found

"""Logits of the JIT engine against llama.cpp's, family by family, on random models in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgellama.engine import jit, llamacpp
from edgellama.engine.base import Batch, EngineOptions
from edgellama.engine.jit.families import ARCHITECTURES
from edgellama.errors import UnsupportedError

pytestmark = pytest.mark.llamacpp
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

MakeModel = Callable[..., Path]
Rows = NDArray[np.float32]
_HALF_GELU = ("gemma", "gemma2", "gemma3")
"""llama.cpp looks GELU up in a table of float16, which costs three decimal digits."""


def options(**changes: object) -> EngineOptions:
    plain: dict[str, object] = {
        "context_tokens": 128,
        "threads": 1,
        "kv_type_key": "f32",
        "kv_type_value": "f32",
        "flash_attention": "off",
        "repack_weights": False,
    }
    return EngineOptions(**(plain | changes))  # type: ignore[arg-type]


def logits(engine: jit.JitEngine | llamacpp.LlamaEngine, tokens: list[int], start: int = 0) -> Rows:
    return engine.decode(Batch.one_sequence(tokens, start, logits="all")).copy()


def compare(path: Path, tokens: list[int], tolerance: float, **changes: object) -> None:
    """Exact and fast mode against llama.cpp, relative to the spread of the logits."""
    with llamacpp.load(str(path), options(**changes)) as engine:
        expected = logits(engine, tokens)
    assert expected.std() > 0.1
    for exact in (True, False):
        with jit.load(str(path), options(**changes), exact=exact) as ours:
            found = logits(ours, tokens)
        assert np.abs(found - expected).max() < tolerance * expected.std(), f"exact={exact}"


def draw_tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 260, n)]


def expert_gates(layers: int) -> dict[str, NDArray[np.float64]]:
    """Tensors that files of Llama's shape may leave out."""
    draw = np.random.default_rng(5)
    return {f"blk.{layer}.ffn_gate_exps.weight": draw.standard_normal((4, 128, 64)) / 5 for layer in range(layers)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_family(make_model: MakeModel, architecture: str) -> None:
    tolerance = 2e-2 if architecture in _HALF_GELU else 1e-4
    more = expert_gates(7) if architecture == "granitemoe" else None
    compare(make_model(architecture, vectors=more), draw_tokens(60), tolerance)


def test_mixtral_is_a_llama_with_experts(make_model: MakeModel) -> None:
    keys = {"expert_count": 4, "expert_used_count": 2}
    compare(make_model("llama", keys, expert_gates(7)), draw_tokens(60), 1e-4)


def test_experts_without_gates_are_refused(make_model: MakeModel) -> None:
    path = make_model("llama", {"expert_count": 4, "expert_used_count": 2})
    with pytest.raises(UnsupportedError, match="gate"):
        jit.load(str(path), options())


def test_llama3_frequency_factors(make_model: MakeModel) -> None:
    factors = np.geomspace(1, 8, 8)
    compare(make_model("llama", vectors={"rope_freqs.weight": factors}), draw_tokens(60), 1e-4)


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
def test_scaling_within_and_beyond_the_original_context(make_model: MakeModel, scaling: str) -> None:
    """120 tokens, trained for 32: positions inside and past the original context."""
    keys = {
        "rope.scaling.type": scaling,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "context_length": 128,
    }
    for architecture in ("llama", "qwen2"):
        compare(make_model(architecture, keys), draw_tokens(120), 1e-4)


@pytest.mark.parametrize("context", [256, 512])
def test_longrope_chooses_its_factors_by_the_context(make_model: MakeModel, context: int) -> None:
    vectors = {"rope_factors_short.weight": np.linspace(1, 2, 6), "rope_factors_long.weight": np.linspace(1, 30, 6)}
    keys = {
        "rope.scaling.type": "longrope",
        "rope.scaling.attn_factor": 1.19,
        "rope.scaling.original_context_length": 256,
        "context_length": 1024,
    }
    path = make_model("phi3", keys, vectors, layers=2)
    compare(path, draw_tokens(context - 200), 1e-4, context_tokens=context)


def test_a_window_in_every_layer_but_each_sixth(make_model: MakeModel) -> None:
    """100 tokens through windows of 16, in chunks, so that windows reach back into the cache."""
    path, tokens = make_model("gemma3"), draw_tokens(100)
    with llamacpp.load(str(path), options()) as engine:
        expected = logits(engine, tokens)
    for exact in (True, False):
        with jit.load(str(path), options(), exact=exact) as ours:
            found = np.concatenate([logits(ours, tokens[i : i + 9], i) for i in range(0, 100, 9)])
        assert np.abs(found - expected).max() < 2e-2 * expected.std()


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_cache_types(make_model: MakeModel, kind: str) -> None:
    """A coarser cache differs from the float32 one, and from llama.cpp's by no more than its own rounding."""
    path, tokens = make_model("llama", width=128), draw_tokens(60)
    changes = {"kv_type_key": kind, "kv_type_value": kind, "flash_attention": "on" if kind == "q8_0" else "off"}
    with llamacpp.load(str(path), options()) as engine:
        full = logits(engine, tokens)
    with llamacpp.load(str(path), options(**changes)) as engine:
        theirs = np.abs(logits(engine, tokens) - full)
    found = []
    for exact in (True, False):
        with jit.load(str(path), options(**changes), exact=exact) as ours:
            found.append(logits(ours, tokens))
        error = np.abs(found[-1] - full)
        assert 0 < error.mean() < 1.5 * theirs.mean()
    assert np.abs(found[0] - found[1]).mean() < 0.5 * np.abs(found[0] - full).mean()


def test_mean_embeddings(make_model: MakeModel) -> None:
    path, tokens = make_model("qwen3"), draw_tokens(30)
    with llamacpp.load(str(path), options(embeddings=True, pooling="mean")) as engine:
        expected = engine.embed(Batch.one_sequence(tokens, 0)).copy()
    for pooling in ("mean", "last", "cls"):
        with llamacpp.load(str(path), options(embeddings=True, pooling=pooling)) as engine:
            expected = engine.embed(Batch.one_sequence(tokens, 0)).copy()
        for exact in (True, False):
            with jit.load(str(path), options(embeddings=True, pooling=pooling, micro_batch_tokens=7), exact=exact) as e:
                np.testing.assert_allclose(e.embed(Batch.one_sequence(tokens, 0)), expected, atol=2e-4)

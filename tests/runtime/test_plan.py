from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellama.engine.base import EngineOptions, KVType
from edgellama.engine.probe import FileMark
from edgellama.errors import MemoryShortageError
from edgellama.gguf_io import specimen
from edgellama.runtime.model import ModelSpec
from edgellama.runtime.plan import DEFAULT_CONTEXT_TOKENS, CacheShape, Layer, choose, compute_bytes, kv_bytes, predict

GIB = 1 << 30


def llama_8b(**fields: Any) -> ModelSpec:
    """Llama 3.1 8B: 32 layers, 8 KV heads of 128, vocabulary 128256."""
    shape = CacheShape((Layer(1024, 1024),) * 32, 4096, 14336, 32, 128256)
    values: dict[str, Any] = {
        "name": "Llama 3.1 8B",
        "path": "x.gguf",
        "engine": "llamacpp",
        "options": EngineOptions(),
        "identity": "x",
        "mark": FileMark(size_bytes=0, header_sha256=""),
        "architecture": "llama",
        "shape": shape,
        "weights_bytes": 4_920_000_000,
        "trained_context_tokens": 131072,
    }
    return ModelSpec(**(values | fields))


@pytest.mark.parametrize(
    ("kind", "gib"),
    # The well-known 128 KiB a token: 32 layers x 2 x 1024 numbers x 2 bytes; others by their bits per number.
    [("f16", 1.0), ("f32", 2.0), ("q8_0", 1.0 * 34 / 64), ("q4_0", 1.0 * 18 / 64), ("q5_1", 1.0 * 24 / 64)],
)
def test_the_cache_of_an_8b_model(kind: KVType, gib: float) -> None:
    options = EngineOptions(context_tokens=8192, kv_type_key=kind, kv_type_value=kind)
    assert kv_bytes(llama_8b().shape, options) == gib * GIB


def test_every_sequence_has_its_own_context() -> None:
    shape = llama_8b().shape
    one = kv_bytes(shape, EngineOptions(context_tokens=4096))
    assert kv_bytes(shape, EngineOptions(context_tokens=4096, sequences=4)) == 4 * one


def test_without_a_wish_the_context_follows_the_memory() -> None:
    spec = llama_8b()
    assert choose(spec, 64 * GIB).options.context_tokens == DEFAULT_CONTEXT_TOKENS
    tight = choose(spec, int(5.8 * GIB))
    assert 512 <= tight.options.context_tokens < DEFAULT_CONTEXT_TOKENS
    assert tight.fits
    short = llama_8b(trained_context_tokens=2048)
    assert choose(short, 64 * GIB).options.context_tokens == 2048


def test_an_asked_context_is_kept_or_refused_with_figures_and_advice() -> None:
    spec = llama_8b(options=EngineOptions(context_tokens=131072))
    assert choose(spec, 64 * GIB).options.context_tokens == 131072
    with pytest.raises(MemoryShortageError) as caught:
        choose(spec, 16 * GIB)
    assert "KV cache 16,384" in caught.value.message
    assert "131072 tokens" in caught.value.message
    assert "--ctx" in caught.value.advice
    assert "q8_0" in caught.value.advice


@pytest.mark.parametrize(("wanted", "memory_gib"), [(999_999_999, 64), (999_999_999, 8), (131072, 8)])
def test_the_context_that_is_advised_fits(wanted: int, memory_gib: int) -> None:
    with pytest.raises(MemoryShortageError) as caught:
        choose(llama_8b(options=EngineOptions(context_tokens=wanted)), memory_gib * GIB)
    found = re.search(r"--ctx (\d+)", caught.value.advice)
    assert found is not None
    advised = int(found[1])
    assert "trained for 131,072" in caught.value.advice
    assert advised <= 131072
    assert choose(llama_8b(options=EngineOptions(context_tokens=advised)), memory_gib * GIB).fits
    if advised < 131072:
        with pytest.raises(MemoryShortageError):
            choose(llama_8b(options=EngineOptions(context_tokens=advised + 256)), memory_gib * GIB)


def test_a_model_larger_than_memory_is_refused_whatever_the_context() -> None:
    with pytest.raises(MemoryShortageError, match=r"weights 4,692"):
        choose(llama_8b(), 4 * GIB)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 18), st.integers(1, 8))
def test_what_is_chosen_fits_and_leaves_the_reserve(available: int, context: int, sequences: int) -> None:
    spec = llama_8b(options=EngineOptions(context_tokens=context, sequences=sequences))
    try:
        plan = choose(spec, available)
    except MemoryShortageError:
        assert not predict(spec, spec.options, available).fits
        return
    assert plan.total_bytes + plan.reserve_bytes <= available
    assert plan.options.context_tokens == context


@given(st.integers(256, 1 << 17), st.integers(1, 1024))
def test_more_context_or_a_larger_batch_never_needs_less(context: int, batch: int) -> None:
    shape = llama_8b().shape

    def total(**fields: Any) -> int:
        options = EngineOptions(flash_attention="off", **fields)
        return kv_bytes(shape, options) + compute_bytes(shape, options)

    small = total(context_tokens=context, micro_batch_tokens=batch)
    assert total(context_tokens=context * 2, micro_batch_tokens=batch) >= small
    assert total(context_tokens=context, micro_batch_tokens=batch + 1) >= small


# ---- against llama.cpp's own figures

_ASK = """
import json, re, sys
from edgellama.engine import factory
from edgellama.engine.base import EngineOptions
from edgellama.engine.llamacpp.log import RING
found = []
for path in sys.argv[2:]:
    mark = RING.mark()
    options = EngineOptions(context_tokens=8192, threads=1, flash_attention=sys.argv[1])
    factory("llamacpp")(path, options).close()
    lines = RING.since(mark)
    sizes = [sum(float(re.search(r"= *([0-9.]+) MiB", line)[1]) for line in lines if re.search(what, line))
             for what in ("(KV|RS) buffer size", "compute buffer size")]
    found.append(sizes)
print(json.dumps(found))
"""
# Grouped heads, one head group per head, two kinds of windows, experts, compressed caches.
_ARCHITECTURES = ("llama", "gpt2", "gemma2", "gemma3", "gpt-oss", "qwen3moe", "olmoe", "deepseek2", "cohere2")


@pytest.mark.llamacpp
@pytest.mark.parametrize("flash", ["on", "off"])
def test_cache_and_scratch_are_what_llama_cpp_allocates(tmp_path: Path, flash: Any) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    paths = [tmp_path / f"{name}.gguf" for name in _ARCHITECTURES]
    for path in paths:
        specimen.build(path, path.stem)
    command = [sys.executable, "-c", _ASK, flash, *map(str, paths)]
    output = subprocess.run(command, check=True, capture_output=True, timeout=120).stdout
    for path, (cache, scratch) in zip(paths, json.loads(output.splitlines()[-1]), strict=True):
        shape = ModelSpec.from_file(path).shape
        options = EngineOptions(context_tokens=8192, flash_attention=flash)
        assert kv_bytes(shape, options) / 2**20 == pytest.approx(cache, abs=0.01), path.stem
        predicted = compute_bytes(shape, options) / 2**20
        assert 0.85 * scratch <= predicted <= 2.1 * scratch, (path.stem, predicted, scratch)

"""The engine on llama.cpp against the bare library, and its refusals."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgellama.engine import factory
from edgellama.engine.base import Batch, EngineOptions, LoraAdapter
from edgellama.errors import (
    ContextOverflowError,
    EngineError,
    EngineLoadError,
    InvalidFileError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)

pytestmark = pytest.mark.llamacpp
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from edgellama.engine.llamacpp import bindings as native  # noqa: E402
from edgellama.engine.llamacpp import state as envelope  # noqa: E402
from edgellama.engine.llamacpp.engine import LlamaEngine  # noqa: E402

Load = Callable[..., LlamaEngine]
Rows = NDArray[np.float32]


@pytest.fixture
def load(tiny_llama_gguf: Path) -> Iterator[Load]:
    made: list[LlamaEngine] = []

    def make(path: Path = tiny_llama_gguf, **options: Any) -> LlamaEngine:
        settings = {"context_tokens": 256, "sequences": 4, "threads": 2}
        made.append(LlamaEngine(str(path), EngineOptions(**(settings | options))))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def rows_of(engine: LlamaEngine, tokens: list[int], start: int = 0, sequence: int = 0) -> Rows:
    return engine.decode(Batch.one_sequence(tokens, start, sequence, "all")).copy()


class Bare:
    """llama.cpp used the plain way: one context of 256 tokens, a batch filled token by token."""

    def __init__(self, path: Path, *, embeddings: bool = False) -> None:
        self.c = c = native.bindings()
        self.model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 256, 256, 2, 2
        params.embeddings, params.pooling_type = embeddings, 0
        self.context = c.llama_init_from_model(self.model, params)
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.batch = c.llama_batch_init(256, 0, 1)

    def run(self, tokens: list[int], start: int = 0) -> None:
        for i, token in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i] = token, start + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0], self.batch.logits[i] = 1, 0, 1
        self.batch.n_tokens = len(tokens)
        assert self.c.llama_decode(self.context, self.batch) == 0

    def logits(self, i: int) -> Rows:
        return np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, i), (self.vocabulary,)).copy()

    def token_embedding(self, i: int, width: int) -> Rows:
        return np.ctypeslib.as_array(self.c.llama_get_embeddings_ith(self.context, i), (width,)).copy()

    def close(self) -> None:
        self.c.llama_batch_free(self.batch)
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)


@pytest.fixture
def bare(tiny_llama_gguf: Path) -> Iterator[Callable[..., Bare]]:
    made: list[Bare] = []

    def make(**options: Any) -> Bare:
        made.append(Bare(tiny_llama_gguf, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_logits_are_those_of_the_bare_library_bit_for_bit(
    load: Load, bare: Callable[..., Bare], tokens: list[int]
) -> None:
    engine, plain = load(sequences=1, micro_batch_tokens=256), bare()
    plain.run(tokens)
    assert np.array_equal(rows_of(engine, tokens), np.stack([plain.logits(i) for i in range(len(tokens))]))
    for i in range(20):
        plain.run([tokens[i]], len(tokens) + i)
        ours = engine.decode(Batch.one_sequence([tokens[i]], len(tokens) + i))
        assert np.array_equal(ours[0], plain.logits(0))


def test_logits_are_a_view_of_the_librarys_memory(load: Load, tokens: list[int]) -> None:
    engine = load()
    first = engine.decode(Batch.one_sequence(tokens[:1], 0))
    before = first.copy()
    second = engine.decode(Batch.one_sequence(tokens[1:2], 1))
    assert second.base is not None
    assert np.shares_memory(first, second)
    assert not np.array_equal(before, second)


def test_more_rows_than_one_call_may_compute(load: Load, tokens: list[int]) -> None:
    whole, parts = load(logits_rows=256), load(sequences=1, logits_rows=7)
    batch = Batch.one_sequence(tokens, 0, 0, "none")
    batch.want_logits[::2] = True
    expected = whole.decode(batch).copy()
    np.testing.assert_allclose(parts.decode(batch), expected, atol=0.05)
    with pytest.raises(ContextOverflowError):
        parts.decode(Batch.one_sequence(tokens * 6, 40, 0, "all"))
    assert parts.sequence_length(0) == 40


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_pooled_embeddings_come_from_the_token_embeddings(
    load: Load, bare: Callable[..., Bare], tokens: list[int], pooling: str
) -> None:
    engine, plain = load(embeddings=True, pooling=pooling), bare(embeddings=True)
    plain.run(tokens)
    each = np.stack([plain.token_embedding(i, engine.info.embedding_length) for i in range(len(tokens))])
    expected = {"mean": each.mean(0), "last": each[-1], "cls": each[0]}[pooling]
    np.testing.assert_allclose(engine.embed(Batch.one_sequence(tokens, 0))[0], expected, atol=2e-3)


def test_pooling_defaults_to_the_mean_and_none_is_refused(load: Load, tokens: list[int]) -> None:
    default, mean = load(embeddings=True), load(embeddings=True, pooling="mean")
    batch = Batch.one_sequence(tokens, 0)
    np.testing.assert_array_equal(default.embed(batch), mean.embed(batch))
    with pytest.raises(UnsupportedError):
        load(embeddings=True, pooling="none").embed(batch)


def test_a_text_longer_than_the_context_is_not_embedded(load: Load, tokens: list[int]) -> None:
    engine = load(embeddings=True, context_tokens=100, sequences=2)
    with pytest.raises(ContextOverflowError):
        engine.embed(Batch.one_sequence(tokens * 3, 0))
    assert engine.embed(Batch.one_sequence(tokens, 0, 1)).shape[0] == 1


def test_lora_adapter_equals_merged_weights(
    load: Load, write_tiny_llama: Callable[..., Path], tmp_path: Path, tokens: list[int]
) -> None:
    import gguf

    draw = np.random.default_rng(3)
    name, rank, alpha, strength = "blk.0.attn_q.weight", 4, 8.0, 0.5
    a, b = (draw.standard_normal(shape).astype(np.float32) * 0.2 for shape in ((rank, 128), (128, rank)))
    adapter = tmp_path / "adapter.gguf"
    writer = gguf.GGUFWriter(adapter, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    writer.add_tensor(f"{name}.lora_a", a)
    writer.add_tensor(f"{name}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def merge(tensor: str, weights: Rows) -> Rows:
        return weights + np.float32(strength * alpha / rank) * (b @ a) if tensor == name else weights

    merged = load(write_tiny_llama(tmp_path / "merged.gguf", change=merge))
    adapted = load(loras=(LoraAdapter(str(adapter), strength),))
    expected = rows_of(merged, tokens)
    np.testing.assert_allclose(rows_of(adapted, tokens), expected, atol=0.05)
    assert float(np.abs(rows_of(load(), tokens) - expected).max()) > 1
    with pytest.raises(NotFoundError):
        load(loras=(LoraAdapter(str(tmp_path / "none.gguf")),))
    with pytest.raises(EngineLoadError, match=r"llama\.cpp:"):
        load(loras=(LoraAdapter(str(tmp_path / "merged.gguf")),))


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"])
def test_every_kv_type_computes_about_the_same(load: Load, tokens: list[int], kv_type: str) -> None:
    exact = load(kv_type_key="f32", kv_type_value="f32")
    engine = load(kv_type_key=kv_type, kv_type_value=kv_type, flash_attention="on", sequences=1)
    found, expected = rows_of(engine, tokens), rows_of(exact, tokens)
    assert float(np.corrcoef(found.ravel(), expected.ravel())[0, 1]) > (0.9 if "4" in kv_type else 0.98)


@pytest.mark.parametrize("change", [{"flash_attention": "off"}, {"repack_weights": False}, {"use_mmap": False}])
def test_settings_that_only_change_rounding(load: Load, tokens: list[int], change: dict[str, Any]) -> None:
    np.testing.assert_allclose(rows_of(load(**change), tokens), rows_of(load(), tokens), atol=0.05)


def test_quantized_values_without_flash_attention_are_refused_with_the_reason(load: Load) -> None:
    with pytest.raises(EngineLoadError, match=r"llama\.cpp:.*flash_attn"):
        load(kv_type_value="q8_0", flash_attention="off")


def test_broken_files_are_refused_with_the_reason(load: Load, tiny_llama_gguf: Path, tmp_path: Path) -> None:
    data = tiny_llama_gguf.read_bytes()
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GGUF", b"not a model", data[: len(data) // 2]):
        broken.write_bytes(content)
        with pytest.raises(EngineLoadError, match=r"llama\.cpp:"):
            load(broken)
    with pytest.raises(NotFoundError):
        load(tmp_path / "missing.gguf")
    with pytest.raises(NotFoundError):
        load(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"sequences": 257}, {"sequences": 0}, {"context_tokens": 2**31}, {"threads": 513}, {"batch_tokens": 0}]
)
def test_options_that_would_abort_the_process_are_refused(load: Load, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load(**wrong)


def test_many_short_sequences_are_not_computed_as_one_long_context(
    load: Load, write_tiny_llama: Callable[..., Path], tmp_path: Path, tokens: list[int]
) -> None:
    path = write_tiny_llama(tmp_path / "longrope.gguf", long_rope_above=512)
    alone = rows_of(load(path, sequences=1, context_tokens=512), tokens)
    several = load(path, sequences=4, context_tokens=512)
    assert not several.capabilities.copy_range
    np.testing.assert_allclose(rows_of(several, tokens, sequence=3), alone, atol=0.05)
    long = load(path, sequences=4, context_tokens=1024)
    assert long.capabilities.copy_range
    assert float(np.abs(rows_of(long, tokens) - alone).max()) > 1


def test_a_failed_step_tells_the_librarys_reason(load: Load, tokens: list[int]) -> None:
    engine = load()
    rows_of(engine, tokens)
    with pytest.raises(EngineError, match=r"llama\.cpp: .*position"):
        engine.decode(Batch.one_sequence(tokens, 3))


def test_a_state_of_another_model_is_refused(
    load: Load, write_tiny_llama: Callable[..., Path], tmp_path: Path, tokens: list[int]
) -> None:
    engine = load()
    rows_of(engine, tokens)
    adapted = load(flash_attention="off")
    with pytest.raises(InvalidFileError):
        adapted.restore_sequence(0, engine.save_sequence(0))


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 20])
def test_a_state_the_library_itself_refuses_changes_nothing(load: Load, tokens: list[int], offset: int) -> None:
    engine = load(sequences=2)
    cold = rows_of(engine, tokens)
    state = bytearray(engine.save_sequence(0))
    rows_of(engine, tokens[:30], sequence=1)
    at = envelope.HEADER_BYTES + offset
    state[at : at + 4] = b"\xff\xff\x00\x00"
    sealed = envelope.seal(state, len(tokens), engine._layout)
    with pytest.raises(InvalidFileError, match=r"refused"):
        engine.restore_sequence(1, sealed)
    assert engine.sequence_length(1) == 30
    np.testing.assert_allclose(rows_of(engine, tokens[30:], 30, 1), cold[30:], atol=0.05)


def test_thread_pools_compute_the_same(load: Load, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows_of(load(), tokens)
    for module in ("loading", "engine"):
        monkeypatch.setattr(f"edgellama.engine.llamacpp.{module}.uses_openmp", lambda: False)
    engine = load()
    assert engine._handles.pools
    np.testing.assert_allclose(rows_of(engine, tokens), expected, atol=0.05)
    engine.set_threads(1, 2)
    np.testing.assert_allclose(rows_of(engine, tokens, sequence=1), expected, atol=0.05)


def test_python_ticker_serves_as_well(load: Load, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from edgellama.engine.llamacpp.ticker import PythonTicker

    counted = load()
    rows_of(counted, tokens)
    monkeypatch.setattr("edgellama.engine.llamacpp.loading.new_ticker", PythonTicker)
    engine = load()
    assert isinstance(engine._ticker, PythonTicker)
    rows_of(engine, tokens)
    assert engine._ticker.count() == counted._ticker.count() > 20


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.3.35")
    with pytest.raises(EngineLoadError, match=r"0\.3\.35.*0\.3\.36") as caught:
        native.bindings.__wrapped__()
    assert "pip install" in caught.value.advice


def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = native.bindings()
    for name, value in (("_SIZES", {"llama_batch": 64}), ("_CONTEXT_DEFAULTS", {"n_ctx": 4096})):
        with monkeypatch.context() as patch:
            patch.setattr(native, name, value)
            with pytest.raises(EngineLoadError):
                native._check_layout(module)


def test_a_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(EngineLoadError, match="not installed"):
        native.bindings.__wrapped__()


def test_the_high_level_package_is_not_imported_and_stays_importable() -> None:
    code = (
        "import sys; from edgellama.engine.llamacpp.bindings import bindings; c = bindings();"
        "assert 'jinja2' not in sys.modules and 'diskcache' not in sys.modules, 'imported';"
        "import llama_cpp; assert llama_cpp.llama_cpp is c and llama_cpp.Llama"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_backend_build_names_version_device_and_file() -> None:
    build = native.backend_build()
    assert f"llama-cpp-python {native.PINNED}" in build
    assert "CPU" in build
    assert build == native.backend_build()


def test_pieces_of_any_length_equal_the_librarys_detokenizer(load: Load) -> None:
    tokenizer = load().tokenizer
    c, vocabulary = native.bindings(), tokenizer._vocabulary
    longest = 0
    for token in range(tokenizer.size):
        ids, room = (ctypes.c_int32 * 2)(100, token), ctypes.create_string_buffer(4096)
        count = c.llama_detokenize(vocabulary, ids, 2, room, len(room), False, False)
        assert room.raw[:count] == tokenizer.piece(100) + tokenizer.piece(token)
        longest = max(longest, len(tokenizer.piece(token)))
    assert longest > 64


def test_factory_knows_its_engines() -> None:
    assert factory("llamacpp")
    with pytest.raises(UsageError):
        factory("other")

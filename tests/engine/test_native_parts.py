"""The small parts under the engine on llama.cpp that need no model."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from edgellama.engine import ggml, threads
from edgellama.engine.llamacpp.log import LogRing
from edgellama.engine.llamacpp.ticker import PythonTicker, SemaphoreTicker, Ticker
from edgellama.errors import EngineLoadError

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
DEBUG, INFO, WARN, ERROR, CONTINUE = 1, 2, 3, 4, 5

TICKERS = [
    PythonTicker,
    pytest.param(SemaphoreTicker, marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux")),
]


@pytest.mark.parametrize("kind", TICKERS)
def test_ticker_counts_and_stops(kind: type[Ticker]) -> None:
    ticker = kind(CALLBACK)  # type: ignore[call-arg]
    tick = lambda: ticker.callback(ticker.data)  # noqa: E731
    ticker.abort()
    ticker.begin()
    assert [tick() for _ in range(5)] == [False] * 5
    assert ticker.count() == 5
    ticker.abort()
    assert tick()
    assert tick()
    after = ticker.count()
    assert after >= 5
    ticker.end()
    ticker.begin()
    assert not tick()
    assert ticker.count() == after + 1
    ticker.end()
    ticker.abort()
    ticker.begin()
    assert not tick()


@pytest.mark.skipif(sys.platform != "linux", reason="needs unnamed semaphores")
def test_semaphore_ticker_never_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellama.engine.llamacpp.ticker._FULL", 1000)
    monkeypatch.setattr("edgellama.engine.llamacpp.ticker._REFILL_BELOW", 500)
    ticker = SemaphoreTicker(CALLBACK)
    for _ in range(30):
        ticker.begin()
        assert not any(ticker.callback(ticker.data) for _ in range(400))
        ticker.end()
    assert ticker.count() == 30 * 400


def test_log_joins_continued_lines_and_drops_debug() -> None:
    ring = LogRing(lines=4)
    mark = ring.mark()
    ring.write(INFO, b"first\n")
    ring.write(DEBUG, b"the user's prompt\n")
    ring.write(WARN, b"half ")
    ring.write(CONTINUE, b"and half\n")
    ring.write(INFO, b".")
    ring.write(CONTINUE, b".")
    ring.write(CONTINUE, b".\n")
    ring.write(ERROR, b"caf\xe9 failed\nagain\n")
    assert ring.since(mark) == ["half and half", "...", "caf\ufffd failed", "again"]
    assert ring.since(mark, logging.WARNING) == ["half and half", "caf\ufffd failed", "again"]
    assert ring.since(ring.mark()) == []
    assert "first" not in ring.reason(mark)
    ring.write(ERROR, b"x" * 10_000 + b"\n")
    assert len(ring.reason(mark)) < 2000


def test_log_of_debug_parts_is_dropped_with_its_continuations() -> None:
    ring = LogRing()
    ring.write(DEBUG, b"secret ")
    ring.write(CONTINUE, b"more secret\n")
    ring.write(INFO, b"open\n")
    assert ring.since(0) == ["open"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_slow_cores_and_siblings_are_left_out(tmp_path: Path) -> None:
    cpus = tmp_path / "devices" / "system" / "cpu"
    for cpu in range(8):
        write(cpus / f"cpu{cpu}" / "cpu_capacity", "414" if cpu < 4 else "1024")
        write(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list", str(cpu))
    assert threads._fast_cores(set(range(8)), cpus) == 4
    assert threads._fast_cores({0, 1, 7}, cpus) == 1
    assert threads._fast_cores({0, 1}, cpus) == 2  # only slow ones allowed: all of them
    for cpu in range(8):
        (cpus / f"cpu{cpu}" / "cpu_capacity").unlink()
        write(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    assert threads._fast_cores(set(range(8)), cpus) == 4
    write(tmp_path / "devices" / "cpu_core" / "cpus", "0-1,4-5")
    assert threads._fast_cores(set(range(8)), cpus) == 2
    assert threads._fast_cores({0, 1}, tmp_path / "nothing") == 2


@pytest.mark.parametrize(("text", "expected"), [("150000 100000", 2), ("max 100000", sys.maxsize), ("", sys.maxsize)])
def test_cgroup_quota(tmp_path: Path, text: str, expected: int) -> None:
    write(tmp_path / "cpu.max", text)
    assert threads._quota(tmp_path / "cpu.max") == expected


def test_default_threads_fit_the_machine() -> None:
    assert 1 <= threads.default_threads() <= (os.cpu_count() or 1)


def test_library_folder_can_be_moved_and_must_hold_the_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert ggml.library_folder() == tmp_path
    assert ggml._libraries.__wrapped__() == ()
    (tmp_path / "libggml.so").write_bytes(b"not a library")
    assert ggml.library_identity() != ""
    if sys.platform == "linux":
        with pytest.raises(EngineLoadError):
            ggml._libraries.__wrapped__()


@pytest.mark.llamacpp
class TestLibrary:
    """Against the installed library."""

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

    def test_devices_never_claim_the_cpus_memory(self) -> None:
        found = {device.kind: device for device in ggml.devices()}
        assert found["cpu"].name
        assert (found["cpu"].free_bytes, found["cpu"].total_bytes) == (None, None)

    def test_unknown_functions_are_an_error(self) -> None:
        with pytest.raises(EngineLoadError, match="ggml_no_such_function"):
            ggml.function("ggml_no_such_function", None)

    def test_the_libraries_quantizer_is_reachable(self) -> None:
        import gguf

        rows = np.random.default_rng(1).standard_normal((4, 256), np.float32)
        quantize = ggml.function(
            "ggml_quantize_chunk",
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        )
        expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
        found = np.zeros_like(expected)
        assert quantize(8, rows.ctypes.data, found.ctypes.data, 0, 4, 256, None) == found.nbytes
        assert np.array_equal(found, expected)

    def test_tensors_can_be_read_while_the_graph_runs(self, tiny_llama_gguf: Path, tokens: list[int]) -> None:
        from edgellama.engine.llamacpp.bindings import bindings

        c = bindings()
        name_of = ggml.function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        size_of = ggml.function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        read: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

        @c.ggml_backend_sched_eval_callback  # type: ignore[untyped-decorator]
        def look(tensor: int, ask: bool, _data: object) -> bool:
            wanted = name_of(tensor) == b"result_output"
            if wanted and not ask:
                read.append(np.empty(size_of(tensor), np.uint8))
                ggml.read_tensor(tensor, 0, read[-1])
            return wanted or not ask

        model = c.llama_model_load_from_file(str(tiny_llama_gguf).encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.cb_eval = 256, look
        context = c.llama_init_from_model(model, params)
        ids = (ctypes.c_int32 * 5)(*tokens[:5])
        assert c.llama_decode(context, c.llama_batch_get_one(ids, 5)) == 0
        size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        logits = np.ctypeslib.as_array(c.llama_get_logits(context), (size,)).copy()
        c.llama_free(context)
        c.llama_model_free(model)
        assert len(read) == 1
        assert np.array_equal(read[0].view(np.float32), logits)

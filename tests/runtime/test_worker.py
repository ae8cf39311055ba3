"""The worker as a real process on real pipes: what it answers, and how it ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edgellama.chat.messages import TextPart
from edgellama.engine.base import EngineOptions
from edgellama.engine.fake import Fault
from edgellama.runtime import exits
from edgellama.runtime.messages import (
    Abort,
    CallFailed,
    Cancel,
    Embedded,
    EmbedTexts,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    Prefilled,
    Probe,
    Probed,
    RequestFailed,
    Shutdown,
    Step,
    Tokenize,
    Tokens,
    WorkerFailed,
    frame,
)
from edgellama.sampling.options import SamplingOptions


def _client() -> ModuleType:
    place = Path(__file__).with_name("worker_client.py")
    spec = importlib.util.spec_from_file_location("worker_client", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker_client"] = module
    spec.loader.exec_module(module)
    return module


client = _client()
worker, script, generate = client.worker, client.script, client.generate
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux")


# ---- answering


def test_from_hello_to_goodbye(tmp_path: Path) -> None:
    with worker() as it:
        loaded = it.load(script(tmp_path, say="Grüße 😀", adds_bos=True))
        assert loaded.info.engine == "fake"
        assert (loaded.bos_text, loaded.eos_text, loaded.adds_bos) == ("<s>", "<|im_end|>", True)
        assert set(loaded.end_tokens) == {257, 259, 260}
        assert "<|im_start|>" in loaded.control_texts
        text, steps, end = it.answer(generate())
        assert (text, end.reason, len(steps)) == ("Grüße 😀", "stop", end.completion_tokens)
        it.send(Shutdown())
        assert it.wait() == 0
        hello = it.seen[0]
        assert hello.pid == it.process.pid
        assert [m.fraction for m in it.seen if isinstance(m, LoadProgress)][-1] == 1.0
        assert it.stderr == ""


def test_tokenizing_does_not_wait_for_a_step(tmp_path: Path) -> None:
    with worker() as it:
        it.load(script(tmp_path, step_seconds=600.0))
        it.send(generate(), Tokenize(call_id=7, parts=(TextPart("<s>hi"),), add_bos=True))
        assert it.until(Tokens).tokens == (256, 104, 105)
        assert not any(isinstance(m, Step | Finished) for m in it.seen)
        it.send(Cancel("a"))
        assert it.until(Finished).reason == "cancelled"


def test_the_heart_beats_during_a_step_and_shows_progress(tmp_path: Path) -> None:
    with worker() as it:
        it.load(script(tmp_path, step_seconds=600.0))
        it.send(generate())
        first = it.until(Heartbeat, lambda beat: beat.busy == ("a",))
        second = it.until(Heartbeat)
        assert second.progress > first.progress
        assert second.resident_bytes > 1 << 20
        assert second.peak_bytes >= second.resident_bytes or sys.platform != "linux"


def test_the_heart_beats_during_a_hang_without_progress(tmp_path: Path) -> None:
    hang = Fault(kind="hang", phase="decode", step=2)
    with worker() as it:
        it.load(script(tmp_path, say="hello", faults=(hang,)))
        it.send(generate())
        it.until(Heartbeat, lambda beat: beat.busy == ("a",))
        beats = [it.until(Heartbeat) for _ in range(3)]
        assert len({beat.progress for beat in beats[1:]}) == 1


def test_a_hang_that_heeds_the_abort_fails_only_the_request(tmp_path: Path) -> None:
    hang = Fault(kind="hang", phase="decode", step=2, heeds_abort=True)
    with worker() as it:
        it.load(script(tmp_path, say="hello", faults=(hang,)))
        it.send(generate())
        it.until(Step)
        it.until(Heartbeat)
        it.send(Abort())
        assert it.until(RequestFailed).kind == "AbortedError"
        assert it.answer(generate("b"))[0] == "hello"


def test_cancel_in_the_middle_of_a_long_prompt(tmp_path: Path) -> None:
    with worker() as it:
        it.load(script(tmp_path, token_seconds=0.01), EngineOptions(micro_batch_tokens=64, context_tokens=100_000))
        it.send(generate(prompt="x" * 50_000))
        it.until(Prefilled, lambda m: m.done >= 64)
        it.send(Cancel("a"))
        end = it.until(Finished)
        assert (end.reason, end.completion_tokens) == ("cancelled", 0)


def test_a_probe_leaves_no_trace_and_equals_decoding(tmp_path: Path) -> None:
    from edgellama.engine.base import Batch
    from edgellama.engine.fake import load

    path = script(tmp_path)
    with worker() as it:
        loaded = it.load(path)
        it.answer(generate("a", max_tokens=3))
        it.send(Probe(tokens=tuple(range(40, 80))), Probe(tokens=()))
        probed = it.until(Probed)
        built_in = it.until(Probed)
        end = it.answer(generate("b", max_tokens=3))[2]
    assert end.cached_tokens == 0
    vocabulary = loaded.info.vocabulary_tokens
    rows = np.frombuffer(probed.logits, "<f4").reshape(-1, vocabulary)
    direct = load(str(path), EngineOptions()).decode(Batch.one_sequence(range(40, 80), 0, logits="all"))
    assert np.array_equal(rows, direct[-16:])
    assert len(built_in.tokens) > 16
    assert len(built_in.logits) == 16 * vocabulary * 4


def test_embeddings(tmp_path: Path) -> None:
    path = script(tmp_path, embedding_length=8)
    texts = (*(f"text {i}" for i in range(7)), "text 0")
    with worker() as it:
        it.load(path, EngineOptions(embeddings=True, sequences=3, micro_batch_tokens=16))
        it.answer(generate(max_tokens=2))
        it.send(EmbedTexts(call_id=1, texts=texts), EmbedTexts(call_id=2, texts=()))
        embedded = it.until(Embedded)
        vectors = np.frombuffer(embedded.vectors, "<f4").reshape(8, 8)
        assert embedded.tokens == sum(map(len, texts))
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
        assert np.array_equal(vectors[0], vectors[7])
        assert len(np.unique(vectors, axis=0)) == 7
        assert it.until(Embedded).vectors == b""
        it.send(EmbedTexts(call_id=3, texts=("ok", "")), EmbedTexts(call_id=4, texts=("x" * 17,)))
        assert it.until(CallFailed).kind == "UsageError"
        assert it.until(CallFailed).kind == "ContextOverflowError"


def test_embeddings_of_a_model_loaded_for_text(tmp_path: Path) -> None:
    with worker() as it:
        it.load(script(tmp_path, say="ok"))
        it.send(EmbedTexts(call_id=1, texts=("a",)))
        assert it.until(CallFailed).kind == "UnsupportedError"
        assert it.answer(generate())[0] == "ok"


def test_requests_may_be_sent_while_the_model_loads(tmp_path: Path) -> None:
    with worker() as it:
        load = Load(path=str(script(tmp_path, say="ok", load_seconds=1.0)), options=EngineOptions(), engine="fake")
        it.send(load, generate("a"), generate("b"), Cancel("a"), Tokenize(call_id=1, parts=(TextPart("x"),)))
        ends = {end.request_id: end.reason for end in (it.until(Finished), it.until(Finished))}
        assert ends == {"a": "cancelled", "b": "stop"}
        assert any(isinstance(m, Loaded) for m in it.seen)


# ---- the pipe


def test_a_host_that_does_not_read_loses_nothing(tmp_path: Path) -> None:
    with worker(read=False) as it:
        load = Load(path=str(script(tmp_path)), options=EngineOptions(), engine="fake", confine=False)
        it.send(load, generate(max_tokens=4000, sampling=SamplingOptions(temperature=0.0)))
        time.sleep(3.0)  # far more than a pipe holds
        it.send(Cancel("other"), Tokenize(call_id=1, parts=(TextPart("x"),)))
        it.read_from_now_on()
        it.until(Loaded)
        end = it.until(Finished)
        steps = [m for m in it.seen if isinstance(m, Step)]
        assert len(steps) == end.completion_tokens == 4000
        if not any(isinstance(m, Tokens) for m in it.seen):  # its thread may get its turn last
            it.until(Tokens)
        assert sum(isinstance(m, Heartbeat) for m in it.seen) < 15


@pytest.mark.parametrize("message", [Shutdown(), None])
def test_shutdown_and_end_of_pipe_while_the_pipe_to_the_host_is_full(tmp_path: Path, message: Any) -> None:
    with worker(read=False) as it:
        load = Load(path=str(script(tmp_path)), options=EngineOptions(), engine="fake", confine=False)
        it.send(load, generate(max_tokens=4000))
        time.sleep(2.0)
        if message is None:
            it.process.stdin.close()
        else:
            it.send(message)
        assert it.wait() == 0


def test_native_code_that_prints_damages_no_frame(tmp_path: Path) -> None:
    library = "msvcrt" if sys.platform == "win32" else None
    hook = f"""
import ctypes, os, sys, threading, time
def chatter():
    c = ctypes.CDLL({library!r})
    for _ in range(200):
        c.puts(b"noise from native code")
        c.fflush(None)
        os.write(1, b"raw noise\\n")
        print("python noise", flush=True)
        time.sleep(0.002)
if "edgellama.runtime.worker" in " ".join(sys.orig_argv):
    def later():
        while "edgellama.runtime.scheduler" not in sys.modules: time.sleep(0.01)
        time.sleep(0.3)
        chatter()
    threading.Thread(target=later, daemon=True).start()
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    with worker(environment={"PYTHONPATH": str(tmp_path)}) as it:
        it.load(script(tmp_path, say="a" * 300, step_seconds=0.002))
        text, _, _ = it.answer(generate())
        assert text == "a" * 300
        it.send(Shutdown())
        assert it.wait() == 0
        assert "noise from native code" in it.stderr
        assert "raw noise" in it.stderr


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff", b"\x05\x00\x00\x00\x81\xa4typ", b"\x04\x00\x00\x00null",
        frame(Cancel("x")), frame(generate()),
    ],
)  # fmt: skip
def test_garbage_from_the_host_is_told_and_ends_the_worker(garbage: bytes) -> None:
    with worker() as it:
        it.until(Hello)
        it.process.stdin.write(garbage)
        it.process.stdin.close()
        if len(garbage) > 10:
            failed = it.until(WorkerFailed)
            assert failed.message
        assert it.wait() in {0, exits.EXIT_TOLD, exits.EXIT_INTERNAL}


def test_garbage_while_serving(tmp_path: Path) -> None:
    with worker() as it:
        it.load(script(tmp_path))
        it.process.stdin.write(b"\x01\x00\x00\x00\xc1")
        it.process.stdin.flush()
        assert "internal" in it.until(WorkerFailed).message
        assert it.wait() == exits.EXIT_INTERNAL


# ---- loading fails


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with worker() as it:
        it.until(Hello)
        it.send(Load(path=str(tmp_path / "no.fake.json"), options=EngineOptions(), engine="fake"))
        assert it.until(WorkerFailed).kind == "NotFoundError"
        assert it.wait() == exits.EXIT_TOLD


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(kind="error", phase="load", message="no such device"), "EngineLoadError"),
        (Fault(kind="memory", phase="load", bytes=1 << 60), "MemoryShortageError"),
    ],
)
def test_a_load_that_fails_is_told(tmp_path: Path, fault: Fault, kind: str) -> None:
    with worker() as it:
        it.until(Hello)
        path = script(tmp_path, faults=(fault,))
        it.send(Load(path=str(path), options=EngineOptions(), engine="fake", confine=False))
        assert it.until(WorkerFailed).kind == kind
        assert it.wait() == exits.EXIT_TOLD


@pytest.mark.parametrize("stop", [Shutdown(), None, Abort()])
def test_loading_can_be_stopped(tmp_path: Path, stop: Any) -> None:
    with worker() as it:
        it.until(Hello)
        path = script(tmp_path, load_seconds=20.0)
        it.send(Load(path=str(path), options=EngineOptions(), engine="fake", confine=False))
        it.until(Heartbeat)
        if stop is None:
            it.process.stdin.close()
        else:
            it.send(stop)
        begun = time.monotonic()
        assert it.wait() == (exits.EXIT_TOLD if stop == Abort() else 0)
        assert time.monotonic() - begun < 25


def test_a_fault_in_a_request_that_nobody_foresaw_is_told_without_its_text(tmp_path: Path) -> None:
    hook = """
import sys
if "edgellama.runtime.worker" in " ".join(sys.orig_argv):
    import edgellama.runtime.tokenizing as module
    def broken(self, parts, *, add_bos=False):
        raise RuntimeError("secret words: " + parts[0].text)
    module.PromptTokenizer.tokenize = broken
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    with worker(environment={"PYTHONPATH": str(tmp_path)}) as it:
        it.load(script(tmp_path))
        it.send(Tokenize(call_id=1, parts=(TextPart("my diary"),)))
        failed = it.until(WorkerFailed)
        assert it.wait() == exits.EXIT_INTERNAL
        assert "RuntimeError" in failed.message
        assert "RuntimeError" in it.stderr
        assert "diary" not in failed.message + it.stderr


# ---- dying


@posix_only
@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGKILL"])
@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_every_death_by_signal_shows_in_the_exit_code(tmp_path: Path, name: str, phase: str) -> None:
    fault = Fault(kind="signal", signal=name, phase=phase, step=0 if phase == "load" else 1)  # type: ignore[arg-type]
    with worker() as it:
        it.until(Hello)
        path = script(tmp_path, say="hello", faults=(fault,))
        it.send(Load(path=str(path), options=EngineOptions(), engine="fake", confine=True))
        if phase != "load":
            it.until(Loaded)
            it.send(generate())
        assert it.wait() == -getattr(signal, name)
        assert name in exits.describe(it.process.returncode)


@posix_only
@pytest.mark.parametrize("stuck", [False, True])
def test_sigterm_is_a_clean_end_also_while_native_code_runs(tmp_path: Path, stuck: bool) -> None:
    with worker() as it:
        it.load(script(tmp_path, step_seconds=600.0, faults=(Fault(kind="hang"),) if stuck else ()))
        it.send(generate())
        it.until(Heartbeat, lambda beat: beat.busy == ("a",))
        it.process.send_signal(signal.SIGTERM)
        assert it.wait() == 0


@posix_only
def test_ctrl_c_in_the_terminal_is_not_for_the_worker(tmp_path: Path) -> None:
    with worker() as it:
        it.load(script(tmp_path, say="hello", step_seconds=0.01))
        it.process.send_signal(signal.SIGINT)
        it.process.send_signal(signal.SIGHUP)
        assert it.answer(generate())[0] == "hello"


@linux_only
@pytest.mark.parametrize("fault", [None, Fault(kind="hang"), Fault(kind="freeze")])
def test_a_killed_host_leaves_no_worker(tmp_path: Path, fault: Fault | None) -> None:
    """The host is a process of its own, killed while its worker is idle, stuck, or stuck holding the interpreter."""
    path = script(tmp_path, say="hello", faults=(fault,) if fault else ())
    host = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("worker_client", {client.__file__!r})
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
from pathlib import Path
it = module.Client()
it.load(Path({str(path)!r}))
it.send(module.generate())
time.sleep(0.5)
print(it.process.pid, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", host], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert not client.gone(pid, 0.1)
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        assert client.gone(pid, 2.0)
    finally:
        if not client.gone(pid, 0.0):
            os.kill(pid, 9)


def test_a_closed_pipe_ends_a_worker_that_is_stuck(tmp_path: Path) -> None:
    with worker() as it:
        it.load(script(tmp_path, faults=(Fault(kind="hang"),)))
        it.send(generate())
        it.until(Heartbeat, lambda beat: beat.busy == ("a",))
        it.process.stdin.close()
        assert it.wait() == 0


# ---- confined


@linux_only
def test_a_confined_worker_says_so_and_still_answers(tmp_path: Path) -> None:
    with worker() as it:
        loaded = it.load(script(tmp_path, say="hello"), confine=True)
        assert {"no-core-dumps", "no-new-privileges", "no-network", "no-exec"} <= set(loaded.confinement)
        tasks = list(Path(f"/proc/{it.process.pid}/task").iterdir())
        assert len(tasks) >= 6
        for task in tasks:
            status = (task / "status").read_text()
            assert "NoNewPrivs:\t1" in status
            assert "Seccomp:\t2" in status
        assert it.answer(generate())[0] == "hello"


@linux_only
def test_a_confined_fake_cannot_write_beside_its_script_unless_told(tmp_path: Path) -> None:
    fault = Fault(kind="nan", times=1)
    with worker() as it:
        loaded = it.load(script(tmp_path, say="hi", faults=(fault,)), confine=True, writable=(str(tmp_path),))
        it.send(generate())
        assert it.until(RequestFailed).kind == "NumericError"
        assert it.answer(generate("b"))[0] == "hi"
    if "landlock" not in loaded.confinement:
        pytest.skip("this kernel has no Landlock")
    with worker() as it:
        it.load(script(tmp_path, faults=(fault, fault)), confine=True)
        it.send(generate())
        assert "PermissionError" in it.until(WorkerFailed).message


# ---- with llama.cpp


@pytest.mark.llamacpp
def test_the_real_engine_confined(tiny_llama_gguf: Path) -> None:
    pytest.importorskip("llama_cpp")
    options = EngineOptions(context_tokens=256, threads=1, gpu_layers=0, repack_weights=False)
    with worker() as it:
        it.load(tiny_llama_gguf, options, engine="llamacpp", confine=True)
        it.send(Tokenize(call_id=1, parts=(TextPart("hello the cat"),), add_bos=True))
        prompt = it.until(Tokens).tokens
        request = Generate(request_id="a", prompt=prompt, sampling=SamplingOptions(seed=4), max_tokens=20)
        text, steps, end = it.answer(request)
        assert end.completion_tokens == len(steps) or end.reason == "stop"
        again = Generate(
            request_id="b", prompt=prompt, sampling=SamplingOptions(), max_tokens=20,
            resume=tuple(s.token for s in steps[:7]), state=steps[6].state,
        )  # fmt: skip
        rest, more, _ = it.answer(again)
        assert [s.token for s in more] == [s.token for s in steps[7:]]
        assert "".join(s.text for s in steps[:7]) + rest == text
        it.send(Shutdown())
        assert it.wait() == 0

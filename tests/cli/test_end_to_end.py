"""The whole command line with real processes: front end, host, worker and the fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

Call = Callable[..., Any]
EDGELLAMA = [sys.executable, "-m", "edgellama"]
COUNTING = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and terminals")


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a script of the fake engine and returns its path."""

    def write(**fields: Any) -> str:
        path = tmp_path / "model.fake.json"
        path.write_text(json.dumps(fields))
        return str(path)

    return write


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_an_answer(script: Callable[..., str], call: Call) -> None:
    model = script(say="I do not know.", answers=[{"contains": "capital of France", "say": "Paris."}])
    result = call("run", model, "--prompt", "Which city is the capital of France?")
    assert (result.code, result.out) == (0, "Paris.\n"), result.err
    assert "prompt tokens" in result.err
    result = call("run", model, "--json", stdin="Who are you?\n")
    body = json.loads(result.out)
    assert body["text"] == "I do not know."
    assert body["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] > 0
    assert body["timings"]["generation_tokens_per_second"] > 0


def test_a_crash_in_the_middle_loses_nothing(script: Callable[..., str], call: Call) -> None:
    fault = {"kind": "signal", "signal": "SIGKILL", "phase": "decode", "contains": "three", "times": 1}
    model = script(say=COUNTING, faults=[fault])
    result = call("run", model, "--prompt", "count")
    assert (result.code, result.out) == (0, COUNTING + "\n"), result.err
    assert result.err.count("warning: ") == 2  # the missing template, and the one restart


def test_an_engine_that_does_not_load(script: Callable[..., str], call: Call) -> None:
    model = script(faults=[{"kind": "error", "phase": "load", "message": "no such architecture"}])
    result = call("run", model, "--prompt", "x")
    assert (result.code, result.out) == (6, "")
    assert "no such architecture" in result.err


def test_a_prompt_of_ten_megabytes_is_refused_with_both_sizes(script: Callable[..., str], call: Call) -> None:
    result = call("run", script(trained_context_tokens=4096), stdin="word " * 2_000_000)
    assert (result.code, result.out) == (5, "")
    assert "the context holds 4096" in result.err


def test_a_conversation(script: Callable[..., str], call: Call) -> None:
    answers = [{"contains": "hello", "say": "Good day."}, {"contains": "how are you", "say": "Fine."}]
    result = call("chat", script(answers=answers), "--plain", stdin="hello\nhow are you?\n/stats\n")
    assert result.code == 0, result.err
    assert result.out == "Good day.\nFine.\n"
    assert "from the cache" in result.err


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.gguf", None, 3),
        ("empty.gguf", b"", 4),
        ("text.gguf", b"hello hello hello hello", 4),
        ("cut.gguf", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, 4),
        ("bad.fake.json", b"{", 4),
        ("odd.fake.json", b'{"sya": "x"}', 4),
    ],
)
def test_files_that_are_no_model(name: str, content: bytes | None, code: int, tmp_path: Path, call: Call) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = call("run", str(path), "--prompt", "x")
    assert (result.code, result.out) == (code, ""), result.err
    assert result.err.startswith("error: ")
    assert "defect" not in result.err


def test_offline_is_an_error_that_names_the_file(call: Call) -> None:
    result = call("run", "hf:org/repo/model.gguf", "--prompt", "x", "--offline")
    assert (result.code, result.out) == (7, "")
    assert "model.gguf" in result.err


def test_a_folder_is_no_model(tmp_path: Path, call: Call) -> None:
    assert call("run", str(tmp_path), "--prompt", "x").code == 2


# ---- processes of their own


def start(*words: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*EDGELLAMA, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def read_until(process: subprocess.Popen[bytes], word: bytes) -> bytes:
    assert process.stdout is not None
    seen = b""
    while word not in seen:
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, process.communicate()
        seen += piece
    return seen


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return children


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_answer_and_keeps_its_text(script: Callable[..., str], number: int) -> None:
    process = start("run", script(say=COUNTING, step_seconds=0.02), "--prompt", "count")
    seen = read_until(process, b"two")
    workers = workers_of(process)
    process.send_signal(number)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    text = (seen + rest).decode()
    assert text.endswith("\n")
    assert COUNTING.startswith(text.rstrip("\n"))
    assert "stopped" in err.decode()
    assert "Traceback" not in err.decode()
    assert workers
    assert all_gone(workers)


@posix
def test_a_second_ctrl_c_leaves_at_once_even_when_the_reader_stands_still(script: Callable[..., str]) -> None:
    """The pipe is full and nobody reads, so the front end stands in a write that no clean way out could end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 64)
    os.set_blocking(writing, True)
    process = subprocess.Popen(
        [*EDGELLAMA, "run", script(say=COUNTING), "--prompt", "go"],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    try:
        wait_until(lambda: bool(workers_of(process)) and _is_writing(process))
        workers = workers_of(process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert all_gone(workers)
    finally:
        process.kill()
        process.communicate()
        os.close(reading)


def _is_writing(process: subprocess.Popen[bytes]) -> bool:
    """Whether its main thread stands in a write to a pipe."""
    try:
        return Path(f"/proc/{process.pid}/syscall").read_text().split()[:2] == [_WRITE_CALL, "0x1"]
    except OSError:
        pytest.skip("the kernel does not tell what a process waits for")


_WRITE_CALL = "1" if platform.machine() == "x86_64" else "64"


@posix
def test_a_reader_that_leaves_ends_the_answer_quietly(script: Callable[..., str]) -> None:
    process = start("run", script(say=COUNTING, step_seconds=0.02), "--prompt", "count", "--quiet")
    read_until(process, b"two")
    workers = workers_of(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    assert all_gone(workers)


@posix
def test_a_killed_front_end_leaves_no_worker(script: Callable[..., str]) -> None:
    process = start("run", script(say=COUNTING, step_seconds=0.05), "--prompt", "count")
    read_until(process, b"two")
    workers = workers_of(process)
    process.kill()
    process.communicate()
    assert workers
    assert all_gone(workers)


@posix
@pytest.mark.parametrize(
    "after_stop",
    [
        [(b"You: ", b"/stats\n"), (b"You: ", b"\x03"), (b"leaves)", b"\x03")],
        [(b"You: ", b"\x03")],  # the second one within two seconds
    ],
)
def test_the_chat_on_a_terminal(after_stop: list[tuple[bytes, bytes]], script: Callable[..., str]) -> None:
    """Ctrl-C stops an answer and keeps it; Ctrl-C twice leaves."""
    import pty
    import select

    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, *EDGELLAMA, "chat", script(say=COUNTING, step_seconds=0.05)],
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(other)
    seen = b""
    steps = [
        (b"You: ", b"hello\n"),
        (b"three", b"\x03"),
        (b"(stopped)", b""),
        *after_stop,
    ]
    try:
        for expected, answer in steps:
            position = 0
            while expected not in seen:
                assert select.select([main], [], [], 60)[0], seen
                seen += os.read(main, 4096)
            position = seen.index(expected) + len(expected)
            seen = seen[position:]
            time.sleep(0.3)  # the prompt is shown a moment before the line is read
            os.write(main, answer)
        assert process.wait(60) == 130
    finally:
        process.kill()
        os.close(main)

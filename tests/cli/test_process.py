"""The process around a command: closed streams, readers that leave, signals."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from edgellama.cli import common, process

posix = pytest.mark.skipif(sys.platform == "win32", reason="a shell's redirections")
MAIN = [sys.executable, "-c", "import sys; from edgellama.cli.main import main; sys.exit(main())"]


@posix
@pytest.mark.parametrize("redirection", ["2>&-", "<&-", "<&- 2>&-"])
def test_a_closed_stream_is_no_fault(redirection: str) -> None:
    command = " ".join(f"'{word}'" for word in MAIN) + f" config show {redirection}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@posix
def test_a_result_nobody_can_get_is_a_failure() -> None:
    command = " ".join(f"'{word}'" for word in MAIN) + " config show >&-"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: standard output: it is closed, so the result is lost\n"


@pytest.mark.skipif(sys.platform == "win32", reason="terminals")
def test_words_are_kept_whole_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import pty
    import struct
    import termios

    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    with open(other, "w", encoding="utf-8") as terminal:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stderr", terminal)
        text = "Chatting with a model. /help lists the commands, Ctrl-D leaves.\n  indented " + "word " * 10 + "x" * 40
        lines = process.wrapped(text).split("\n")
    os.close(main)
    assert "".join(lines).replace(" ", "") == text.replace("\n", "").replace(" ", "")
    assert {word for line in lines for word in line.split()} == set(text.split())
    assert all(len(line) <= 30 for line in lines if "xx" not in line)
    assert lines[-2].startswith("  word")


@posix
def test_a_reader_that_leaves_ends_it_quietly() -> None:
    command = " ".join(f"'{word}'" for word in MAIN) + " config show | true; echo ${PIPESTATUS[0]}"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "0\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_behind_stdout() -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(
            [*MAIN, "config", "show"], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 5
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_behind_stderr_does_not_cost_the_result() -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(
            [*MAIN, "config", "path", "--verbose"], stdout=subprocess.PIPE, stderr=full, check=False, timeout=60
        )
        failed = subprocess.run([*MAIN, "nonsense"], stderr=full, check=False, timeout=60)
    assert done.returncode == 0
    assert done.stdout
    assert failed.returncode == 2


@posix
def test_redirected_output_is_utf_8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv("PYTHONCOERCECLOCALE", "0")
    monkeypatch.setenv("EDGELLAMA_MODELS_DIR", "/tmp/Möbel/模型")
    done = subprocess.run([*MAIN, "config", "path", "models"], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0
    assert done.stdout.decode() == "/tmp/Möbel/模型\n"


@posix
def test_a_file_name_that_is_no_text_goes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLAMA_MODELS_DIR", "/tmp/caf\udce9")
    done = subprocess.run([*MAIN, "config", "path", "models"], capture_output=True, check=False, timeout=60)
    assert done.stdout == b"/tmp/caf\xe9\n"


def test_a_wait_of_unknown_length_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 7))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = common.ProgressLine("starting", plain=True)
    for _ in range(5):
        progress.update(0, None, "checking")
    for done in (1, 2):
        progress.update(done, 4, "loading")
    assert capsys.readouterr().err == "checking\nloading 25%\nloading 50%\n"

"""The process around a command: closed streams, readers that leave, signals."""

from __future__ import annotations

import subprocess
import sys

import pytest

posix = pytest.mark.skipif(sys.platform == "win32", reason="a shell's redirections")
MAIN = [sys.executable, "-c", "import sys; from edgellama.cli.main import main; sys.exit(main())"]


@posix
@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_fault(redirection: str) -> None:
    command = " ".join(f"'{word}'" for word in MAIN) + f" config show {redirection}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


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

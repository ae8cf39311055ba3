"""`edgellama doctor`: the contract of its JSON, and machines that are broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from edgellama.cli import doctor_backend, doctor_checks
from edgellama.cli.doctor_checks import Check

Call = Callable[..., Any]
REPORT = {"version": "9.9", "system_info": "CPU : AVX2 = 1", "devices": [], "ggml_version": "1"}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native library that answers at once."""
    monkeypatch.setattr(doctor_backend, "installed", lambda _package: "9.9")
    monkeypatch.setattr(doctor_backend, "pinned_version", lambda: "9.9")
    monkeypatch.setattr(doctor_backend, "ask_child", lambda *_command: dict(REPORT))


def by_name(result: Any) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(result.out)["checks"]}


def test_the_contract(call: Call) -> None:
    result = call("doctor", "--json")
    assert result.code == 0
    checks = json.loads(result.out)["checks"]
    assert len(checks) > 10
    for check in checks:
        assert set(check) == {"name", "status", "value", "advice"}
        assert check["status"] in {"ok", "warn", "fail", "unknown"}
    assert {"system", "python", "memory", "model store", "native library", "temperature", "proxy"} <= {
        check["name"] for check in checks
    }


def test_for_people(call: Call) -> None:
    result = call("doctor")
    assert result.code == 0
    assert "ok    python: " in result.out
    assert "0 failed" in result.err


def test_quiet_shows_only_what_matters(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 28, available=1 << 27))
    result = call("doctor", "--quiet")
    assert result.code == 0
    assert "warn  memory: 128.0 MiB available" in result.out
    assert "ok  " not in result.out


def test_no_library(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_backend, "installed", lambda _package: None)
    result = call("doctor", "--json")
    assert result.code == 1
    check = by_name(result)["native library"]
    assert check["status"] == "fail"
    assert "edgellama[llamacpp]" in check["advice"]


def test_another_version_than_pinned(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_backend, "pinned_version", lambda: "0.3.36")
    result = call("doctor", "--json")
    assert result.code == 1
    assert "9.9, but 0.3.36 is needed" in result.out


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "an illegal instruction (SIGILL)"),
        ("raise ImportError('libggml.so: cannot open')", "libggml.so: cannot open"),
        ("print('not json')", "answered garbage"),
        ("print('[1]')", "answered garbage"),
    ],
)
def test_a_library_that_dies_takes_nobody_along(
    program: str, words: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "win32" and "SIGILL" in words:
        pytest.skip("POSIX signals")
    monkeypatch.undo()
    answer = doctor_backend.ask_child([sys.executable, "-c", program])
    assert isinstance(answer, str)
    assert words in answer


def test_devices_are_listed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "CUDA0", "description": "H200", "kind": "gpu", "free_bytes": 1 << 30, "total_bytes": 2 << 30}
    cpu = {"name": "CPU", "description": "EPYC", "kind": "cpu", "free_bytes": None, "total_bytes": None}
    monkeypatch.setattr(doctor_backend, "ask_child", lambda *_c: REPORT | {"devices": [gpu, cpu]})
    assert by_name(call("doctor", "--json"))["device CUDA0"]["value"] == "H200, 1.0 GiB free of 2.0 GiB"


def test_a_check_that_breaks_does_not_break_the_doctor(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Check]:
        raise ZeroDivisionError("odd machine")
        yield  # pragma: no cover

    monkeypatch.setattr(doctor_checks, "_memory", broken)
    result = call("doctor", "--json")
    assert result.code == 1
    checks = json.loads(result.out)["checks"]
    assert any("odd machine" in check["value"] for check in checks)
    assert any(check["name"] == "proxy" for check in checks)


def test_passwords_are_not_shown(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://ann:secret@proxy.example:3128")
    result = call("doctor")
    assert "secret" not in result.out
    assert "http://***@proxy.example:3128" in result.out


def test_a_certificate_file_that_is_not_there(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent/ca.pem")
    assert call("doctor").code == 1


def test_verdicts_are_shown(call: Call, home: Path) -> None:
    from edgellama.engine.base import EngineOptions
    from edgellama.engine.verdicts import Verdicts

    verdicts = Verdicts(home / "cache")
    record = verdicts.find("/models/a.gguf", "id", "llamacpp", EngineOptions())
    record = verdicts.add(record, "as asked", "crashed", "died of an illegal instruction (SIGILL)")
    verdicts.add(record, "weight repacking off", "agreed", "")
    other = verdicts.find("/models/b.gguf", "id2", "llamacpp", EngineOptions())
    verdicts.add(other, "as asked", "non-finite", "NaN")
    result = call("doctor", "--json")
    checks = by_name(result)
    first = checks["safety verdict of /models/a.gguf"]
    assert first["status"] == "warn"
    assert "weight repacking off" in first["value"]
    assert "SIGILL" in first["value"]
    assert checks["safety verdict of /models/b.gguf"]["status"] == "fail"
    assert result.code == 1

"""`edgellama doctor`: the contract of its JSON, and machines that are broken."""

from __future__ import annotations

import json
import os
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


@pytest.fixture
def verdict(home: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes what the ladder found with a model file: `verdict(name, (rung, outcome, detail)…, **options)`."""
    from edgellama.engine.base import EngineOptions
    from edgellama.engine.verdicts import Verdicts
    from edgellama.gguf_io import file_identity, specimen

    def write(name: str, *attempts: tuple[str, Any, str], **options: Any) -> Path:
        path = tmp_path / name
        if not path.exists():
            specimen.build(path, "llama")
        verdicts = Verdicts(home / "cache")
        record = verdicts.find(str(path), file_identity(path), "llamacpp", EngineOptions(**options))
        for rung, outcome, detail in attempts:
            record = verdicts.add(record, rung, outcome, detail)
        return path

    return write


def test_verdicts_are_shown(call: Call, verdict: Callable[..., Path]) -> None:
    sigill = "died of an illegal instruction (SIGILL)"
    first = verdict("a.gguf", ("as asked", "crashed", sigill), ("weight repacking off", "agreed", ""))
    second = verdict("b.gguf", ("as asked", "non-finite", "NaN"))
    result = call("doctor", "--json")
    checks = by_name(result)
    good = checks[f"safety verdict of {first}"]
    assert good["status"] == "warn"
    assert "weight repacking off" in good["value"]
    assert "SIGILL" in good["value"]
    assert checks[f"safety verdict of {second}"]["status"] == "fail"
    assert result.code == 1


def test_verdicts_of_files_that_are_gone_or_changed_are_history(call: Call, verdict: Callable[..., Path]) -> None:
    gone, changed = (verdict(name, ("as asked", "failed", "bad magic")) for name in ("gone.gguf", "changed.gguf"))
    assert call("doctor").code == 1
    gone.unlink()
    os.utime(changed, (1, 1))
    result = call("doctor")
    assert result.code == 0
    assert "bad magic" not in result.out


def test_a_broken_wish_or_an_interrupted_check_is_a_warning(call: Call, verdict: Callable[..., Path]) -> None:
    path = verdict("a.gguf", ("as asked", "failed", "no such type"), kv_type_key="q4_0")
    other = verdict("b.gguf", ("as asked", "interrupted", ""))
    result = call("doctor", "--json")
    checks = by_name(result)
    assert checks[f"safety verdict of {path} with its own kv_type_key"]["status"] == "warn"
    assert checks[f"safety verdict of {other}"]["status"] == "warn"
    assert result.code == 0


def test_forget(call: Call, home: Path, verdict: Callable[..., Path]) -> None:
    verdict("a.gguf", ("as asked", "failed", "x"))
    verdict("b.gguf", ("as asked", "agreed", ""))
    assert call("doctor", "--forget").out == "2 safety verdicts deleted; models are checked anew\n"
    assert not list((home / "cache" / "verdicts").iterdir())
    assert json.loads(call("doctor", "--forget", "--json").out) == {"forgotten": 0}
    assert "none yet" in call("doctor").out

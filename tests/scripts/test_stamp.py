"""The stamp: what makes an environment stale, and that a half-written one is never taken for complete."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bootstrap import stamp


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "a checkoüt"
    (root / "env" / ("Scripts" if sys.platform == "win32" else "bin")).mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    Path(stamp.venv_python(str(root / "env"))).touch()
    monkeypatch.setattr(stamp, "ROOT", str(root))
    return root


def ready(root: Path, extras: set[str] | None = None, backend: str = "", wheelhouse: str = "") -> bool:
    venv = str(root / "env")
    wanted = extras or {"llamacpp"}
    return stamp.is_ready(venv, stamp.read(venv), extras=wanted, backend=backend, wheelhouse=wheelhouse)


def complete(root: Path) -> None:
    stamp.write(str(root / "env"), {"extras": "llamacpp", "backend_asked": "auto", "wheelhouse": "abc"})


def test_a_complete_environment_is_ready(checkout: Path) -> None:
    assert not ready(checkout)
    complete(checkout)
    assert ready(checkout)
    assert ready(checkout, backend="auto", wheelhouse="abc")


def test_other_wishes_are_not_met(checkout: Path) -> None:
    complete(checkout)
    assert not ready(checkout, {"llamacpp", "dev"})
    assert not ready(checkout, backend="cuda")
    assert not ready(checkout, wheelhouse="other")


def test_changed_requirements_make_it_stale(checkout: Path) -> None:
    complete(checkout)
    (checkout / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    assert not ready(checkout)


def test_a_moved_checkout_makes_it_stale(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(checkout)
    moved = checkout.rename(checkout.with_name("moved"))
    monkeypatch.setattr(stamp, "ROOT", str(moved))
    assert not ready(moved)


def test_a_missing_interpreter_makes_it_stale(checkout: Path) -> None:
    complete(checkout)
    Path(stamp.venv_python(str(checkout / "env"))).unlink()
    assert not ready(checkout)


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")
def test_another_base_interpreter_makes_it_stale(checkout: Path) -> None:
    python = Path(stamp.venv_python(str(checkout / "env")))
    python.unlink()
    for name in ("python3.11", "python3.13"):
        (checkout / name).touch()
    python.symlink_to(checkout / "python3.11")
    complete(checkout)
    assert ready(checkout)
    python.unlink()
    python.symlink_to(checkout / "python3.13")
    assert not ready(checkout)


def test_an_interrupted_setup_keeps_only_what_was_chosen(checkout: Path) -> None:
    complete(checkout)
    venv = str(checkout / "env")
    stamp.write_as_is(venv, {**stamp.read(venv), "source": ""})
    assert not ready(checkout)
    assert stamp.read(venv)["backend_asked"] == "auto"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"source", b"=\n=\n"])
def test_a_damaged_stamp_is_no_stamp(checkout: Path, content: bytes) -> None:
    Path(stamp.stamp_path(str(checkout / "env"))).write_bytes(content)
    assert not ready(checkout)

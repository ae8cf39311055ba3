"""Take model files that are already on this machine into the store: shared, referenced, or copied when asked."""

from __future__ import annotations

import os
from pathlib import Path

from edgellama.errors import NotFoundError, UsageError
from edgellama.store import catalogue, copying, faults, records
from edgellama.store.locking import locked
from edgellama.store.names import is_later_split, model_name, split_names
from edgellama.store.places import require_file
from edgellama.store.progress import OnProgress, notice
from edgellama.store.pull import now
from edgellama.store.records import FileRecord, How, Record, Stored
from edgellama.store.verify import hash_file

_MAX_FILES = 2000


def model_files(path: Path) -> list[Path]:
    """The model files `path` names: itself, or those in a folder; later parts of a split belong to the first."""
    if path.is_dir():
        names = sorted(os.listdir(path))[:_MAX_FILES]  # noqa: PTH208 - plain names, without a Path for each
        found = [path / name for name in names if name.lower().endswith(".gguf") and not is_later_split(name)]
        found = [file for file in found if file.is_file()]
        if not found:
            raise NotFoundError(f"{path} holds no .gguf file", "give the folder that holds the model files themselves")
        return found
    require_file(path)
    if is_later_split(path.name):
        return [path.with_name(split_names(path.name)[0])]
    return [path]


def import_file(path: Path, models: Path, on_progress: OnProgress, *, copy: bool = False) -> Stored:
    """Add the model whose (first) file is `path`; returns what the store now knows of it.

    Raises `GGUFError` for a file that is not sound, `NotFoundError` for a missing part, `DiskFullError`.
    """
    from edgellama import gguf_io

    path = path.absolute()
    header = gguf_io.read(path)
    gguf_io.require_model(header)
    parts = [path.with_name(name) for name in split_names(path.name)]
    if path.is_relative_to(models.absolute()):
        raise UsageError(f"{path} lies in the store already", "`edgellama list` names it")
    known, _ = records.load_all(models)
    for stored in known.values():
        if path in stored.paths and not stored.missing() and not copy:
            return stored
    name = _free_name(path, known)
    with locked(models if copy else records.index_dir(), name, on_progress):
        how, folder, recorded = _place(parts, models / name, on_progress, copy=copy)
        entry = catalogue.by_file(path.name, recorded[0].sha256)
        record = Record(
            how=how,
            files=tuple(recorded),
            source=f"file:{path}",
            entry=entry.name if entry else "",
            licence=entry.licence if entry else header.licence.get("license", ""),
            added_at=now(),
        )
        return records.save(name, record, folder)


def _free_name(path: Path, known: dict[str, Stored]) -> str:
    name = model_name(path.name)
    for candidate in [name, *(f"{name}-{number}" for number in range(2, 1000))]:
        stored = known.get(candidate)
        if stored is None or path in stored.paths or stored.record.source == f"file:{path}":
            return candidate
    raise UsageError(f"no name is left for {path}")


def _place(
    parts: list[Path], folder: Path, on_progress: OnProgress, *, copy: bool
) -> tuple[How, Path | None, list[FileRecord]]:
    """Copy, share or reference the files: how it was done, where they are (None: where they were), their records."""
    if copy:
        faults.make_models_folder(folder.parent)
        _make(folder)
        recorded = []
        for part in parts:
            size, digest = copying.copy(part, folder / part.name, on_progress)
            recorded.append(FileRecord(path=part.name, size_bytes=size, sha256=digest))
        return "copied", folder, recorded
    hashed = [hash_file(part, on_progress) for part in parts]
    if _share(parts, folder):
        return "reflinked", folder, _records([part.name for part in parts], hashed)
    notice(on_progress, parts[0].name, "used where it lies; do not move it (--copy makes a copy)")
    return "referenced", None, _records([str(part) for part in parts], hashed)


def _records(names: list[str], hashed: list[tuple[int, str]]) -> list[FileRecord]:
    pairs = zip(names, hashed, strict=True)
    return [FileRecord(path=name, size_bytes=size, sha256=digest) for name, (size, digest) in pairs]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise faults.from_write(error, folder) from error


def _share(parts: list[Path], folder: Path) -> bool:
    existed = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    done = copying.same_file_system(parts[0], folder) and all(
        (folder / part.name).exists() or copying.reflink(part, folder / part.name) for part in parts
    )
    if not done and not existed:
        copying.remove_tree(folder)
    return done

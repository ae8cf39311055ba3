"""Whether a stored model is still what was fetched: its bytes against their SHA-256, where its time gives reason."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgellama.errors import EdgellamaError
from edgellama.store import copying, records
from edgellama.store.progress import OnProgress, Progress
from edgellama.store.records import FileRecord, Stored

_CHUNK_BYTES = 1 << 20


def check(
    stored: Stored, sha256_of: Callable[[Path], str], *, only: Callable[[Path, FileRecord], bool] | None = None
) -> tuple[Stored, list[Path]]:
    """Compare the files that have a SHA-256 with it (those that `only` picks); all of them must be there.

    Returns the model and the files that differ. When none does, the record notes the files' times, so that the next
    start need not hash them. Raises `InvalidFileError` for a file that cannot be read.
    """
    noted: list[FileRecord] = []
    differ: list[Path] = []
    for path, file in zip(stored.paths, stored.record.files, strict=True):
        if not file.sha256 or (only is not None and not only(path, file)):
            noted.append(file)
            continue
        mtime_ns = records.mtime_ns(path)  # before the bytes: what is written meanwhile must be noticed next time
        if sha256_of(path) != file.sha256:
            differ.append(path)
        noted.append(msgspec.structs.replace(file, mtime_ns=mtime_ns))
    if differ or tuple(noted) == stored.record.files or stored.record_path is None:
        return stored, differ
    record = msgspec.structs.replace(stored.record, files=tuple(noted))
    beside = stored.record_path.parent != records.index_dir()
    with contextlib.suppress(OSError, EdgellamaError):  # where nothing can be written the next start hashes again
        return records.save(stored.name, record, stored.folder if beside else None), []
    return stored, []


def check_changed(stored: Stored, on_progress: OnProgress) -> tuple[Stored, list[Path]]:
    """`check` for the files that were written since they were last compared."""
    return check(stored, lambda path: hash_file(path, on_progress)[1], only=records.is_changed)


def hash_file(path: Path, on_progress: OnProgress) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file."""
    digest = hashlib.sha256()
    done = 0
    try:
        total = path.stat().st_size
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                on_progress(Progress("verify", path.name, done, total))
    except OSError as error:
        raise copying.unreadable(path, error) from error
    return done, digest.hexdigest()

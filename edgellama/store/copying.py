"""Copies of model files: by sharing blocks where the file system can (no space, no time), else byte by byte."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import BinaryIO

from edgellama import files
from edgellama.errors import EdgellamaError, InvalidFileError, NotFoundError
from edgellama.store import faults
from edgellama.store.download import check_space
from edgellama.store.partial import Part, State
from edgellama.store.progress import OnProgress, Progress

_CHUNK_BYTES = 1 << 20
_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)


def reflink(source: Path, target: Path) -> bool:
    """Make `target` share the blocks of `source`; False where the file system cannot. `target` must not exist."""
    temporary = target.with_name(target.name + ".part")
    try:
        temporary.unlink(missing_ok=True)
        done = _clone(source, temporary)
        if done:
            temporary.replace(target)
            files.sync_folder(target.parent)
    except OSError:
        done = False
    if not done:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return done


def _clone(source: Path, target: Path) -> bool:
    if sys.platform == "linux":
        import fcntl

        with source.open("rb") as reader, target.open("xb") as writer:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            os.fsync(writer.fileno())
        return True
    if sys.platform == "darwin":
        clone = ctypes.CDLL(None, use_errno=True).clonefile
        clone.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
        return int(clone(os.fsencode(source), os.fsencode(target), 0)) == 0
    return False


def copy(source: Path, target: Path, on_progress: OnProgress) -> tuple[int, str]:
    """Copy `source` to `target`, crash-safely; returns size in bytes and SHA-256.

    Raises `NotFoundError`, `DiskFullError`, `InvalidFileError` when the source changes or cannot be read meanwhile.
    """
    if not source.is_file():
        raise NotFoundError(f"{source} is not a file", "give the path of a .gguf file")
    total = source.stat().st_size
    check_space(target.parent, total, target.name)
    part = Part(target)
    try:
        part.discard()
        part.load(lambda _done, _total: None)
        part.begin(State(address=str(source)), keep=False)
        with source.open("rb") as stream:
            while chunk := _read(stream, source):
                part.write(chunk)
                on_progress(Progress("copy", target.name, part.size_bytes, total))
        if part.size_bytes != total:
            raise InvalidFileError(
                f"{source} changed while it was copied ({total:,} bytes before, {part.size_bytes:,} now)"
            )
        part.finish()
    except EdgellamaError:
        part.discard()
        raise
    finally:
        part.close()
    return part.size_bytes, part.digest.hexdigest()


def _read(stream: BinaryIO, source: Path) -> bytes:
    try:
        return stream.read(_CHUNK_BYTES)
    except OSError as error:
        raise unreadable(source, error) from error


def unreadable(path: Path, error: OSError) -> InvalidFileError:
    """The error for a file that cannot be read to its end."""
    return InvalidFileError(
        f"{path}: cannot be read ({error.strerror or error})", "check the disk or stick it lies on, and its permissions"
    )


def same_file_system(source: Path, folder: Path) -> bool:
    """Whether sharing blocks is possible at all."""
    with contextlib.suppress(OSError):
        return source.stat().st_dev == folder.stat().st_dev
    return False


def remove_tree(folder: Path) -> None:
    """Remove a model's own folder."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise faults.from_write(error, folder) from error

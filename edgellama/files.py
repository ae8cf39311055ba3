"""Crash-safe file writing: a temporary name in the same folder, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from edgellama.errors import DiskFullError

_FULL = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for lack of space or quota."""
    return error.errno in _FULL


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable; a no-op where folders cannot be opened (Windows)."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network and FUSE file systems refuse fsync on folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; on success it replaces `path` durably, on any error it is removed.

    Raises `DiskFullError` when the file system fills up while writing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:64]}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield cast(BinaryIO, stream)
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(OSError):  # some file systems of sticks have no modes; mkstemp's 0600 is stricter
            temporary.chmod(mode)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(path, error) from error
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` to `path` so that a reader sees the old or the new content, never a part."""
    with replacing(path, mode) as stream:
        stream.write(data)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` as UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode(), mode)


def free_bytes(folder: Path) -> int:
    """Free space on the file system that holds (or will hold) `folder`."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def disk_full(path: Path, cause: OSError) -> DiskFullError:
    """The error for a write to `path` that failed for lack of space."""
    free = free_bytes(path.parent)
    return DiskFullError(
        f"{path}: {cause.strerror or 'no space left'}; {free:,} bytes are free there",
        "free some space, or move the folder to a larger disk (edgellama config path)",
    )

"""One set-up at a time: a lock file in the environment, with the holder's process id in it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bootstrap.progress import Activity

NAME = ".edgellama-setup.lock"
_WAIT_SECONDS = 0.25
_LOCKED_BYTE = 1 << 20  # Windows locks a byte range: take one that no one reads

if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks: better no lock than no set-up
            return error.errno in {errno.ENOLCK, errno.ENOTSUP, errno.EINVAL}
        return True


def _holder(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


@contextlib.contextmanager
def held(folder: Path, *, quiet: bool = False) -> Iterator[int]:
    """Hold the lock; waits for another set-up, saying so. Yields the descriptor that keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _try_lock(descriptor):
            with Activity("waiting for another set-up of edgellama", quiet=quiet) as activity:
                while not _try_lock(descriptor):
                    holder = _holder(path)
                    activity.update(f"process {holder} is at work" if holder else "it is at work")
                    time.sleep(_WAIT_SECONDS)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, str(os.getpid()).encode())
        yield descriptor
    finally:
        os.close(descriptor)

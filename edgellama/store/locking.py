"""One pull of a file at a time, across processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from edgellama.store import faults
from edgellama.store.progress import OnProgress, Progress

_POLL_SECONDS = 0.2


@contextlib.contextmanager
def locked(folder: Path, name: str, on_progress: OnProgress) -> Iterator[None]:
    """Hold the lock for `name` in the store `folder`, waiting (aloud) while another process has it.

    The operating system drops the lock when its holder dies.
    """
    import filelock

    path = folder / ".locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        started = time.monotonic()
        while True:
            try:
                lock.acquire(timeout=_POLL_SECONDS)
                break
            except filelock.Timeout:
                waited = time.monotonic() - started
                on_progress(
                    Progress("wait", name, text=f"another edgellama is fetching it, waiting for {waited:.0f} s")
                )
    except OSError as error:
        raise faults.from_write(error, path) from error
    try:
        yield
    finally:
        lock.release()

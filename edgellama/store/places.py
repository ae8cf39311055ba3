"""What lies at a path that a user gave for a model."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from edgellama.errors import NotFoundError, UsageError
from edgellama.store.names import closest, printable

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def require_file(path: Path) -> None:
    """Raise `NotFoundError` or `UsageError` with the reason when `path` is no plain file (or a link to one)."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _absent(path, error) from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder", "give the .gguf file in it; `edgellama import FOLDER` adds all of them")
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a plain file",
            "a model is read at many places at once: save it to a .gguf file first",
        )


def _absent(path: Path, error: OSError) -> NotFoundError:
    if error.errno == errno.ELOOP:
        return NotFoundError(f"{path} is a link that leads back to itself", "make it point to the model file")
    if path.is_symlink():
        target = printable(os.readlink(path), 1000)  # noqa: PTH115 - the text as it stands
        return NotFoundError(
            f"{path} is a link to {target}, which does not exist",
            "connect the disk it lies on, or make the link point to the model file",
        )
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        siblings = [name for name in _models_in(path.parent) if name != path.name]
        near = closest(path.name, siblings) or siblings[:3]
        return NotFoundError(f"{path} does not exist", f"there: {', '.join(near)}" if near else "")
    return NotFoundError(f"{path} cannot be reached ({error.strerror or error})", "check the permissions of its folder")


def _models_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.lower().endswith(".gguf"))  # noqa: PTH208
    except OSError:
        return []

"""Take from the worker what it does not need, since it parses hostile files: network, other files, new privileges.

What holds where:

    Linux     no new privileges; seccomp: no sockets (with a GPU: local ones), no other programs, no reading of other
              processes, no io_uring; Landlock: only the model, the Python and system libraries, the machine's facts in
              /proc and /sys and the GPU's device nodes can be read, only the given folders written
    macOS     a sandbox profile: no network, no other programs, writing only in the given folders and Metal's caches
    Windows   nothing in the process itself; the host's job object ends it with the host. (A low integrity level would
              shut out the caches of GPU drivers.)
    all       no core dumps, which would hold the conversation

Nothing here is required for an answer: what the system does not offer is missing from the list that is returned.
"""

from __future__ import annotations

import contextlib
import re
import site
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import edgellama


@dataclass(frozen=True, slots=True)
class Needs:
    """What the process must still be able to do."""

    readable: tuple[Path, ...]
    """Files and folders, beside the libraries."""
    writable: tuple[Path, ...] = ()
    gpu: bool = False


def apply(needs: Needs) -> tuple[str, ...]:
    """Confine this process for good; returns what holds now. Call it before threads start: they inherit it."""
    held = ["no-core-dumps"] if _no_core_dumps() else []
    if sys.platform == "linux":
        from edgellama.runtime.confine import linux

        held += linux.apply(needs, library_folders())
    elif sys.platform == "darwin":
        from edgellama.runtime.confine import darwin

        held += darwin.apply(needs, library_folders())
    return tuple(held)


def model_files(path: str, others: Sequence[str] = ()) -> tuple[Path, ...]:
    """The files behind a model's path: itself and, of a split model, its siblings; links are followed."""
    found: list[Path] = []
    for name in (path, *others):
        first = Path(name).absolute()
        found.append(first)
        match = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", first.name)
        if match is not None:
            prefix, suffix, count = match.groups()
            found += [first.with_name(f"{prefix}{n:05d}{suffix}") for n in range(1, min(int(count), 1000) + 1)]
    return tuple(dict.fromkeys(file.resolve() for file in found if file.exists()))


def library_folders() -> tuple[Path, ...]:
    """Where Python, its packages and this package live."""
    names: Iterable[str] = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *_path_entries())
    folders = [Path(name).resolve() for name in names]
    folders += [Path(place).resolve() for place in edgellama.__path__]
    return tuple(dict.fromkeys(folder for folder in folders if folder.exists() and folder != Path(folder.anchor)))


def _path_entries() -> list[str]:
    # The current folder and the home folder may be on the path by accident; they are not libraries.
    accidental = {Path.cwd(), Path("/")}
    with contextlib.suppress(RuntimeError):
        accidental.add(Path.home())
    entries = [entry for entry in sys.path if entry and Path(entry).absolute() not in accidental]
    return [*entries, site.getusersitepackages()]


def _no_core_dumps() -> bool:
    if sys.platform == "win32":
        return False
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError):
        return False
    return True

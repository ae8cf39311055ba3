"""What an importance matrix has collected so far, kept beside its output so that an interrupted run can go on."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from edgellama.evaluate.importance_file import Entries, Entry
from edgellama.files import write_bytes


def place(output: str | Path) -> Path:
    """The part file of an output."""
    path = Path(output)
    return path.with_name(f".{path.name}.part")


def save(output: str | Path, key: str, done: int, entries: Entries) -> None:
    """Keep the sums of `done` chunks; `key` names model, text and options."""
    names = list(entries)
    arrays = {"key": np.array(key), "done": np.array(done), "names": np.array(names)}
    for index, name in enumerate(names):
        arrays[f"sums{index}"], arrays[f"counts{index}"] = entries[name].sums, entries[name].counts
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    write_bytes(place(output), stream.getvalue())


def load(output: str | Path, key: str) -> tuple[int, Entries]:
    """Chunks done and their sums; nothing where there is no part, or one of another model, text or context."""
    try:
        with np.load(place(output), allow_pickle=False) as saved:
            if str(saved["key"]) != key:
                return 0, {}
            names = [str(name) for name in saved["names"]]
            entries = {name: Entry(saved[f"sums{i}"], saved[f"counts{i}"]) for i, name in enumerate(names)}
            return int(saved["done"]), entries
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return 0, {}


def remove(output: str | Path) -> None:
    """The output is complete: its part is of no use any more."""
    place(output).unlink(missing_ok=True)

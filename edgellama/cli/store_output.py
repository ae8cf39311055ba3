"""How the store's commands talk: progress of a pull, the question about a licence, sizes and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from edgellama.cli.common import Output, ProgressLine

if TYPE_CHECKING:
    from edgellama.store import Progress, StoredModel
    from edgellama.store.licences import Accept, Terms
    from edgellama.store.records import Stored

_VERBS = {
    "connect": "connecting for",
    "download": "fetching",
    "verify": "checking",
    "extract": "unpacking",
    "copy": "copying",
    "wait": "waiting for",
}


class StoreProgress:
    """Draws what the store tells while it works; call it with each `Progress`, close it in the end."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._line: ProgressLine | None = None
        self._now: tuple[str, str] = ("", "")

    def __enter__(self) -> StoreProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "notice":
            self.close()
            self._out.notice(f"{progress.file}: {progress.text}")
            return
        now = (progress.stage, progress.file)
        if self._line is None or now != self._now:
            self.close()
            if progress.text:
                self._out.notice(f"{progress.file}: {progress.text}")
            self._now = now
            self._line = self._out.progress(f"{_VERBS[progress.stage]} {progress.file}", unit="bytes")
        self._line.update(progress.done_bytes, progress.total_bytes)

    def close(self) -> None:
        """Remove what is drawn."""
        if self._line is not None:
            self._line.close()
        self._line = None
        self._now = ("", "")


def accept_always(_terms: Terms, _model: str) -> bool:
    """The answer of `--accept-licence`."""
    return True


def ask_licence(out: Output) -> Accept | None:
    """Shows the terms and asks on the terminal; None where nobody can answer."""
    if out.json or not sys.stdin.isatty() or not sys.stderr.isatty():
        return None

    def ask(terms: Terms, model: str) -> bool:
        click.echo(f"{model} comes under these terms:\n\n{terms.text()}\n", err=True)
        return click.confirm("Do you accept them?", default=False, err=True)

    return ask


def is_offline(flag: bool) -> bool:
    """`--offline`, the environment or the settings forbid the network."""
    from edgellama import settings

    return settings.load({"offline": flag or None}).offline


def size_text(size_bytes: float) -> str:
    """A size for people, in decimal units as disks are sold."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.{2 if unit == 'GB' else 0}f} {unit}"
    return f"{size_bytes:.0f} B"


def table(out: Output, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns on stdout; wide letters count as two."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        cells = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        out.line("  ".join(cells).rstrip())


def model_json(model: StoredModel) -> dict[str, Any]:
    """What `--json` says of a model that is here."""
    stored = model.stored
    if stored is None:
        return {"name": model.name, "path": str(model.path), "bytes": model.path.stat().st_size}
    return stored_json(stored)


def stored_json(stored: Stored) -> dict[str, Any]:
    """What `--json` says of a model of the store."""
    record = stored.record
    return {
        "name": stored.name,
        "path": str(stored.paths[0]),
        "bytes": stored.size_bytes,
        "how": record.how,
        "source": record.source,
        "catalogue": record.entry,
        "licence": record.licence,
        "added_at": record.added_at,
        "files": [
            {"path": str(path), "bytes": file.size_bytes, "sha256": file.sha256}
            for path, file in zip(stored.paths, record.files, strict=True)
        ],
        "missing": [str(path) for path in stored.missing()],
    }


def short_path(path: Path) -> str:
    """A path with the home folder as `~`."""
    try:
        return "~/" + path.relative_to(Path.home()).as_posix()
    except (ValueError, RuntimeError):
        return str(path)

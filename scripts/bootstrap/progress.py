"""Progress on stderr: one live line on a terminal, a line every now and then elsewhere, nothing for short waits."""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

SILENT_SECONDS = 1.0
LINE_EVERY_SECONDS = 12.0


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a line to stderr. A closed stderr is no reason to stop."""
    target = stream if stream is not None else sys.stderr
    if target is None:
        return
    try:
        target.write(text + "\n")
        target.flush()
    except (OSError, ValueError):
        return


def elapsed_text(seconds: float) -> str:
    """`12 s` or `3 min 05 s`."""
    whole = int(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


def is_live(stream: TextIO | None) -> bool:
    """Whether a line on `stream` can be written over: a terminal that is not dumb."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


class Activity:
    """One wait. `update` says what is going on now; `tick` is called several times a second."""

    def __init__(self, title: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.title = title
        self.detail = ""
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet or self._stream is None
        self._live = is_live(self._stream)
        self._start = time.monotonic()
        self._last_line = self._start + SILENT_SECONDS - LINE_EVERY_SECONDS
        self._width = 0
        self._spoke = False

    def __enter__(self) -> Activity:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()
        if kind is None and self._spoke:
            self._write(f"{self.title}: done ({elapsed_text(time.monotonic() - self._start)})\n")

    def update(self, detail: str) -> None:
        """Set what is going on now."""
        self.detail = detail
        self.tick()

    def tick(self) -> None:
        """Show the current state if it is time to."""
        now = time.monotonic()
        if self._quiet or now - self._start < SILENT_SECONDS:
            return
        text = f"{self.title}: {self.detail or 'working'} ({elapsed_text(now - self._start)})"
        if self._live:
            columns = shutil.get_terminal_size((80, 24)).columns
            text = text if len(text) < columns else text[: columns - 2] + "…"
            self._write("\r" + text + " " * max(0, self._width - len(text)))
            self._width = len(text)
            self._spoke = True
        elif now - self._last_line >= LINE_EVERY_SECONDS:
            self._write(text + "\n")
            self._last_line = now
            self._spoke = True

    def _clear(self) -> None:
        if self._live and self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        if self._quiet or self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._quiet = True

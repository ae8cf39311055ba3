"""llama.cpp's log, kept as its last lines: they say why a load or a step failed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from itertools import islice

_LEVELS = {0: logging.INFO, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # ggml_log_level
_CONTINUE = 5
_LINE_LENGTH = 400
_logger = logging.getLogger("edgellama.llamacpp")
_logger.addHandler(logging.NullHandler())  # whoever wants it on stderr adds a handler


class LogRing:
    """The last lines above debug level (which may hold text of prompts, and is dropped at once). Thread-safe."""

    def __init__(self, lines: int = 256) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=lines)
        self._lock = threading.Lock()
        self._total = 0
        self._level = logging.INFO
        self._open = False

    def write(self, level: int, text: bytes) -> None:
        """One piece of log as llama.cpp sends it: often a line, sometimes a part that a later one continues."""
        with self._lock:
            if level != _CONTINUE:
                self._level = _LEVELS.get(level, logging.INFO)
            if self._level <= logging.DEBUG:
                self._open = False
                return
            for part in text.decode("utf-8", "replace").splitlines(keepends=True):
                self._append(part, level == _CONTINUE)

    def _append(self, part: str, continues: bool) -> None:
        body = part.rstrip("\r\n")
        if self._open and self._lines and (continues or self._lines[-1][0] == self._level):
            level, before = self._lines.pop()
            self._lines.append((level, (before + body)[:_LINE_LENGTH]))
        elif body:
            self._lines.append((self._level, body[:_LINE_LENGTH]))
            self._total += 1
        self._open = body == part
        if not self._open and self._lines and body:
            _logger.log(*self._lines[-1])

    def mark(self) -> int:
        """A place in the log, for `since`."""
        with self._lock:
            return self._total

    def since(self, mark: int, level: int = logging.INFO) -> list[str]:
        """Lines of at least `level` written after `mark`, as far as they are still kept."""
        with self._lock:
            fresh = min(self._total - mark, len(self._lines))
            tail = islice(self._lines, len(self._lines) - fresh, None)
            return [line for line_level, line in tail if line_level >= level]

    def reason(self, mark: int, lines: int = 5) -> str:
        """The last errors and warnings after `mark`, else the last lines of any kind: the tail of an error message."""
        found = self.since(mark, logging.WARNING) or self.since(mark)
        return "\n".join(f"  llama.cpp: {line.strip()}" for line in found[-lines:])


RING = LogRing()
"""llama.cpp logs per process, so there is one."""

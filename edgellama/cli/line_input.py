"""Lines of a conversation from a terminal or a pipe."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TextIO

from edgellama.errors import UsageError

_QUOTE = '"""'


class LineInput:
    """Reads messages: one line, or several behind a trailing backslash or between triple quotes."""

    def __init__(self, stream: TextIO, screen: TextIO) -> None:
        self._stream = stream
        self._screen = screen
        self.interactive = stream.isatty()
        self._edits = self.interactive and screen.isatty() and stream is sys.stdin
        self._first = True
        if isinstance(stream, io.TextIOWrapper):
            # A byte that is no text must become a message, not a traceback in the middle of a conversation.
            encoding = None if self.interactive else "utf-8"
            stream.reconfigure(encoding=encoding, errors="surrogateescape")
        if self._edits:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - importing it gives input() its line editing

    def read(self, label: str) -> str | None:
        """The next message without its last newline; None at the end. Raises `UsageError` for what is not text."""
        line = self._line(label)
        if line is None:
            return None
        if line.lstrip().startswith(_QUOTE):
            message = self._quoted(line.lstrip().removeprefix(_QUOTE))
        else:
            message = self._continued(line)
        try:
            message.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"the message is not valid text at character {error.start + 1}") from error
        return message

    def _quoted(self, first: str) -> str:
        lines: list[str] = []
        line: str | None = first
        while line is not None:
            if line.rstrip().endswith(_QUOTE):
                lines.append(line.rstrip().removesuffix(_QUOTE))
                break
            lines.append(line)
            line = self._line("... ")
        return "\n".join(lines).strip("\n")

    def _continued(self, line: str) -> str:
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            following = self._line("... ")
            if following is None:
                return "\n".join(lines)
            line = following
        return "\n".join([*lines, line])

    def _line(self, label: str) -> str | None:
        if self._edits:
            try:
                return input(label)
            except EOFError:
                self._screen.write("\n")
                return None
        if self.interactive:
            self._screen.write(label)
            self._screen.flush()
        line = self._stream.readline()
        if not line:
            return None
        if self._first:
            self._first = False
            line = line.removeprefix("\ufeff")
        return line.removesuffix("\n").removesuffix("\r")

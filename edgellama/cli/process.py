"""The process around a command: its standard streams, and the boundary where an exception becomes an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from edgellama.errors import (
    EXIT_INTERRUPTED,
    DoesNotFitError,
    EdgellamaError,
    NotFoundError,
    UsageError,
)

STDOUT_NAME = "standard output"
"""Stands for the file name in errors of writing results."""
_LEAST_COLUMNS = 20
"""Narrower terminals, and those that tell no width, wrap by themselves."""
_CLOSED = {errno.EPIPE, errno.ESHUTDOWN} | ({errno.EINVAL} if sys.platform == "win32" else set())


class _ClosedOutput(io.TextIOWrapper):
    """Stands for a stdout the caller closed: a result that nobody gets is a failure, and having none is not."""

    def write(self, text: str) -> int:
        if not text:
            return 0
        raise OSError(errno.EBADF, "it is closed, so the result is lost", STDOUT_NAME)


def prepare_streams() -> None:
    """Make all three standard streams exist and hold UTF-8.

    A stream the caller closed becomes the null device, before a pipe or a socket can take its number; writing results
    to a closed stdout fails. Redirected
    streams are UTF-8 on every platform (Windows would take the ANSI code page); a terminal keeps its encoding, and what
    that cannot show is replaced instead of raising. File names that are not UTF-8 go out as the bytes they are.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # takes the free number, so that nothing else does
            # Neither is closed again: they live as long as we do.
            if number == 1:
                sys.stdout = _ClosedOutput(open(os.devnull, "wb"), encoding="utf-8")  # noqa: PTH123, SIM115
            else:
                setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if stream.isatty():
                utf8 = stream.encoding.lower().replace("-", "") == "utf8"
                stream.reconfigure(errors="surrogateescape" if utf8 else "replace")
            else:
                stream.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")


def _before_separator(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def wants_json(words: Sequence[str]) -> bool:
    """Whether `--json` is among the options, so that even wrong usage is answered in JSON."""
    return "--json" in _before_separator(words)


def wants_verbose(words: Sequence[str]) -> bool:
    """Whether `--verbose` is among the options."""
    return any(word in {"--verbose", "-v"} for word in _before_separator(words))


def refuse_undecodable(words: Sequence[str]) -> None:
    """Refuse a value that is not text in this locale, unless it is a file: a prompt must not be altered silently."""
    for word in words:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError as error:
            if not os.path.exists(word):  # noqa: PTH110 - Path would refuse some of these names
                raise UsageError(
                    f"an argument is not valid text at character {error.start + 1}: {printable(word)!r}",
                    "give it as UTF-8, or pipe the prompt in",
                ) from error


def printable(text: str, keep: str = "\n\t") -> str:
    """`text` without control characters, so that a file name or a model's answer cannot steer the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or not _is_control(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_control(character: str) -> bool:
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000


def is_closed_pipe(error: OSError) -> bool:
    """Whether a write failed because the reader left (`| head`)."""
    return isinstance(error, BrokenPipeError) or error.errno in _CLOSED


def drop_output(number: int = 1) -> None:
    """Point stdout (or stderr, 2) at the null device, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)


def wrapped(text: str) -> str:
    """Lines broken between words where stderr is a terminal; an indent is kept."""
    if not sys.stderr.isatty():
        return text
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return text
    if columns < _LEAST_COLUMNS or all(len(line) <= columns for line in text.split("\n")):
        return text
    import textwrap

    wrap = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False, drop_whitespace=True)
    lines = []
    for line in text.split("\n"):
        wrap.subsequent_indent = line[: len(line) - len(line.lstrip(" "))]
        lines += wrap.wrap(line) or [""]
    return "\n".join(lines)


def say(text: str) -> None:
    """Write to stderr. When that fails there is nobody to tell, and the result matters more: it is dropped."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        drop_output(2)
    except ValueError:  # closed
        pass


def ignore_late_interrupts() -> None:
    """Let a Ctrl-C no longer count: while the interpreter shuts down it would kill the process instead of raising."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class Boundary:
    """The one place where a failure becomes words on stderr and `exit_code`.

    With `as_json` the words are one JSON object: `{"error": {"kind", "message", "advice", "exit_code"}}`; stdout holds
    only results. A reader that closed stdout has what it wanted: exit code 0.
    """

    def __init__(self, *, as_json: bool = False, verbose: bool = False) -> None:
        self.as_json = as_json
        self.verbose = verbose
        self.exit_code = 0

    def __enter__(self) -> Boundary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if error is not None:
                self._report(error)
            sys.stdout.flush()
        except OSError as flush_error:
            if is_closed_pipe(flush_error):
                drop_output()
            elif self.exit_code == 0:
                self._say(_from_os_error(flush_error))
                drop_output()
        return error is None or isinstance(error, (Exception, KeyboardInterrupt))

    def _report(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.exit_code = EXIT_INTERRUPTED
            if sys.stderr.isatty():
                say("\n")  # after the terminal's ^C
        elif isinstance(error, EdgellamaError):
            self._say(error)
        elif isinstance(error, OSError):
            if is_closed_pipe(error) or error.filename == STDOUT_NAME:
                drop_output()
            if not is_closed_pipe(error):
                self._say(_from_os_error(error))
        elif isinstance(error, MemoryError):
            self._say(DoesNotFitError("memory ran out", "close other programs, or choose a smaller model or context"))
        elif isinstance(error, Exception):
            self._say(_defect(error))
            if self.verbose and not self.as_json:
                traceback.print_exception(error, file=sys.stderr)

    def _say(self, error: EdgellamaError) -> None:
        self.exit_code = error.exit_code
        write_error(error, as_json=self.as_json)


def write_error(error: EdgellamaError, *, as_json: bool) -> None:
    """Say an error on stderr, for people or as one JSON object."""
    if as_json:
        body = {
            "kind": type(error).__name__,
            "message": error.message,
            "advice": error.advice,
            "exit_code": error.exit_code,
        }
        text = json.dumps({"error": body})
    else:
        text = f"error: {printable(error.message)}"
        if error.advice:
            text += "\n" + "\n".join(f"  {line}" for line in printable(error.advice).splitlines())
        text = wrapped(text)
    say(text + "\n")


def _from_os_error(error: OSError) -> EdgellamaError:
    where = (
        f"{os.fsdecode(error.filename)}: " if error.filename is not None and not isinstance(error.filename, int) else ""
    )
    message = f"{where}{error.strerror or error}"
    if error.errno == errno.ENOENT:
        return NotFoundError(message)
    if error.errno in {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}:
        return DoesNotFitError(message, "free some space there and run the command again")
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return EdgellamaError(message, "check the permissions of that path, or move the folder (edgellama config path)")
    return EdgellamaError(message)


def _defect(error: Exception) -> EdgellamaError:
    place = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(place[-1].filename)}:{place[-1].lineno})" if place else ""  # noqa: PTH119
    return EdgellamaError(
        f"this is a defect in edgellama: {type(error).__name__}: {error}{where}",
        "please report it; the same command with --verbose shows the details",
    )

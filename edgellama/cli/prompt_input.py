"""The prompt of a command: from an option, from standard input, or both."""

from __future__ import annotations

import codecs
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

from edgellama.errors import DoesNotFitError, UsageError

MAX_PROMPT_BYTES = 48 << 20
"""A frame to the worker holds 64 MiB; no model's context comes near."""

_NOTICE_AFTER_SECONDS = 2.0
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def decode(data: bytes, where: str = "standard input") -> str:
    """Text of `data`: UTF-8, or UTF-16 behind a byte order mark (PowerShell writes it); anything else is refused."""
    encoding, rest = "utf-8", data
    for mark, name in _MARKS:
        if data.startswith(mark):
            encoding, rest = name, data[len(mark) :]
            break
    try:
        return rest.decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not valid {encoding.upper()}: byte {error.start + len(data) - len(rest):,} is"
            f" 0x{rest[error.start]:02x}",
            "convert it first, for example with iconv -f LATIN1 -t UTF-8",
        ) from error


def read_limited(stream: BinaryIO, where: str = "standard input") -> bytes:
    """All of a stream; raises `DoesNotFitError` beyond `MAX_PROMPT_BYTES`."""
    data = stream.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise DoesNotFitError(
            f"{where} has more than {MAX_PROMPT_BYTES:,} bytes", "no context holds that much; give a shorter prompt"
        )
    return data


def without_last_newline(text: str) -> str:
    """As the shell does with a command's output, but only one: `echo` and editors add it, nobody means it."""
    return text.removesuffix("\n").removesuffix("\r")


def read_prompt(option: str | None, notice: Callable[[str], None]) -> str:
    """The prompt: `option`, standard input, or the option, an empty line and then what is piped in.

    Without an option a terminal is read to its end (Ctrl-D). Raises `UsageError` when there is no prompt.
    """
    piped = ""
    if not _nothing_piped(option):
        piped = without_last_newline(decode(_read_with_notice(option, notice)))
    if option and piped:
        return f"{option}\n\n{piped}"
    prompt = option or piped
    if not prompt:
        raise UsageError("the prompt is empty", 'give one with --prompt "…", or pipe it in')
    return prompt


def _nothing_piped(option: str | None) -> bool:
    return sys.stdin is None or sys.stdin.closed or (option is not None and sys.stdin.isatty())


def _read_with_notice(option: str | None, notice: Callable[[str], None]) -> bytes:
    if sys.stdin.isatty():
        key = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
        notice(f"Type the prompt; {key} on an empty line ends it.")
        return read_limited(sys.stdin.buffer)
    # A pipe that someone left open looks like a hang, so say what we are waiting for.
    text = "waiting for standard input to end"
    if option is not None:
        text += " (add < /dev/null when only --prompt is meant)"
    timer = threading.Timer(_NOTICE_AFTER_SECONDS, notice, [text])
    timer.daemon = True
    timer.start()
    try:
        return read_limited(sys.stdin.buffer)
    except IsADirectoryError as error:
        raise UsageError("standard input is a directory") from error
    finally:
        timer.cancel()

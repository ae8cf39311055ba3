"""Messages out of lines."""

from __future__ import annotations

import io

import pytest

from edgellama.cli.line_input import LineInput
from edgellama.errors import UsageError


def messages(data: str | bytes) -> list[str]:
    raw = data.encode() if isinstance(data, str) else data
    lines = LineInput(io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"), io.StringIO())
    found = []
    while (message := lines.read("You: ")) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a\nb\n", ["a", "b"]),
        ("no newline at the end", ["no newline at the end"]),
        ("one \\\ntwo\\\nthree\nfour", ["one \ntwo\nthree", "four"]),
        ("cut \\\n", ["cut "]),
        ('"""first\nsecond\n"""\nnext', ["first\nsecond", "next"]),
        ('"""\na\n\nb\n"""', ["a\n\nb"]),
        ('"""one line"""\n', ["one line"]),
        ('"""never closed\nx', ["never closed\nx"]),
        ("\ufeffmarked\n", ["marked"]),
        ("dos\r\nlines\r\n", ["dos", "lines"]),
        ("日本語 😀\n", ["日本語 😀"]),
        ("nul\0byte\n", ["nul\0byte"]),
    ],
)
def test_messages(text: str, expected: list[str]) -> None:
    assert messages(text) == expected


def test_bytes_that_are_no_text_are_refused_and_the_next_line_read() -> None:
    lines = LineInput(io.TextIOWrapper(io.BytesIO(b"caf\xe9\nfine\n"), encoding="ascii"), io.StringIO())
    with pytest.raises(UsageError, match="character 4"):
        lines.read("You: ")
    assert lines.read("You: ") == "fine"


def test_a_pipe_is_not_echoed() -> None:
    screen = io.StringIO()
    LineInput(io.TextIOWrapper(io.BytesIO(b"hello\n")), screen).read("You: ")
    assert screen.getvalue() == ""

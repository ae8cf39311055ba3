"""Finds out, through any template, which text of a prompt came from the conversation and which from the template.

Marks are Unicode noncharacters that occur nowhere else in a rendering. They are put into a copy of the conversation,
rendered with it, and taken out again; where they were tells what the text around them is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgellama.errors import TemplateError

_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Marks:
    """`cut` stands behind the first character of what must not be read as a control token; `begin`, a number in
    `digits`, … `end` stand around an earlier answer."""

    cut: str
    begin: str
    end: str
    digits: str

    def number(self, value: int) -> str:
        """`value` in marks."""
        text = ""
        while True:
            text = self.digits[value % _DIGITS] + text
            value //= _DIGITS
            if not value:
                return text

    def value(self, text: str) -> int:
        """The number that `number` wrote."""
        result = 0
        for digit in text:
            result = result * _DIGITS + self.digits.index(digit)
        return result


def choose(texts: Iterable[str]) -> Marks:
    """Marks that occur in none of `texts`, neither as they are nor as JSON escapes. Raises `TemplateError`."""
    free = list(_NONCHARACTERS)
    for text in texts:
        low = text.lower()
        if "\\ufd" in low or any(char in text for char in free):
            free = [char for char in free if char not in text and escaped(char) not in low]
    if len(free) < 3 + _DIGITS:
        raise TemplateError(
            "the conversation uses up the noncharacters that keep control tokens apart",
            "remove characters from U+FDD0 to U+FDEF from the messages",
        )
    return Marks(free[0], free[1], free[2], "".join(free[3 : 3 + _DIGITS]))


def escaped(char: str) -> str:
    """A mark as JSON with ASCII only writes it."""
    return f"\\u{ord(char):04x}"


def strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with `change` applied to its strings; keys that are plain names stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            k if not isinstance(k, str) or k.isidentifier() else change(k): mapped(v, change) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [mapped(item, change) for item in value]
    return value


def cutter(control_texts: Collection[str], literals: Iterable[str], cut: str) -> Callable[[str], str]:
    """A function that puts `cut` behind each character of a text that a control text could begin with.

    Texts that the template itself looks for and that no control text begins like (`<think>`) stay whole, so that it
    finds them.
    """
    firsts = {text[0] for text in control_texts if text}
    if not firsts:
        return lambda text: text
    kept = [
        text
        for text in literals
        if len(text) > 1
        and text[0] in firsts
        and not any(control.startswith(text) or text.startswith(control) for control in control_texts)
    ]
    whole = "|".join(map(re.escape, sorted(kept, key=len, reverse=True))) or "(?!)"
    first = "[" + "".join(map(re.escape, sorted(firsts))) + "]"
    pattern = re.compile(f"({whole})|{first}")
    return lambda text: pattern.sub(lambda match: match[0] if match[1] is not None else match[0] + cut, text)


class Finder:
    """Finds the longest control text at each place of a text. Vocabularies have thousands, so no regular expression."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        self._known = frozenset(control_texts) - {""}
        lengths: dict[str, set[int]] = {}
        for text in self._known:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, sorted(lengths))) + "]") if lengths else None

    def spans(self, text: str, cuts: frozenset[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """[start, stop) of the control texts with a cut in them (the conversation's) and of those without."""
        cut: list[tuple[int, int]] = []
        whole: list[tuple[int, int]] = []
        position = 0
        while self._first is not None and (match := self._first.search(text, position)) is not None:
            start = match.start()
            position = start + 1
            for length in self._lengths[match[0]]:
                stop = start + length
                if stop > len(text) or text[start:stop] not in self._known:
                    continue
                if any(place in cuts for place in range(start + 1, max(stop, start + 2))):
                    cut.append((start, stop))
                else:
                    whole.append((start, stop))
                    position = stop
                break
        return cut, whole


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A rendering without its marks: where cuts stood, and the answers found as (number, start, stop)."""

    text: str
    cuts: frozenset[int]
    answers: tuple[tuple[int, int, int], ...]


def unmark(rendered: str, marks: Marks) -> Unmarked:
    """Take the marks out of a rendering."""
    special = marks.cut + marks.begin + marks.end + marks.digits
    pattern = re.compile("|".join([f"[{special}]", *(re.escape(escaped(char)) for char in special)]), re.IGNORECASE)
    pieces: list[str] = []
    cuts: set[int] = set()
    answers: list[tuple[int, int, int]] = []
    position = last = 0
    number = ""
    start = -1
    numbering = False
    for match in pattern.finditer(rendered):
        piece = rendered[last : match.start()]
        pieces.append(piece)
        position += len(piece)
        last = match.end()
        mark = match[0] if len(match[0]) == 1 else chr(int(match[0][2:], 16))
        numbering = numbering and not piece
        if mark == marks.cut:
            cuts.add(position)
        elif mark == marks.begin:
            number, start, numbering = "", position, True
        elif mark == marks.end:
            if start >= 0 and number:
                answers.append((marks.value(number), start, position))
            start = -1
        elif numbering:
            number += mark
            start = position
    pieces.append(rendered[last:])
    return Unmarked("".join(pieces), frozenset(cuts), tuple(answers))

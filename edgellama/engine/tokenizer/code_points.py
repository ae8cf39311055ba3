"""Code point classes as llama.cpp's tokenizers see them: Unicode 15.1, whichever Python runs this."""

from __future__ import annotations

import functools
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable

from edgellama.engine.tokenizer.unicode_categories import RUNS

_NON_ASCII_SPACES = (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
SPACES = frozenset(map(chr, (*range(9, 14), 32, *_NON_ASCII_SPACES)))
"""Code points with the property White_Space."""

LETTER, NUMBER, PUNCTUATION, MARK, SYMBOL = "\xd2", "\xd1", "\xd3", "\xd4", "\xd5"
"""What `collapsed` writes for code points beyond ASCII."""
HAN_LETTER, HAN_OTHER = "\xd6", "\xd7"
_OTHER = "\xd0"
_COLLAPSED = {"L": LETTER, "N": NUMBER, "P": PUNCTUATION, "M": MARK, "S": SYMBOL}
_SPACE = "\v"
_MOST_REMEMBERED = 1 << 16

_HAN = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2EBEF),
    (0x2F800, 0x2FA1F),
)


@functools.cache
def _runs() -> tuple[list[int], str]:
    starts, kinds, at = [], [], 0
    for kind, length in re.findall(r"([A-Z])([0-9a-f]*)", RUNS):
        starts.append(at)
        kinds.append(kind)
        at += int(length, 16) if length else 1
    return starts, "".join(kinds)


@functools.lru_cache(1 << 14)
def category(character: str) -> str:
    """First letter of the general category; U for unassigned code points."""
    starts, kinds = _runs()
    return kinds[bisect_right(starts, ord(character)) - 1]


def is_han(character: str) -> bool:
    """Whether a code point lies in the blocks of Chinese characters."""
    return any(first <= ord(character) <= last for first, last in _HAN)


def lower(character: str) -> str:
    """Simple lower case: one code point for one."""
    return character if category(character) == "U" else character.lower()[:1]


def base(character: str) -> str:
    """The first code point of the canonical decomposition."""
    return character if category(character) == "U" else unicodedata.normalize("NFD", character)[0]


class Table(dict[int, str]):
    """A table for `str.translate` that computes each code point when it first meets it, and holds a bounded number."""

    def __init__(self, written: Callable[[str], str]) -> None:
        super().__init__()
        self._written = written

    def __missing__(self, code: int) -> str:
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        self[code] = written = self._written(chr(code))
        return written


def _class(character: str) -> str:
    if character.isascii():
        return character
    return _SPACE if character in SPACES else _COLLAPSED.get(category(character), _OTHER)


def _class_with_han(character: str) -> str:
    written = _class(character)
    if character.isascii() or not is_han(character):
        return written
    return HAN_LETTER if written == LETTER else HAN_OTHER


_CLASSES = Table(_class)
_CLASSES_WITH_HAN = Table(_class_with_han)
_SPACES_ONLY = dict.fromkeys(_NON_ASCII_SPACES, _SPACE)


def collapsed(text: str, *, han: bool = False) -> str:
    """`text` with each code point beyond ASCII replaced by the letter of its class; as long as `text`.

    `han` tells Chinese characters from other letters.
    """
    return text if text.isascii() else text.translate(_CLASSES_WITH_HAN if han else _CLASSES)


def plain_spaces(text: str) -> str:
    """`text` with white space beyond ASCII replaced by a vertical tab; as long as `text`."""
    return text if text.isascii() else text.translate(_SPACES_ONLY)

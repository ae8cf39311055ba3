"""SentencePiece's precompiled character map: a double-array trie of sequences and what replaces them.

Layout as in SentencePiece and Darts-clone: uint32 length of the trie in bytes, the trie as uint32 units, then
replacement strings that end in NUL. A unit holds a label in its low 8 bits, `has a value` in bit 8, and an offset to
its children; a value unit holds the position of a replacement.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

from edgellama.errors import InvalidFileError

_MOST_REMEMBERED = 1 << 16
_FILE_ADVICE = "convert the model again, or fetch another file of it"


class CharacterMap:
    """Replaces the longest known sequence at each place; texts in `kept` and their beginnings stay as they are."""

    def __init__(self, data: bytes, kept: Iterable[str]) -> None:
        self._units: tuple[int, ...] = ()
        self._replacements = b""
        self._kept: set[str] = {text[:end] for text in kept for end in range(1, len(text) + 1)}
        self._first: dict[str, tuple[str | None, int]] = {}
        if data:
            self._read(data)

    def _read(self, data: bytes) -> None:
        (size,) = struct.unpack_from("<I", data) if len(data) >= 4 else (0,)
        if size + 4 >= len(data):
            raise InvalidFileError(f"the character map has {len(data):,} bytes, its trie {size:,}", _FILE_ADVICE)
        self._units = struct.unpack_from(f"<{size // 4}I", data, 4)
        self._replacements = data[4 + size :]

    def normalize(self, text: str) -> str:
        """`text` with every known sequence replaced."""
        found: list[str] = []
        at = 0
        while at < len(text):
            end, written = self._at(text, at)
            found.append(written)
            at = end
        return "".join(found)

    def _at(self, text: str, at: int) -> tuple[int, str]:
        if self._kept and text[at] in self._kept:
            end = at + 1
            while end < len(text) and text[at : end + 1] in self._kept:
                end += 1
            return end, text[at:end]
        if not self._units:
            return at + 1, text[at]
        character = text[at]
        known = self._first.get(character)
        if known is None:
            if len(self._first) >= _MOST_REMEMBERED:
                self._first.clear()
            known = self._first[character] = self._walk(self._offset(0), character)
        written, node = known
        end = longest = at + 1
        while node and end < len(text):
            replaced, node = self._walk(node, text[end])
            end += 1
            if replaced is not None:
                written, longest = replaced, end
        return longest, character if written is None else written

    def _unit(self, index: int) -> int:
        if index >= len(self._units):
            raise InvalidFileError("the character map points outside itself", _FILE_ADVICE)
        return self._units[index]

    def _offset(self, index: int) -> int:
        unit = self._unit(index)
        return (unit >> 10) << ((unit & 0x200) >> 6)

    def _walk(self, node: int, character: str) -> tuple[str | None, int]:
        """From `node` over the bytes of `character`: what replaces the way up to there, and the next node or 0."""
        replacement = None
        for byte in character.encode():
            if byte == 0:
                return None, 0
            node ^= byte
            unit = self._unit(node)
            if unit & 0x800000FF != byte:
                return replacement, 0
            node ^= self._offset(node)
            replacement = self._text(self._unit(node) & 0x7FFFFFFF) if unit & 0x100 else None
        return replacement, node

    def _text(self, at: int) -> str:
        end = self._replacements.find(b"\0", at)
        if at >= len(self._replacements) or end < 0:
            raise InvalidFileError("a replacement of the character map lies outside of it", _FILE_ADVICE)
        return re.sub("[\udc80-\udcff]", "\ufffd", self._replacements[at:end].decode("utf-8", "surrogateescape"))

"""RWKV's vocabulary of byte strings: the longest token at each place."""

from __future__ import annotations

import re

from edgellama.engine.tokenizer.vocabulary import NONE, Vocabulary

_ESCAPES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)


def unescaped(text: str) -> bytes:
    """The bytes that a token's text spells with backslashes."""

    def bytes_of(match: re.Match[bytes]) -> bytes:
        digits, letter = match.groups()
        return bytes((int(digits, 16),)) if digits else _ESCAPES.get(letter, letter)

    return _ESCAPE.sub(bytes_of, text.encode("utf-8", "surrogateescape"))


class LongestBytes:
    """Ids of texts without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {unescaped(text): token for text, token in vocabulary.ids.items()}
        self._unknown = vocabulary.special["unknown"]
        lengths: dict[bytes, set[int]] = {}
        for data in self._ids:
            lengths.setdefault(data[:2], set()).add(len(data))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}

    def encode(self, text: str, *, after_special: bool) -> list[int]:  # noqa: ARG002  (one signature for all kinds)
        """Ids of `text`; bytes that begin no token give the unknown token, where there is one."""
        data = text.encode()
        found: list[int] = []
        at = 0
        while at < len(data):
            start = data[at : at + 2]
            for length in (*self._lengths.get(start, ()), 1):
                token = self._ids.get(data[at : at + length])
                if token is not None and at + length <= len(data):
                    found.append(token)
                    at += length
                    break
            else:
                found += [self._unknown] if self._unknown != NONE else []
                at += 1
        return found

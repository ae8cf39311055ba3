"""Finding special tokens in a text before it is tokenized: longest first, then from left to right."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from edgellama.engine.tokenizer.vocabulary import CONTROL, STRIPS_LEFT, STRIPS_RIGHT, UNKNOWN, Vocabulary

Part = str | int
"""Plain text, or the id of a special token."""

_C_SPACES = " \t\n\v\f\r"


class _Finder:
    """All occurrences of some texts."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self._tokens = tokens
        lengths: dict[str, set[int]] = {}
        for text in tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found) for first, found in lengths.items()}
        firsts = "".join(sorted(map(re.escape, lengths)))
        self._firsts = re.compile(f"[{firsts}]") if firsts else None

    def occurrences(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, token) from left to right, overlapping ones too."""
        if self._firsts is None:
            return
        tokens, lengths = self._tokens, self._lengths
        for match in self._firsts.finditer(text):
            at = match.start()
            for length in lengths[match.group()]:
                token = tokens.get(text[at : at + length])
                if token is not None and at + length <= len(text):
                    yield at, at + length, token


class SpecialTokens:
    """Cuts texts at special tokens. User-defined tokens are always found, control tokens only where asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytewise = any(_has_stray_bytes(vocabulary.texts[token]) for token in vocabulary.special_tokens)

    @functools.cached_property
    def _all(self) -> _Finder:
        return _Finder({self._form(token): token for token in self._vocabulary.special_tokens})

    @functools.cached_property
    def _user_defined(self) -> _Finder:
        attributes = self._vocabulary.attributes
        tokens = [t for t in self._vocabulary.special_tokens if not attributes[t] & (CONTROL | UNKNOWN)]
        return _Finder({self._form(token): token for token in tokens})

    def _form(self, token: int) -> str:
        text = self._vocabulary.texts[token]
        return text.encode("utf-8", "surrogateescape").decode("latin-1") if self._bytewise else text

    def partition(self, text: str, *, special: bool) -> list[Part]:
        """`text` as plain text and ids."""
        if not text:
            return []
        if not self._bytewise:
            return self._partition(text, special)
        parts = self._partition(text.encode().decode("latin-1"), special)
        return [part if isinstance(part, int) else _from_bytes(part.encode("latin-1")) for part in parts]

    def _partition(self, text: str, special: bool) -> list[Part]:
        finder = self._all if special else self._user_defined
        taken = self._choose(text, list(finder.occurrences(text)))
        parts: list[Part] = []
        last = 0
        for start, end, token in taken:
            if start > last:
                parts.append(text[last:start])
            parts.append(token)
            last = end
        if last < len(text):
            parts.append(text[last:])
        return parts

    def _choose(self, text: str, found: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """The occurrences that count: a longer token takes its place before shorter ones look for theirs.

        A token that strips white space takes that with it.
        """
        if not found:
            return []
        texts, attributes = self._vocabulary.texts, self._vocabulary.attributes
        size_bytes = {token: len(texts[token].encode("utf-8", "surrogateescape")) for _, _, token in found}
        found.sort(key=lambda item: (-size_bytes[item[2]], item[2], item[0]))
        mask = bytearray(len(text))
        taken = []
        for first, last, token in found:
            if mask.find(1, first, last) >= 0:
                continue
            start, end = first, last
            if attributes[token] & STRIPS_LEFT:
                while start > 0 and not mask[start - 1] and text[start - 1] in _C_SPACES:
                    start -= 1
            if attributes[token] & STRIPS_RIGHT:
                while end < len(text) and not mask[end] and text[end] in _C_SPACES:
                    end += 1
            mask[start:end] = b"\1" * (end - start)
            taken.append((start, end, token))
        taken.sort()
        return taken


def _has_stray_bytes(text: str) -> bool:
    return any("\udc80" <= character <= "\udcff" for character in text)


def _from_bytes(data: bytes) -> str:
    """Text of bytes that a token may have cut within a character: each stray byte becomes U+FFFD."""
    stray = data.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", "\ufffd", stray)

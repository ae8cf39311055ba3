"""Finding special tokens in a text before it is tokenized: longest first, then from left to right."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left

from edgellama.engine.tokenizer.vocabulary import CONTROL, STRIPS_LEFT, STRIPS_RIGHT, UNKNOWN, Vocabulary

Part = str | int
"""Plain text, or the id of a special token."""

_C_SPACES = " \t\n\v\f\r"
_START_CHARACTERS = 16
_MOST_STARTS = 1 << 16


class _Finder:
    """Some texts to look for, and a quick answer to which of them a text may contain."""

    def __init__(self, texts: list[tuple[int, str]]) -> None:
        """`texts`: token and text, in the order in which they take their places."""
        self._texts = texts
        self._groups: dict[str, list[tuple[int, str]]] = {}
        for token, text in texts:
            self._groups.setdefault(text[:2], []).append((token, text))
        firsts = "".join(sorted({re.escape(text[0]) for _, text in texts}))
        self._firsts = re.compile(f"[{firsts}]") if firsts else None

    def candidates(self, text: str) -> list[tuple[int, str]]:
        """The tokens whose first characters occur in `text`."""
        found: set[int] = set()
        if self._firsts is not None:
            starts: set[str] = set()
            for match in self._firsts.finditer(text):
                at = match.start()
                starts.add(text[at : at + _START_CHARACTERS])
                if len(starts) >= _MOST_STARTS:
                    found |= self._beginning(starts)
                    starts.clear()
            found |= self._beginning(starts)
        return [(token, wanted) for token, wanted in self._texts if token in found] if found else []

    def _beginning(self, starts: set[str]) -> set[int]:
        ordered = sorted(starts)
        found = set()
        for pair in {start[:size] for start in starts for size in (1, 2)}:
            for token, wanted in self._groups.get(pair, ()):
                beginning = wanted[:_START_CHARACTERS]
                at = bisect_left(ordered, beginning)
                if at < len(ordered) and ordered[at].startswith(beginning):
                    found.add(token)
        return found


class SpecialTokens:
    """Cuts texts at special tokens. User-defined tokens are always found, control tokens only where asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytewise = any(_has_stray_bytes(vocabulary.texts[token]) for token in vocabulary.special_tokens)

    @functools.cached_property
    def _all(self) -> _Finder:
        return self._finder(self._vocabulary.special_tokens)

    @functools.cached_property
    def _user_defined(self) -> _Finder:
        attributes = self._vocabulary.attributes
        return self._finder([t for t in self._vocabulary.special_tokens if not attributes[t] & (CONTROL | UNKNOWN)])

    def _finder(self, tokens: list[int]) -> _Finder:
        """Longest first; llama.cpp leaves open which of equally long ones comes first."""
        encoded = [(token, self._vocabulary.texts[token].encode("utf-8", "surrogateescape")) for token in tokens]
        encoded.sort(key=lambda item: -len(item[1]))
        if self._bytewise:
            return _Finder([(token, data.decode("latin-1")) for token, data in encoded])
        return _Finder([(token, data.decode()) for token, data in encoded])

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
        candidates = finder.candidates(text)
        taken = self._choose(text, candidates) if candidates else []
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

    def _choose(self, text: str, candidates: list[tuple[int, str]]) -> list[tuple[int, int, int]]:
        """(start, end, token) from left to right: each token takes the places that those before it left.

        A token that strips white space takes that with it.
        """
        attributes = self._vocabulary.attributes
        mask = bytearray(len(text))
        taken = []
        for token, wanted in candidates:
            at = text.find(wanted)
            while at >= 0:
                end = at + len(wanted)
                blocked = mask.find(1, at, end)
                if blocked >= 0:
                    following = mask.find(0, blocked)
                    at = text.find(wanted, following) if following >= 0 else -1
                    continue
                start, end = self._with_spaces(text, mask, at, end, attributes[token])
                mask[start:end] = b"\1" * (end - start)
                taken.append((start, end, token))
                at = text.find(wanted, end)
        taken.sort()
        return taken

    @staticmethod
    def _with_spaces(text: str, mask: bytearray, start: int, end: int, attribute: int) -> tuple[int, int]:
        if attribute & STRIPS_LEFT:
            while start > 0 and not mask[start - 1] and text[start - 1] in _C_SPACES:
                start -= 1
        if attribute & STRIPS_RIGHT:
            while end < len(text) and not mask[end] and text[end] in _C_SPACES:
                end += 1
        return start, end


def _has_stray_bytes(text: str) -> bool:
    return any("\udc80" <= character <= "\udcff" for character in text)


def _from_bytes(data: bytes) -> str:
    """Text of bytes that a token may have cut within a character: each stray byte becomes U+FFFD."""
    stray = data.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", "\ufffd", stray)

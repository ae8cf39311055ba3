"""SentencePiece-style BPE (`llama`): neighbours whose joined text is a token merge, best score first."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from edgellama.engine.tokenizer.merging import Merger
from edgellama.engine.tokenizer.vocabulary import SPACE, Vocabulary
from edgellama.engine.tokenizer.words import WordMemory, before_spaces


class SentencePieces:
    """Ids of texts without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids = vocabulary.ids
        self._merger = Merger(self._rank, self._joins)
        self._words = WordMemory(self._word)

    @functools.cached_property
    def _ranks(self) -> dict[str, float]:
        scores = self._vocabulary.scores
        return {text: -score for text, score in zip(self._ids, scores, strict=True)}

    @functools.cached_property
    def _word_starts(self) -> re.Pattern[str]:
        return before_spaces(self._vocabulary.texts)

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Ids of `text`; `after_special` tells that it stands at the beginning or after a special token."""
        if after_special and self._vocabulary.add_space_prefix:
            text = " " + text
        return self._words.ids(self._word_starts.split(text.replace(" ", SPACE)))

    def _rank(self, left: str, right: str) -> float | None:
        return self._ranks.get(left + right)

    def _joins(self) -> Iterator[tuple[str, str, float]]:
        for text, rank in self._ranks.items():
            for at in range(1, len(text)):
                left, right = text[:at], text[at:]
                if (at == 1 or left in self._ids) and (at == len(text) - 1 or right in self._ids):
                    yield left, right, rank

    def _word(self, word: str) -> list[int]:
        found: list[int] = []
        for symbol in self._merger.merge(word):
            token = self._ids.get(symbol)
            if token is None:
                found += self._bytes(symbol)
            else:
                found.append(token)
        return found

    def _bytes(self, symbol: str) -> list[int]:
        """Byte tokens; the header's check made sure that there is one for each byte, named or as itself."""
        found = []
        for byte in symbol.encode("utf-8", "surrogateescape"):
            named = self._ids.get(f"<0x{byte:02X}>")
            own = bytes((byte,)).decode("utf-8", "surrogateescape")
            found.append(self._ids[own] if named is None else named)
        return found

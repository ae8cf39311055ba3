"""WordPiece (`bert`): words of a normalized text, each covered by the longest tokens from its start on."""

from __future__ import annotations

from edgellama.engine.tokenizer import code_points
from edgellama.engine.tokenizer.vocabulary import NONE, SPACE, Vocabulary
from edgellama.engine.tokenizer.words import WordMemory

_CHINESE = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)  # the sixth should begin at 0x2B820; the tokenizers of the models have this slip too


def _is_chinese(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _CHINESE)


class WordPieces:
    """Ids of texts without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._unknown = vocabulary.special["unknown"]
        self._lower_case = vocabulary.lower_case
        self._strip_accents = vocabulary.strip_accents
        self._normalizer = code_points.Table(self._written)
        self._lengths = self._lengths_by_first()
        self._words = WordMemory(self._word)

    def _lengths_by_first(self) -> dict[str, list[int]]:
        """Lengths of the tokens that begin with a character, longest first."""
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        return {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def _written(self, character: str) -> str:
        """Spaces around what stands alone, nothing for what is dropped, lower case."""
        if self._strip_accents:
            character = code_points.base(character)
        if character in code_points.SPACES:
            return " "
        kind = code_points.category(character)
        if character in "\0\ufffd" or kind == "C" or (self._strip_accents and kind == "M"):
            return ""
        written = code_points.lower(character) if self._lower_case else character
        stands_alone = kind == "P" or (ord(character) < 0x7F and kind == "S") or _is_chinese(character)
        return f" {written} " if stands_alone else written

    def encode(self, text: str, *, after_special: bool) -> list[int]:  # noqa: ARG002  (one signature for all kinds)
        """Ids of `text`."""
        words = text.translate(self._normalizer).split(" ")
        return self._words.ids(word for word in words if word)

    def _word(self, word: str) -> list[int]:
        word = SPACE + word
        found: list[int] = []
        at = 0
        while at < len(word):
            for length in self._lengths.get(word[at], ()):
                token = self._ids.get(word[at : at + length]) if at + length <= len(word) else None
                if token is not None:
                    found.append(token)
                    at += length
                    break
            else:
                return [self._unknown] if self._unknown != NONE else []
        return found

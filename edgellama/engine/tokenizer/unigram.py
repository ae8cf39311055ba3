"""SentencePiece unigram (`t5`): the segmentation with the highest sum of scores, after the charsmap's normalization."""

from __future__ import annotations

import functools
import re
import struct
from array import array
from itertools import groupby

from edgellama.engine.tokenizer.charsmap import CharacterMap
from edgellama.engine.tokenizer.vocabulary import NONE, NORMAL, SPACE, UNUSED, USER_DEFINED, Vocabulary
from edgellama.engine.tokenizer.words import WordMemory, before_spaces

_UNKNOWN_PENALTY = 10.0


def _as_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


class Unigrams:
    """Ids of texts without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._unknown = vocabulary.special["unknown"]
        user_defined = [t for t, kind in zip(vocabulary.texts, vocabulary.types, strict=True) if kind & USER_DEFINED]
        self._map = CharacterMap(vocabulary.charsmap, user_defined)
        self._words = WordMemory(self._word)

    @functools.cached_property
    def _tokens(self) -> dict[str, tuple[int, float]]:
        """Id and score by text."""
        chosen = NORMAL | USER_DEFINED | UNUSED
        kinds, scores = self._vocabulary.types, self._vocabulary.scores
        return {
            text: (token, 0.0 if kinds[token] & USER_DEFINED else scores[token])
            for text, token in self._vocabulary.ids.items()
            if kinds[token] & chosen
        }

    @functools.cached_property
    def _longest(self) -> dict[str, int]:
        """Length of the longest token that begins with a character."""
        longest: dict[str, int] = {}
        for text in self._tokens:
            longest[text[0]] = max(longest.get(text[0], 0), len(text))
        return longest

    @functools.cached_property
    def _unknown_score(self) -> float:
        kinds, scores = self._vocabulary.types, self._vocabulary.scores
        least = min((score for kind, score in zip(kinds, scores, strict=True) if kind & NORMAL), default=3.4e38)
        return _as_float32(least - _UNKNOWN_PENALTY)

    @functools.cached_property
    def _word_starts(self) -> re.Pattern[str]:
        return before_spaces(self._tokens)

    def encode(self, text: str, *, after_special: bool) -> list[int]:  # noqa: ARG002  (one signature for all kinds)
        """Ids of `text`; unknown characters in a row give one unknown token."""
        ids = self._words.ids(self._word_starts.split(self._spaced(self._map.normalize(text))))
        if self._unknown not in ids:
            return ids
        if self._unknown == NONE:
            return [token for token in ids if token != NONE]
        merged: list[int] = []
        for token, run in groupby(ids):
            merged += [token] if token == self._unknown else run
        return merged

    def _spaced(self, text: str) -> str:
        """Spaces as the vocabulary writes them, one in front of the first word."""
        prefixed = self._vocabulary.add_space_prefix
        if self._vocabulary.remove_extra_spaces:
            return "".join(SPACE + word for word in text.split(" ") if word)
        if prefixed:
            start = len(text) - len(text.lstrip(" "))
            if start < len(text):
                text = text[:start] + " " + text[start:]
        return text.replace(" ", SPACE)

    def _word(self, word: str) -> list[int]:
        """Viterbi: the best way to each position, from every earlier position that a token or a character spans."""
        size = len(word)
        best = array("d", (-float("inf"),)) * (size + 1)
        best[0] = 0.0
        came_from = array("i", bytes(4 * (size + 1)))
        came_by = array("i", bytes(4 * (size + 1)))
        tokens, longest = self._tokens, self._longest
        for start in range(size):
            here = best[start]
            single = False
            for end in range(start + 1, min(size, start + longest.get(word[start], 0)) + 1):
                known = tokens.get(word[start:end])
                if known is None:
                    continue
                single = single or end == start + 1
                score = here + known[1]
                if score > best[end]:
                    best[end] = score
                    came_from[end], came_by[end] = start, known[0]
            if not single and here + self._unknown_score > best[start + 1]:
                best[start + 1] = here + self._unknown_score
                came_from[start + 1], came_by[start + 1] = start, self._unknown
        found = []
        while size:
            found.append(came_by[size])
            size = came_from[size]
        return found[::-1]

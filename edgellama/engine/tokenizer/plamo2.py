"""PLaMo 2's unigram vocabulary: the highest sum of scores, found from the end, and bytes for unknown characters."""

from __future__ import annotations

import math

from edgellama.engine.tokenizer.vocabulary import BYTE, NONE, Vocabulary
from edgellama.errors import InvalidFileError

_UNKNOWN_SCORE = -10_000_000
_INVALID_SCORE = -20_000_000
_MARK = "\ufeff"


class Plamo2:
    """Ids of texts without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        kinds, scores = vocabulary.types, vocabulary.scores
        self._tokens: dict[str, tuple[int, int]] = {}
        self._lengths: dict[str, list[int]] = {}
        lengths: dict[str, set[int]] = {}
        for text, token in vocabulary.ids.items():
            score = _fixed(scores[token])
            if not kinds[token] & BYTE and score > _INVALID_SCORE:
                self._tokens[text] = (token, score)
                lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._bytes = [vocabulary.ids.get(f"<0x{byte:02X}>", NONE) for byte in range(256)]
        if NONE in self._bytes:
            raise InvalidFileError(f"the vocabulary has no token <0x{self._bytes.index(NONE):02X}> for that byte")

    def encode(self, text: str, *, after_special: bool) -> list[int]:  # noqa: ARG002  (one signature for all kinds)
        """Ids of `text`, without a byte order mark at its start."""
        text = text.removeprefix(_MARK)
        size = len(text)
        costs = [0] * (size + 1)
        best: list[tuple[int, int]] = [(1, NONE)] * size
        for at in range(size - 1, -1, -1):
            cost = 1 << 60
            for length in self._lengths.get(text[at], ()):
                known = self._tokens.get(text[at : at + length]) if at + length <= size else None
                if known is not None and costs[at + length] - known[1] < cost:
                    cost = costs[at + length] - known[1]
                    best[at] = (length, known[0])
            if costs[at + 1] - _UNKNOWN_SCORE < cost:
                cost = costs[at + 1] - _UNKNOWN_SCORE
                best[at] = (1, NONE)
            costs[at] = cost
        found: list[int] = []
        at = 0
        while at < size:
            length, token = best[at]
            found += [self._bytes[byte] for byte in text[at].encode()] if token == NONE else [token]
            at += length
        return found


def _fixed(score: float) -> int:
    """`score` in ten-thousandths, halves away from zero."""
    if not math.isfinite(score):
        return _INVALID_SCORE
    return int(math.copysign(math.floor(abs(score) * 1e4 + 0.5), score))

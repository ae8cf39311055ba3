"""Merging neighbours, best pair first and leftmost among equals: what byte-level and SentencePiece-style BPE share."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellama.engine.tokenizer.long_words import LongWords

Rank = Callable[[str, str], float | None]
"""Rank of joining two neighbours, smallest first; None where they do not join."""

_SHORT = 48
LONG = 1 << 16
"""Words with more characters are worth the time that importing and compiling takes."""

_NEVER = float("inf")


class Merger:
    """Merges the characters of words; O(n log n)."""

    def __init__(self, rank: Rank, joins: Callable[[], Iterable[tuple[str, str, float]]]) -> None:
        """`joins` lists all (left, right, rank), for words that only compiled code should merge."""
        self._rank = rank
        self._joins = joins

    def merge(self, word: str) -> list[str]:
        """The symbols left when no neighbours join any more."""
        if len(word) <= _SHORT:
            return merge_short(list(word), self._rank)
        if len(word) <= LONG:
            return merge_long(list(word), self._rank)
        return self._long_words.merge(word)

    @functools.cached_property
    def _long_words(self) -> LongWords:
        from edgellama.engine.tokenizer.long_words import LongWords

        return LongWords(self._joins())


def merge_short(symbols: list[str], rank: Rank) -> list[str]:
    """By looking at all pairs each time: the fastest for words. `symbols` is changed."""
    ranks: list[float] = []
    for left, right in pairwise(symbols):
        found = rank(left, right)
        ranks.append(_NEVER if found is None else found)
    while ranks:
        best = min(ranks)
        if best == _NEVER:
            break
        at = ranks.index(best)
        joined = symbols[at] + symbols[at + 1]
        symbols[at : at + 2] = [joined]
        del ranks[at]
        if at:
            found = rank(symbols[at - 1], joined)
            ranks[at - 1] = _NEVER if found is None else found
        if at < len(ranks):
            found = rank(joined, symbols[at + 1])
            ranks[at] = _NEVER if found is None else found
    return symbols


def merge_long(symbols: list[str], rank: Rank) -> list[str]:
    """With a heap of pairs. A pair that changed since it was put there no longer has the rank it was put with."""
    size = len(symbols)
    following = list(range(1, size + 1))
    before = list(range(-1, size - 1))
    current: list[float | None] = [*map(rank, symbols, symbols[1:]), None]
    heap = [(value, at) for at, value in enumerate(current) if value is not None]
    heapq.heapify(heap)
    while heap:
        value, at = heapq.heappop(heap)
        if current[at] != value:
            continue
        gone = following[at]
        symbols[at] += symbols[gone]
        after = following[at] = following[gone]
        symbols[gone] = ""
        current[gone] = None
        if after < size:
            before[after] = at
        for left, right in ((before[at], at), (at, after)):
            if left < 0:
                continue
            current[left] = found = rank(symbols[left], symbols[right]) if right < size else None
            if found is not None:
                heapq.heappush(heap, (found, left))
    return [symbol for symbol in symbols if symbol]

"""Merging neighbours, best pair first and leftmost among equals: what byte-level and SentencePiece-style BPE share."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise

Rank = Callable[[str, str], float | None]
"""Rank of joining two neighbours, smallest first; None where they do not join."""

_SHORT = 48
_NEVER = float("inf")


def merge(symbols: list[str], rank: Rank) -> list[str]:
    """Join neighbours until none join any more; O(n log n). `symbols` may be changed."""
    return _merge_short(symbols, rank) if len(symbols) <= _SHORT else _merge_long(symbols, rank)


def _merge_short(symbols: list[str], rank: Rank) -> list[str]:
    """By looking at all pairs each time: the fastest for words."""
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


def _merge_long(symbols: list[str], rank: Rank) -> list[str]:
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

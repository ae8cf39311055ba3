"""The merges of `merging` for words of a size no language has, compiled: ten million letters take seconds.

Pasted base64, a run of one letter or a page without a blank would keep a plain loop busy for minutes. Numba is only
imported when such a word turns up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellama.codecs.compiling import kernel

_ONE_OF_EACH = 0x110000


class LongWords:
    """Merges on numbers instead of texts, from the joins (left, right, rank) of a vocabulary."""

    def __init__(self, joins: Iterable[tuple[str, str, float]]) -> None:
        symbols: dict[str, int] = {}
        lefts, rights, joined, ranks = [], [], [], []
        for left, right, rank in joins:
            lefts.append(symbols.setdefault(left, len(symbols)))
            rights.append(symbols.setdefault(right, len(symbols)))
            joined.append(symbols.setdefault(left + right, len(symbols)))
            ranks.append(rank)
        self._symbols = symbols
        self._texts = list(symbols)
        keys = np.array(lefts, np.int64) << 32 | np.array(rights, np.int64)
        order = np.argsort(keys)
        _, dense = np.unique(np.array(ranks, np.float64), return_inverse=True)
        self._keys = keys[order]
        self._ranks = dense[order].astype(np.int32)
        self._joined = np.array(joined, np.int32)[order]

    def merge(self, word: str) -> list[str]:
        """The symbols of `word` after all merges."""
        texts = [*self._texts]
        table = np.empty(_ONE_OF_EACH, np.int32)
        for character in sorted(set(word)):
            number = self._symbols.get(character, len(texts))
            if number == len(texts):
                texts.append(character)
            table[ord(character)] = number
        symbols = table[np.frombuffer(word.encode("utf-32-le"), np.uint32)]
        return [texts[number] for number in _merge(symbols, self._keys, self._ranks, self._joined).tolist()]


@kernel
def _find(keys: NDArray[np.int64], left: int, right: int) -> int:
    """Index of a pair, -1 if it does not join."""
    key = (np.int64(left) << 32) | np.int64(right)
    low, high = 0, keys.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low if low < keys.shape[0] and keys[low] == key else -1


@kernel
def _sink(heap: NDArray[np.int64], at: int, size: int) -> None:
    item = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= item:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item


@kernel
def _rise(heap: NDArray[np.int64], at: int) -> None:
    item = heap[at]
    while at > 0:
        parent = (at - 1) >> 1
        if heap[parent] <= item:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = item


@kernel
def _merge(symbols: Any, keys: Any, ranks: Any, joined: Any) -> Any:
    """Symbols int32[n] after all merges, int32[m]. A heap item is rank << 32 | position."""
    size = symbols.shape[0]
    following = np.arange(1, size + 1).astype(np.int32)
    before = np.arange(-1, size - 1).astype(np.int32)
    pair = np.full(size, -1, np.int32)
    heap = np.empty(2 * size, np.int64)  # a merge takes one item out and puts at most two in
    count = 0
    for at in range(size - 1):
        found = _find(keys, symbols[at], symbols[at + 1])
        pair[at] = found
        if found >= 0:
            heap[count] = (np.int64(ranks[found]) << 32) | np.int64(at)
            count += 1
    for start in range(count // 2 - 1, -1, -1):
        _sink(heap, start, count)
    while count:
        top = heap[0]
        count -= 1
        if count:
            heap[0] = heap[count]
            _sink(heap, 0, count)
        at = top & np.int64(0xFFFFFFFF)
        if pair[at] < 0 or ranks[pair[at]] != top >> 32:
            continue
        gone = following[at]
        after = following[gone]
        symbols[at] = joined[pair[at]]
        symbols[gone] = -1
        pair[gone] = -1
        following[at] = after
        if after < size:
            before[after] = at
        for side in range(2):
            left = before[at] if side == 0 else at
            if left < 0:
                continue
            right = following[left]
            found = _find(keys, symbols[left], symbols[right]) if right < size else -1
            pair[left] = found
            if found >= 0:
                heap[count] = (np.int64(ranks[found]) << 32) | np.int64(left)
                _rise(heap, count)
                count += 1
    return symbols[symbols >= 0]

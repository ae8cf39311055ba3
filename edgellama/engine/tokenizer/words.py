"""A memory of words: natural text repeats most of its words, and a look-up costs a tenth of a microsecond."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

_MOST_WORDS = 1 << 15
_LONGEST_CHARACTERS = 64


class WordMemory(dict[str, tuple[int, ...]]):
    """Ids by word, computed once. Threads may share it: the worst that happens is that one computes a word again."""

    def __init__(self, compute: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._compute(word))
        if len(word) <= _LONGEST_CHARACTERS:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def ids(self, words: Iterable[str]) -> list[int]:
        """The ids of all words in a row."""
        return list(chain.from_iterable(map(self.__getitem__, words)))

"""Words: where a text with U+2581 for its spaces may be cut, and a memory of their ids.

Natural text repeats most of its words, and a look-up costs a tenth of a microsecond.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain

from edgellama.engine.tokenizer.vocabulary import SPACE

_MOST_WORDS = 1 << 15
_LONGEST_CHARACTERS = 64


def before_spaces(texts: Iterable[str]) -> re.Pattern[str]:
    """Where none of `texts` can reach across: in front of a U+2581 after a character that none has there.

    Pieces between such places are tokenized independently, which makes words of a text and keeps the result.
    """
    inner = set(re.findall(rf"(?s).(?={SPACE})", "\0".join(texts)))
    letters = "".join(sorted(map(re.escape, inner)))
    return re.compile(f"(?<=[^{letters}])(?={SPACE})" if letters else f"(?<=.)(?={SPACE})", re.DOTALL)


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

"""Which tokens end an answer: those the engine names, and control tokens whose text is known to end a turn."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from edgellama.chat.stops import end_of_turn_texts
from edgellama.engine.base import Tokenizer


class EndTokens:
    """The ids that end an answer. Some files name only one of two in use, hence the search by text."""

    def __init__(self, tokenizer: Tokenizer, control_texts: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        texts = sorted(end_of_turn_texts(control_texts))
        single = [ids for text in texts if len(ids := tokenizer.tokenize(text, special=True)) == 1]
        self._by_text = frozenset(ids[0] for ids in single)

    def __contains__(self, token: int) -> bool:
        return token in self._by_text or self._tokenizer.is_end(token)

    @functools.cached_property
    def ids(self) -> frozenset[int]:
        """All of them; looks at the whole vocabulary once."""
        return self._by_text.union(filter(self._tokenizer.is_end, range(self._tokenizer.size)))

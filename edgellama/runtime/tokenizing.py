"""Prompt parts to token ids, as one text as far as possible: cutting a text moves the borders of its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from edgellama.chat.messages import PromptPart, TextPart, TokenPart
from edgellama.engine.base import Tokenizer


class PromptTokenizer:
    """Turns the parts of a prompt into ids."""

    def __init__(self, tokenizer: Tokenizer, control_texts: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        longest_first = sorted(filter(None, set(control_texts)), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def tokenize(self, parts: Sequence[PromptPart], *, add_bos: bool = False) -> list[int]:
        """Ids of all parts; `add_bos` puts the beginning token in front where the model wants one."""
        ids: list[int] = []
        first = True
        for part in self._joined(parts):
            if isinstance(part, TokenPart):
                ids += self._spliced(part, add_bos=add_bos and first)
            else:
                ids += self._tokenizer.tokenize(part.text, special=part.special, add_bos=add_bos and first)
            first = False
        if first and add_bos:
            ids += self._tokenizer.tokenize("", add_bos=True)
        return ids

    def _spliced(self, part: TokenPart, *, add_bos: bool) -> list[int]:
        tokenizer = self._tokenizer
        missing = add_bos and tokenizer.adds_bos and part.tokens[:1] != (tokenizer.bos,)
        return [tokenizer.bos, *part.tokens] if missing else list(part.tokens)

    def _joined(self, parts: Sequence[PromptPart]) -> list[PromptPart]:
        """Neighbouring texts in one where that changes no token's meaning; empty ones are left out."""
        joined: list[PromptPart] = []
        for part in parts:
            if isinstance(part, TokenPart):
                if part.tokens:
                    joined.append(part)
                continue
            if not part.text:
                continue
            # Text without control tokens in it may as well be searched for them.
            special = part.special or (self._control is None or self._control.search(part.text) is None)
            last = joined[-1] if joined else None
            if isinstance(last, TextPart) and last.special == special and not self._meets(last, part, special):
                joined[-1] = TextPart(last.text + part.text, special)
            else:
                joined.append(TextPart(part.text, special))
        return joined

    def _meets(self, left: TextPart, right: TextPart, special: bool) -> bool:
        """Whether a control token's text would come about where two texts meet."""
        if not special or self._control is None:
            return False
        border = len(left.text)
        reach = 256  # no control token is longer
        around = left.text[-reach:] + right.text[:reach]
        cut = min(border, reach)
        return any(m.start() < cut < m.end() for m in self._control.finditer(around))

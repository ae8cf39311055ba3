"""Prompt parts to token ids, as one text as far as possible: cutting a text moves the borders of its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from edgellama.chat.messages import PromptPart, TextPart, TokenPart
from edgellama.chat.reasoning import CONTROL_TEXTS
from edgellama.engine.base import Tokenizer
from edgellama.runtime.sequence import shown_piece


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
        """The ids of an earlier answer, or of its text where the ids stand for something else here."""
        tokenizer = self._tokenizer
        if part.text and self._text_of(part.tokens) != part.text:
            return tokenizer.tokenize(part.text, special=False, add_bos=add_bos)
        missing = add_bos and tokenizer.adds_bos and part.tokens[:1] != (tokenizer.bos,)
        return [tokenizer.bos, *part.tokens] if missing else list(part.tokens)

    def _text_of(self, tokens: Sequence[int]) -> str | None:
        """What ids stand for in an answer, tags of its parts included; None for ids outside the vocabulary."""
        if not all(0 <= token < self._tokenizer.size for token in tokens):
            return None
        pieces = (shown_piece(self._tokenizer, token, CONTROL_TEXTS) for token in tokens)
        return b"".join(pieces).decode(errors="replace")

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
            if isinstance(last, TextPart) and last.special == special and not self._meets(last, part):
                joined[-1] = TextPart(last.text + part.text, special)
            else:
                joined.append(TextPart(part.text, special))
        return joined

    def _meets(self, left: TextPart, right: TextPart) -> bool:
        """Whether a control token's text would come about where two texts meet.

        It matters between texts that are not searched for control tokens too: user-defined ones are found in any text.
        """
        if self._control is None:
            return False
        border = len(left.text)
        reach = 256  # no control token is longer
        around = left.text[-reach:] + right.text[:reach]
        cut = min(border, reach)
        return any(m.start() < cut < m.end() for m in self._control.finditer(around))

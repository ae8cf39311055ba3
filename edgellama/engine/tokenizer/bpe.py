"""Byte-level BPE (`gpt2`) and BPE on plain text (`gemma4` and its like)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from itertools import chain

from edgellama.engine.tokenizer import code_points
from edgellama.engine.tokenizer.merging import Merger
from edgellama.engine.tokenizer.splitting import split
from edgellama.engine.tokenizer.vocabulary import SPACE, Vocabulary
from edgellama.engine.tokenizer.words import WordMemory, before_spaces


def _letters() -> dict[int, int]:
    """GPT-2's letter for each byte: itself where that prints, the code points from 256 on for the others."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 256 + index for index, byte in enumerate(others)}


LETTER_OF_BYTE = _letters()
BYTE_OF_LETTER = {chr(letter): byte for byte, letter in LETTER_OF_BYTE.items()}


class BytePairs:
    """Ids of texts without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._ranks = vocabulary.merges
        self._pre = vocabulary.pre
        self._escape = vocabulary.escape_spaces
        self._lower_case = vocabulary.lower_case
        self._without_spaces = code_points.Table(self._bare) if vocabulary.model == "whitespace" else None
        self._merger = Merger(self._rank, self._joins)
        self._words = WordMemory(self._word)

    def encode(self, text: str, *, after_special: bool) -> list[int]:  # noqa: ARG002  (one signature for all kinds)
        """Ids of `text`."""
        if self._escape:
            text = text.replace(" ", SPACE)
        if self._without_spaces is not None:
            pieces = filter(None, text.translate(self._without_spaces).split(" "))
            return self._words.ids(word for piece in pieces for word in split(piece, self._pre.stages))
        words = split(text, self._pre.stages)
        if self._escape:
            words = chain.from_iterable(map(self._word_starts.split, words))
        return self._words.ids(words)

    @functools.cached_property
    def _word_starts(self) -> re.Pattern[str]:
        return before_spaces(merge.replace(" ", "") for merge in self._ranks)

    def _bare(self, character: str) -> str:
        if character in code_points.SPACES:
            return " "
        return code_points.lower(character) if self._lower_case else character

    def _rank(self, left: str, right: str) -> int | None:
        return self._ranks.get(f"{left} {right}")

    def _joins(self) -> Iterator[tuple[str, str, float]]:
        for text, rank in self._ranks.items():
            at = text.find(" ", 1)
            if at > 0:
                yield text[:at], text[at + 1 :], rank

    def _word(self, word: str) -> list[int]:
        if self._pre.byte_letters:
            word = word.encode().decode("latin-1").translate(LETTER_OF_BYTE)
        stays_whole = self._pre.whole_words or (self._pre.gemma and not word.strip("\n"))
        if stays_whole and word in self._ids:
            return [self._ids[word]]
        found: list[int] = []
        for symbol in self._merger.merge(word):
            token = self._ids.get(symbol)
            if token is None:
                found += self._without_token(symbol)
            else:
                found.append(token)
        return found

    def _without_token(self, symbol: str) -> list[int]:
        """llama.cpp goes on with the symbol's bytes, and leaves out those that are no token either."""
        data = symbol.encode("utf-8", "surrogateescape")
        if self._pre.byte_letters:
            texts = [bytes((byte,)).decode("utf-8", "surrogateescape") for byte in data]
        else:
            texts = [f"<0x{byte:02X}>" for byte in data]
        return [self._ids[text] for text in texts if text in self._ids]

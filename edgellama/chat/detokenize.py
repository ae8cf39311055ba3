"""Bytes of tokens to text: a token may end inside a character, and a character is never cut."""

from __future__ import annotations

import codecs


class Utf8Decoder:
    """Incremental UTF-8. Invalid bytes become U+FFFD, one per maximal part of a sequence, as browsers do."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The characters that are complete with `data`."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What the text ends with: U+FFFD for an unfinished character, else ""; the decoder is then new again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

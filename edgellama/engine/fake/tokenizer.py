"""The fake engine's vocabulary: 256 bytes, the control tokens, then whole pieces."""

from __future__ import annotations

import re

from edgellama.engine.fake.script import Script


class FakeTokenizer:
    """Byte-level: id b is byte b; control tokens follow, then pieces. Immutable, hence thread-safe."""

    def __init__(self, script: Script) -> None:
        self._control = {text: 256 + i for i, text in enumerate(script.control_tokens)}
        first_piece = 256 + len(self._control)
        pieces = {text.encode(): first_piece + i for i, text in enumerate(script.pieces)}
        self._pieces = pieces
        self._bytes = [bytes([b]) for b in range(256)] + [b""] * len(self._control) + list(pieces)
        self._ends = frozenset(self._control[text] for text in script.ends)
        self._texts = script.control_tokens
        self._adds_bos = script.adds_bos
        self._bos = self._control.get(script.bos, -1)
        self.eos = self._control.get(script.eos, -1)
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if self._texts else None
        by_length = sorted(pieces, key=len, reverse=True)
        self._piece_pattern = re.compile(b"|".join(map(re.escape, by_length))) if pieces else None

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of `text`, see `Tokenizer.tokenize`."""
        ids = [self._bos] if add_bos and self._adds_bos and self._bos >= 0 else []
        if not special or self._control_pattern is None:
            return ids + self._plain(text)
        for part in self._control_pattern.split(text):
            control = self._control.get(part)
            ids += self._plain(part) if control is None else [control]
        return ids

    def _plain(self, text: str) -> list[int]:
        data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        if self._piece_pattern is None:
            return list(data)
        ids: list[int] = []
        end = 0
        for match in self._piece_pattern.finditer(data):
            ids += data[end : match.start()]
            ids.append(self._pieces[match.group()])
            end = match.end()
        return ids + list(data[end:])

    def piece(self, token: int) -> bytes:
        """The bytes of a token; b"" for control tokens and unknown ids."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def text_of(self, token: int) -> str:
        """The vocabulary's text of a token: `<0x41>` for bytes; "" for unknown ids."""
        if 0 <= token < 256:
            return f"<0x{token:02X}>"
        if 0 <= token - 256 < len(self._texts):
            return self._texts[token - 256]
        return self.piece(token).decode()

    def is_end(self, token: int) -> bool:
        """Whether the token ends an answer."""
        return token in self._ends

    def render(self, tokens: list[int]) -> bytes:
        """Everything the tokens stand for, control tokens as their texts."""
        return b"".join(self._bytes[t] or self._texts[t - 256].encode() for t in tokens)

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self._bytes)

    @property
    def bos(self) -> int:
        """Id of the token that begins a text, -1 if none."""
        return self._bos

    @property
    def adds_bos(self) -> bool:
        """Whether `tokenize(add_bos=True)` puts `bos` in front."""
        return self._adds_bos

    def control_texts(self) -> list[str]:
        """Texts of the control tokens."""
        return list(self._texts)

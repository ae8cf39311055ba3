"""The vocabulary of a GGUF file as a `Tokenizer`, without any engine. Ids equal llama.cpp's."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Protocol

from edgellama.engine.tokenizer import vocabulary as v
from edgellama.engine.tokenizer.bpe import BYTE_OF_LETTER, BytePairs
from edgellama.engine.tokenizer.plamo2 import Plamo2
from edgellama.engine.tokenizer.rwkv import LongestBytes, unescaped
from edgellama.engine.tokenizer.sentencepiece import SentencePieces
from edgellama.engine.tokenizer.special import SpecialTokens
from edgellama.engine.tokenizer.unigram import Unigrams
from edgellama.engine.tokenizer.vocabulary import Vocabulary
from edgellama.engine.tokenizer.wordpiece import WordPieces
from edgellama.errors import UnsupportedError
from edgellama.gguf_io import Header, read


class _Model(Protocol):
    def encode(self, text: str, *, after_special: bool) -> list[int]: ...


class _NoVocabulary:
    def __init__(self, _: Vocabulary) -> None:
        pass

    def encode(self, text: str, *, after_special: bool) -> list[int]:  # noqa: ARG002  (one signature for all kinds)
        raise UnsupportedError("this model has no vocabulary, so it takes no text", "choose a language model")


_MODELS: dict[str, Callable[[Vocabulary], _Model]] = {
    "bpe": BytePairs,
    "spm": SentencePieces,
    "wpm": WordPieces,
    "ugm": Unigrams,
    "rwkv": LongestBytes,
    "plamo2": Plamo2,
    "none": _NoVocabulary,
}


class GGUFTokenizer:
    """Text to ids and back. Any thread may use it: what it remembers on the way only saves time."""

    def __init__(self, vocabulary: Vocabulary, *, whole_rule: bool = False) -> None:
        """`whole_rule`: `add_bos` adds all that the model asks for around a text, the end token too (embeddings)."""
        self._vocabulary = vocabulary
        self._whole_rule = whole_rule
        self._special = SpecialTokens(vocabulary)
        self._model = _MODELS[vocabulary.kind](vocabulary)
        self._bos = vocabulary.special["bos"]
        self._adds_bos = vocabulary.add_bos and self._bos >= 0
        self.notices = vocabulary.notices
        """What a caller should tell the user about this vocabulary."""

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """See `Tokenizer.tokenize`. Half surrogate pairs become U+FFFD."""
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        after_special = True
        for part in self._special.partition(text, special=special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._model.encode(part, after_special=after_special)
            after_special = isinstance(part, int)
        return self._framed(ids) if add_bos else ids

    def _framed(self, ids: list[int]) -> list[int]:
        kind, special = self._vocabulary.kind, self._vocabulary.special
        if not self._whole_rule:
            return [self._bos, *ids] if self._adds_bos else ids
        if kind == "wpm":
            return [self._bos, *ids, special["seperator"]]
        if kind in ("rwkv", "plamo2"):
            return ids
        before = [self._bos] if self._adds_bos else []
        after = [special["eos"]] if self._vocabulary.add_eos and special["eos"] >= 0 else []
        return [*before, *ids, *after]

    def piece(self, token: int) -> bytes:
        """See `Tokenizer.piece`; b"" for ids outside the vocabulary."""
        return self._pieces[token] if 0 <= token < len(self._vocabulary.texts) else b""

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        return [self._piece(token) for token in range(len(self._vocabulary.texts))]

    def _piece(self, token: int) -> bytes:
        attribute, kind = self._vocabulary.attributes[token], self._vocabulary.kind
        text = self._vocabulary.texts[token]
        if attribute & (v.CONTROL | v.UNKNOWN):
            return b""
        if kind == "rwkv":
            return unescaped(text)
        if attribute & v.USER_DEFINED or (kind == "plamo2" and not attribute & v.BYTE):
            return text.encode("utf-8", "surrogateescape")
        if attribute & v.NORMAL:
            return self._normal_piece(text)
        return bytes((int(text[3:5], 16),)) if attribute & v.BYTE else b""

    def _normal_piece(self, text: str) -> bytes:
        if self._vocabulary.kind == "bpe" and not self._vocabulary.escape_spaces:
            return _bytes_of_letters(text)
        return text.replace(v.SPACE, " ").encode("utf-8", "surrogateescape")

    def text_of(self, token: int) -> str:
        """See `Tokenizer.text_of`; "" for ids outside the vocabulary."""
        if not 0 <= token < len(self._vocabulary.texts):
            return ""
        return re.sub("[\udc80-\udcff]", "\ufffd", self._vocabulary.texts[token])

    def is_end(self, token: int) -> bool:
        """See `Tokenizer.is_end`."""
        return token in self._vocabulary.ends

    @property
    def size(self) -> int:
        """Number of ids."""
        return self._vocabulary.size

    @property
    def bos(self) -> int:
        """Id of the token that begins a text, -1 if none."""
        return self._bos

    @property
    def eos(self) -> int:
        """Id of the token that ends a text, -1 if none."""
        return self._vocabulary.special["eos"]

    @property
    def adds_bos(self) -> bool:
        """Whether the model wants `bos` in front of a prompt."""
        return self._adds_bos

    def control_texts(self) -> list[str]:
        """See `Tokenizer.control_texts`."""
        attributes = self._vocabulary.attributes
        control = (t for t in self._vocabulary.special_tokens if attributes[t] & (v.CONTROL | v.UNKNOWN))
        return [text for text in map(self.text_of, control) if text]


def _bytes_of_letters(text: str) -> bytes:
    """Bytes that GPT-2's letters stand for; other characters are shown as llama.cpp shows them."""
    found = bytearray()
    for letter in text:
        byte = BYTE_OF_LETTER.get(letter)
        if byte is None:
            code = letter.encode("utf-8", "surrogateescape")
            shown = b"\xef\xbf\xbd" if "\udc80" <= letter <= "\udcff" else code
            found += b"[UNK_BYTE_0x" + shown.hex().encode() + text.encode("utf-8", "surrogateescape") + b"]"
        else:
            found.append(byte)
    return bytes(found)


def load(source: str | os.PathLike[str] | Header, *, whole_rule: bool = False) -> GGUFTokenizer:
    """The tokenizer of a GGUF file, named by its path or given as its header.

    Raises `UnsupportedError` for a tokenizer or pre-tokenizer that is not known, and what `gguf_io.read` raises.
    """
    header = source if isinstance(source, Header) else read(source)
    return GGUFTokenizer(Vocabulary(header), whole_rule=whole_rule)

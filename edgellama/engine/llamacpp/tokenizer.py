"""llama.cpp's vocabulary as a `Tokenizer`: reads only, so any thread may use it while a step runs."""

from __future__ import annotations

import ctypes
import functools
from itertools import repeat
from typing import Any

from edgellama.engine.llamacpp import deep_stack
from edgellama.errors import EngineError, UsageError

_UNKNOWN, _CONTROL = 1, 8  # LLAMA_TOKEN_ATTR_…
_MAX_TEXT_BYTES = 2**31 - 1


class LlamaTokenizer:
    """Text to ids and back, in llama.cpp's own code. `model` must stay alive."""

    def __init__(self, library: Any, model: int, *, whole_rule: bool) -> None:
        """`whole_rule`: `add_bos` adds all that the model asks for around a text, the end token too (embeddings)."""
        self._library = library
        self._vocabulary = library.llama_model_get_vocab(model)
        self._whole_rule = whole_rule
        self._size = int(library.llama_vocab_n_tokens(self._vocabulary))
        self._bos = int(library.llama_vocab_bos(self._vocabulary))
        self._adds_bos = bool(library.llama_vocab_get_add_bos(self._vocabulary)) and self._bos >= 0
        self._eos = int(library.llama_vocab_eos(self._vocabulary))
        self._pieces: list[bytes | None] = [None] * self._size
        self._closed = False

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """See `Tokenizer.tokenize`. Half surrogate pairs become U+FFFD."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        data = text.encode()
        if len(data) > _MAX_TEXT_BYTES // 2:
            raise UsageError(f"a text of {len(data):,} bytes is too long for one call")
        whole = add_bos and self._whole_rule
        ids = deep_stack.call(lambda: self._call(data, whole, special, len(data) + 16), text)
        return [self._bos, *ids] if add_bos and not whole and self._adds_bos else ids

    def _call(self, data: bytes, whole: bool, special: bool, room: int) -> list[int]:
        self._check_open()
        for _ in range(2):
            buffer = (ctypes.c_int32 * room)()
            count = self._library.llama_tokenize(self._vocabulary, data, len(data), buffer, room, whole, special)
            if count >= 0:
                return buffer[:count]
            room = -count
        raise EngineError(f"llama.cpp could not tokenize a text of {len(data):,} bytes")

    def piece(self, token: int) -> bytes:
        """See `Tokenizer.piece`; b"" for ids outside the vocabulary."""
        if not 0 <= token < self._size:
            return b""
        known = self._pieces[token]
        if known is None:
            known = self._pieces[token] = self._piece(token)
        return known

    def _piece(self, token: int) -> bytes:
        self._check_open()
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._library.llama_token_to_piece(self._vocabulary, token, buffer, room, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def text_of(self, token: int) -> str:
        """See `Tokenizer.text_of`; "" for ids outside the vocabulary."""
        if not 0 <= token < self._size:
            return ""
        self._check_open()
        return (self._library.llama_vocab_get_text(self._vocabulary, token) or b"").decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """See `Tokenizer.is_end`."""
        return token in self._ends

    @functools.cached_property
    def _control(self) -> list[int]:
        self._check_open()
        attributes = map(self._library.llama_vocab_get_attr, repeat(self._vocabulary), range(self._size))
        return [token for token, attribute in enumerate(attributes) if attribute & (_CONTROL | _UNKNOWN)]

    @functools.cached_property
    def _ends(self) -> frozenset[int]:
        library = self._library
        named = [getattr(library, f"llama_vocab_{name}") for name in ("eos", "eot", "fim_pad", "fim_rep", "fim_sep")]
        candidates = {*self._control, *(int(get(self._vocabulary)) for get in named)}
        return frozenset(t for t in candidates if t >= 0 and library.llama_vocab_is_eog(self._vocabulary, t))

    @property
    def size(self) -> int:
        """Number of ids."""
        return self._size

    @property
    def bos(self) -> int:
        """Id of the token that begins a text, -1 if none."""
        return self._bos

    @property
    def eos(self) -> int:
        """Id of the token that ends a text, -1 if none."""
        return self._eos

    @property
    def adds_bos(self) -> bool:
        """Whether the model wants `bos` in front of a prompt."""
        return self._adds_bos

    def control_texts(self) -> list[str]:
        """See `Tokenizer.control_texts`."""
        return [text for text in map(self.text_of, self._control) if text]

    def close(self) -> None:
        """The model is about to be freed: further calls raise instead of reading freed memory."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

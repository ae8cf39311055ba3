"""The tokenizer's arrays: lengths against each other, ids in range, and what llama.cpp would abort on."""

from __future__ import annotations

import math
import struct

from edgellama.errors import GGUFError
from edgellama.gguf_io.parse import SCORES, TOKEN_TYPES, TOKENS, RawFile
from edgellama.gguf_io.types import ArrayInfo, ValueType, type_label

MODEL = "tokenizer.ggml.model"
MERGES = "tokenizer.ggml.merges"
_CONVERT_AGAIN = "convert the model again, or fetch another file of it"

NO_VOCABULARY = ("no_vocab", "none")
_BYTE = 6
"""Token type of byte tokens (`<0x0A>`)."""

_DEFAULT_BEGIN = {"llama": 1, "bert": 101, "gpt2": 11, "plamo2": 1}
_DEFAULT_END = {"llama": 2, "bert": None, "gpt2": 11, "t5": 1, "plamo2": 2}
_DEFAULT_SEPARATOR = {"bert": 102}
_ADDS_BEGIN = ("llama", "bert")
_PRE_ADDS_BEGIN = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
    | {"tekken", "chameleon"}
)

_ANSWER_IDS = ("bos", "eos", "eot", "eom")
_OTHER_IDS = ("unknown", "seperator", "padding", "mask", "cls", "prefix", "suffix", "middle")
_FILL_IDS = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
_NO_ID = 0xFFFFFFFF

_FLAGS = (
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_sep_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.remove_extra_whitespaces",
)
_STRINGS = (MODEL, "tokenizer.ggml.pre", "tokenizer.chat_template")


def token_count(raw: RawFile) -> int:
    """Number of tokens in the vocabulary; 0 without one."""
    value = raw.metadata.get(TOKENS)
    if isinstance(value, ArrayInfo):
        return value.length
    return len(value) if isinstance(value, tuple) else 0


def require(raw: RawFile) -> None:
    """Models that edgellama runs need to say which tokenizer they have."""
    if MODEL not in raw.metadata:
        raise _error(raw, MODEL, "no such key", "the tokenizer's kind", _CONVERT_AGAIN)


def check(raw: RawFile) -> None:
    """Check the vocabulary of a model or vocabulary file."""
    for key in _FLAGS:
        _expect(raw, key, ValueType.BOOL)
    for key in _STRINGS:
        _expect(raw, key, ValueType.STRING)
    model = raw.metadata.get(MODEL)
    if not isinstance(model, str):
        raise _error(raw, MODEL, "no such key", "the tokenizer's kind", _CONVERT_AGAIN)
    if model in NO_VOCABULARY:
        return
    tokens = raw.captured.get(TOKENS)
    if not isinstance(tokens, list) or raw.value_types[TOKENS] != (ValueType.ARRAY, ValueType.STRING):
        found = type_label(*raw.value_types[TOKENS]) if TOKENS in raw.metadata else "no such key"
        raise _error(raw, TOKENS, found, "an array of strings", _CONVERT_AGAIN)
    if not tokens:
        raise _error(raw, TOKENS, "no tokens", "a vocabulary")
    _check_lengths(raw, len(tokens))
    distinct = _check_unique(raw, tokens)
    _check_scores(raw)
    _check_merges(raw, model)
    _check_bytes(raw, model, tokens, distinct)
    _check_ids(raw, len(tokens))
    _check_frame(raw, model, len(tokens))


def _error(raw: RawFile, key: str, found: object, expected: object, advice: str = "") -> GGUFError:
    return GGUFError(raw.path, raw.offsets.get(key, 0), key, str(found), str(expected), advice)


def _expect(raw: RawFile, key: str, kind: ValueType) -> None:
    if key in raw.metadata and raw.value_types[key] != (kind, None):
        raise _error(raw, key, type_label(*raw.value_types[key]), kind.name.lower(), _CONVERT_AGAIN)


def _check_lengths(raw: RawFile, tokens: int) -> None:
    for key, allowed in ((TOKEN_TYPES, (ValueType.INT32,)), (SCORES, (ValueType.FLOAT32, ValueType.INT32))):
        if key not in raw.metadata:
            continue
        kind, element = raw.value_types[key]
        if element not in allowed:
            expected = " or ".join(type_label(ValueType.ARRAY, item) for item in allowed)
            raise _error(raw, key, type_label(kind, element), expected, _CONVERT_AGAIN)
        data = raw.captured[key]
        length = len(data) // 4
        if length < tokens:
            raise _error(raw, key, f"{length:,} values", f"{tokens:,}, one per token", _CONVERT_AGAIN)
        if length > tokens:
            raw.notices.append(f"{key} has {length:,} values for {tokens:,} tokens; the rest is ignored")


def _check_unique(raw: RawFile, tokens: list[bytes]) -> set[bytes]:
    """llama.cpp names empty tokens `[EMPTY_n]` and aborts when two tokens are equal."""
    distinct = set(tokens)
    named = tokens
    if b"" in distinct:
        named = [token or b"[EMPTY_%d]" % index for index, token in enumerate(tokens)]
        distinct = set(named)
    if len(distinct) == len(named):
        return distinct
    seen: dict[bytes, int] = {}
    for index, token in enumerate(named):
        first = seen.setdefault(token, index)
        if first != index:
            text = token[:40].decode(errors="replace")
            raise _error(raw, f"{TOKENS}[{index}]", f"{text!r}, which is token {first} too", "each token once")
    return distinct


def _check_scores(raw: RawFile) -> None:
    data = raw.captured.get(SCORES)
    if not isinstance(data, bytes) or raw.value_types[SCORES][1] is not ValueType.FLOAT32:
        return
    values = struct.unpack(f"<{len(data) // 4}f", data)
    if math.isnan(sum(values)):  # one pass in C; infinities of both signs also end here
        for index, value in enumerate(values):
            if math.isnan(value):
                raise _error(raw, f"{SCORES}[{index}]", "not a number", "a number")


def _check_merges(raw: RawFile, model: str) -> None:
    if MERGES in raw.metadata:
        if raw.value_types[MERGES] != (ValueType.ARRAY, ValueType.STRING):
            raise _error(raw, MERGES, type_label(*raw.value_types[MERGES]), "an array of strings", _CONVERT_AGAIN)
    elif model in ("gpt2", "gemma4") and raw.metadata.get("tokenizer.ggml.pre") != "kimi-k2":
        raise _error(raw, MERGES, "no such key", f"the merges of a {model} tokenizer", _CONVERT_AGAIN)


def _check_bytes(raw: RawFile, model: str, tokens: list[bytes], distinct: set[bytes]) -> None:
    """Byte tokens must spell their byte; a SentencePiece vocabulary without them cannot take arbitrary text."""
    data = raw.captured.get(TOKEN_TYPES)
    marked: list[int] = []
    if isinstance(data, bytes):
        kinds = struct.unpack(f"<{len(data) // 4}i", data)[: len(tokens)]
        for _ in range(kinds.count(_BYTE)):
            marked.append(kinds.index(_BYTE, marked[-1] + 1 if marked else 0))
    if marked and model == "bert":
        raise _error(raw, f"{TOKEN_TYPES}[{marked[0]}]", "a byte token", "none in a WordPiece vocabulary")
    for index in marked:
        if not _spells_byte(tokens[index]):
            text = tokens[index][:40].decode(errors="replace")
            raise _error(raw, f"{TOKENS}[{index}]", f"{text!r} for a byte token", "'<0x00>' to '<0xFF>'")
    if model == "llama":
        for byte in range(256):
            if b"<0x%02X>" % byte not in distinct and bytes((byte,)) not in distinct:
                raise _error(raw, TOKENS, f"no token for byte 0x{byte:02X}", "a token for each byte", _CONVERT_AGAIN)


def _spells_byte(token: bytes) -> bool:
    if len(token) != 6 or token[:3] != b"<0x" or token[5:] != b">":
        return False
    return all(digit in b"0123456789ABCDEFabcdef" for digit in token[3:5])


def _check_ids(raw: RawFile, tokens: int) -> None:
    for name in _ANSWER_IDS + _OTHER_IDS + _FILL_IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in raw.metadata:
            continue
        _expect(raw, key, ValueType.UINT32)
        value = raw.metadata[key]
        if not isinstance(value, int) or value < tokens:
            continue
        if name in _ANSWER_IDS and value != _NO_ID:
            raise _error(raw, key, value, f"an id below {tokens:,}", _CONVERT_AGAIN)
        raw.notices.append(f"{key} is {value}, beyond the {tokens:,} tokens; it is ignored")


def _check_frame(raw: RawFile, model: str, tokens: int) -> None:
    """A vocabulary that adds a token in front or at the end needs to have that token: llama.cpp aborts otherwise."""
    pre = raw.metadata.get("tokenizer.ggml.pre", "")
    adds_begin = model in _ADDS_BEGIN or (model == "gpt2" and pre in _PRE_ADDS_BEGIN) or model == "gemma4"
    adds = (
        ("bos", raw.metadata.get("tokenizer.ggml.add_bos_token", adds_begin), _DEFAULT_BEGIN.get(model)),
        ("eos", raw.metadata.get("tokenizer.ggml.add_eos_token", model == "t5"), _DEFAULT_END.get(model)),
        ("seperator", model == "bert", _DEFAULT_SEPARATOR.get(model)),
    )
    for name, wanted, default in adds:
        key = f"tokenizer.ggml.{name}_token_id"
        value = raw.metadata.get(key)
        if isinstance(value, int) and value >= tokens:
            value = None
        chosen = default if value is None else value
        needed = wanted and model not in ("rwkv", "plamo2", "test")
        if needed and (chosen is None or (isinstance(chosen, int) and chosen >= tokens)):
            raise _error(raw, key, "no such token", f"the token that this {model} vocabulary adds", _CONVERT_AGAIN)

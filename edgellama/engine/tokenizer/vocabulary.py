"""The vocabulary of a GGUF file as llama.cpp understands it: texts, scores, attributes, special ids, end tokens."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping

from edgellama.engine.tokenizer import pre_tokenizers
from edgellama.engine.tokenizer.pre_tokenizers import PreTokenizer
from edgellama.errors import InvalidFileError, UnsupportedError
from edgellama.gguf_io import Header, ValueType

UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 2, 4, 8, 16, 32
STRIPS_LEFT, STRIPS_RIGHT = 128, 256
_ATTRIBUTES: dict[float, int] = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}
"""Attribute bits by token type."""

NONE = -1
_ARRAY_HEAD_BYTES = 16
_CONVERT_AGAIN = "convert the model again, or fetch another file of it"
SPACE = "\u2581"

_KINDS = {
    "llama": "spm",
    "bert": "wpm",
    "gpt2": "bpe",
    "gemma4": "bpe",
    "t5": "ugm",
    "rwkv": "rwkv",
    "plamo2": "plamo2",
    "whitespace": "bpe",
    "none": "none",
    "no_vocab": "none",
}
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "gpt2": {"bos": 11, "eos": 11},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "plamo2": {"bos": 1, "eos": 2, "unknown": 0, "padding": 3},
    "whitespace": {"bos": 11, "eos": 11},
}
_ID_NAMES = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask"),  # spelt as GGUF does
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}

_ENDS_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_utterance>",
)
_TEXTS_OF_IDS = {
    "eot": _ENDS_OF_TURN,
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_ENDS = (
    *_ENDS_OF_TURN,
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>"),
    *("<turn|>", "<|tool_response>", "[e~["),
)
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_MASKED_PRE = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
_MASKED_ARCHITECTURES = ("nomic-bert-moe", "jina-bert-v3")


class Vocabulary:
    """Everything the tokenizers read; nothing changes after `__init__`.

    Texts are the file's bytes as UTF-8, with bytes that are none as lone surrogates U+DC80 to U+DCFF.
    Raises `UnsupportedError` for a tokenizer that is not known, `InvalidFileError` for a file without one.
    """

    def __init__(self, header: Header) -> None:
        self.model = header.text("tokenizer.ggml.model")
        if not self.model:
            raise InvalidFileError(f"{header.path}: says nothing about its tokenizer (tokenizer.ggml.model)")
        kind = _KINDS.get(self.model)
        if kind is None:
            advice = "the llama.cpp engine, where installed, may know it"
            raise UnsupportedError(f"the tokenizer {self.model!r} is not known here (tokenizer.ggml.model)", advice)
        self.kind = kind
        self._metadata = header.metadata
        pre = "gemma4" if self.model == "gemma4" else header.text("tokenizer.ggml.pre")
        self.pre: PreTokenizer = pre_tokenizers.find(pre if kind == "bpe" else "default")
        self.notices: tuple[str, ...] = ()
        """What a caller should tell the user."""
        if kind == "bpe" and not pre:
            self.notices = ("the file does not name its pre-tokenizer; `default` may cut words in other places",)
        encoded = header.encoded_metadata() if kind != "none" else {}
        self.texts = _texts(encoded.get("tokenizer.ggml.tokens", b""))
        self.size = len(self.texts) if kind != "none" else header.number("vocab_size")
        """Number of ids; a model without vocabulary has ids without texts."""
        self.ids: dict[str, int] = dict(zip(self.texts, range(len(self.texts)), strict=True))
        self.merges = _merges(encoded.get("tokenizer.ggml.merges", b"")) if kind == "bpe" else {}
        self.scores = _numbers(encoded.get("tokenizer.ggml.scores", b""), len(self.texts)) or [0.0] * len(self.texts)
        self.charsmap = _bytes(encoded.get("tokenizer.ggml.precompiled_charsmap", b"")) if kind == "ugm" else b""
        types = _numbers(encoded.get("tokenizer.ggml.token_type", b""), len(self.texts))
        self.types = [_ATTRIBUTES.get(kind, 0) for kind in types] if types else [NORMAL] * len(self.texts)
        """Attributes by the file's own types."""
        self.attributes = list(self.types)
        """Attributes after llama.cpp's rules about the texts of tokens."""
        self._read_flags()
        self.special = self._special_ids()
        self.ends = frozenset(self._end_ids())
        self._strip_flags(header)

    def _flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        return value if isinstance(value, bool) else default

    def _read_flags(self) -> None:
        spm, bpe = self.kind == "spm", self.kind == "bpe"
        self.add_space_prefix = self._flag("add_space_prefix", spm)
        self.remove_extra_spaces = self._flag("remove_extra_whitespaces", False)
        self.escape_spaces = self.pre.escape_spaces if bpe else True
        begins = self.kind in ("spm", "wpm") or (bpe and self.pre.add_bos)
        self.add_bos = self._flag("add_bos_token", begins) or (bpe and self.pre.gemma)
        self.add_eos = self._flag("add_eos_token", self.kind == "ugm")
        self.lower_case = self._flag("normalizer.lowercase", self.pre.splits != "whitespace")
        self.strip_accents = self._flag("normalizer.strip_accents", self.lower_case)

    @property
    def pre_name(self) -> str:
        value = self._metadata.get("tokenizer.ggml.pre", "")
        return value if isinstance(value, str) else ""

    def _special_ids(self) -> dict[str, int]:
        defaults: Mapping[str, int] = _DEFAULT_IDS.get(self.model, {})
        ids = {}
        for name in _ID_NAMES:
            default = NONE if name == "bos" and self.kind == "bpe" and self.pre.no_bos else defaults.get(name, NONE)
            ids[name] = default if default < len(self.texts) else NONE
            for key in (name, _OLD_NAMES.get(name, "")):
                value = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
                if isinstance(value, int) and 0 <= value < len(self.texts):
                    ids[name] = value
        for name, texts in _TEXTS_OF_IDS.items():
            found = next((self.ids[text] for text in texts if text in self.ids), NONE)
            if ids[name] == NONE and found != NONE:
                ids[name] = found
                self.attributes[found] |= CONTROL
        return ids

    def _known(self, texts: Iterable[str]) -> set[int]:
        return {self.ids[text] for text in texts if text in self.ids}

    def _end_ids(self) -> set[int]:
        if self.kind == "none":
            return set()
        ends = {self.special[name] for name in ("fim_pad", "fim_rep", "fim_sep")}
        named = self._known(_ENDS)
        for token in named:
            self.attributes[token] |= CONTROL
        for token in self._known(_ALWAYS_SHOWN):
            self.attributes[token] = USER_DEFINED
        ends |= named | {self.special[name] for name in ("eos", "eot", "eom")}
        ends.discard(NONE)
        texts = {self.texts[token] for token in ends}
        calls = "<|call|>" in texts or "<|calls|>" in texts
        if calls and "<|end|>" in texts and ({"<|return|>", "<|flush|>"} & texts):
            self._demote(ends, "<|end|>", USER_DEFINED)  # gpt-oss and solar-open end messages with it, not turns
        if "</s>" in texts and ({"<|tool_response>", "<|plamo:eos|>"} & texts):
            self._demote(ends, "</s>", NORMAL)
        return ends

    def _demote(self, ends: set[int], text: str, attribute: int) -> None:
        ends.discard(self.ids[text])
        self.attributes[self.ids[text]] = attribute

    def _strip_flags(self, header: Header) -> None:
        """White space around special tokens: the file says nothing about it, so llama.cpp goes by names."""
        name = header.text("general.name").lower()
        if any(known in self.pre_name for known in _MASKED_PRE) or any(
            known in header.architecture for known in _MASKED_ARCHITECTURES
        ):
            self._add("<mask>", STRIPS_LEFT)
        elif "phi-3" in name or "phi3" in name:
            for token in self.special_tokens:
                self.attributes[token] |= STRIPS_RIGHT
            self._add("</s>", STRIPS_RIGHT)
            for token in self._known(("<unk>", "<s>", "<|endoftext|>")):
                self.attributes[token] &= ~STRIPS_RIGHT
        elif "modern-bert" in name:
            self._add("[MASK]", STRIPS_LEFT)

    def _add(self, text: str, attribute: int) -> None:
        if text in self.ids:
            self.attributes[self.ids[text]] |= attribute

    @functools.cached_property
    def special_tokens(self) -> list[int]:
        """Tokens that are looked for in a text before anything else."""
        looked_for = CONTROL | USER_DEFINED | UNKNOWN
        return [token for token, attribute in enumerate(self.attributes) if attribute & looked_for]


def _strings(encoded: bytes) -> list[bytes]:
    """The strings of an encoded array; its lengths were checked when the header was read."""
    if not encoded:
        return []
    (count,) = struct.unpack_from("<Q", encoded, 8)
    unpack = struct.Struct("<Q").unpack_from
    found: list[bytes] = []
    append = found.append
    at = _ARRAY_HEAD_BYTES
    for _ in range(count):
        end = at + 8 + unpack(encoded, at)[0]
        append(encoded[at + 8 : end])
        at = end
    return found


def _texts(encoded: bytes) -> list[str]:
    texts = [text.decode("utf-8", "surrogateescape") for text in _strings(encoded)]
    if "" in texts:
        texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
    return texts


def _merges(encoded: bytes) -> dict[str, int]:
    """Rank by `left right`; the first of equal merges counts."""
    texts = [text.decode("utf-8", "surrogateescape") for text in _strings(encoded)]
    return dict(zip(reversed(texts), range(len(texts) - 1, -1, -1), strict=True))


def _numbers(encoded: bytes, most: int) -> list[float]:
    """The numbers of an encoded array of 32-bit values, at most `most`."""
    if not encoded:
        return []
    _, element, count = struct.unpack_from("<IIQ", encoded)
    letter = {ValueType.INT32: "i", ValueType.FLOAT32: "f"}[ValueType(element)]
    return list(struct.unpack_from(f"<{min(count, most)}{letter}", encoded, _ARRAY_HEAD_BYTES))


def _bytes(encoded: bytes) -> bytes:
    """The elements of an encoded array of bytes."""
    if not encoded:
        return b""
    kind, element = struct.unpack_from("<II", encoded)
    if kind != ValueType.ARRAY or element not in (ValueType.INT8, ValueType.UINT8):
        raise InvalidFileError("tokenizer.ggml.precompiled_charsmap is no array of bytes", _CONVERT_AGAIN)
    return encoded[_ARRAY_HEAD_BYTES:]

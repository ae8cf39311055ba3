# ruff: noqa: RUF001
"""Hard texts, vocabulary files made on the spot, and llama.cpp's tokenizer to compare with."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellama import gguf_io
from edgellama.engine import tokenizer
from edgellama.engine.base import Tokenizer
from edgellama.engine.tokenizer import GGUFTokenizer
from edgellama.gguf_io import Typed, ValueType

_ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    " \t\n\r\v\f\u00a0\u3000\u2003\u2028\u0085\u200b\u202f\ufeff",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "äöüßéèñçøœæþðđıİſKÅǅǈŉﬁﬀ\u1e9e",
    "абвгдеёжзийклмнопрстуфхцчшщъыьэюяАБВГДЂЄЇ",
    "αβγδεζηθικλμνξοπρστυφχψωΑΒΓΔ\u1f00\u1f7d\u1fb3",
    "漢字仮名交じり文北京是中国的首都我们了不在人\ufa11\U00020000\U0002a6df\U0002f800\u3007〇㐀",
    "ひらがなカタカナーｶﾀｶﾅﾞ",
    "한글서울의봄대한민국ㄱㅏ각힣\u1100\u1161",
    "السلامعليكم٠١٢٣\u064b\u064e\u0670،؛؟",
    "שלוםעולם\u05b0\u05b8",
    "नमस्तेदुनिया०१२\u093f\u094d।বাংলাதமிழ்తెలుగు",
    "ไทยภาษา๐๑๒\u0e31\u0e34",
    "ກຂលខែမြန်မာ\u1039ꩠꧠ",
    "🙂🚀👩👨👧🏳🇫🇷🇩🏽\u200d\ufe0f\u20e3⌚☎♥",
    "\u0300\u0301\u0302\u0308\u0327\u0489\u20dd\u3099",
    "…—–“”‘’«»‹›„、。，！？：；（）「」〜・｛｝",
    "½²³①Ⅷ㊿𝟘𝟙৳€£¥¢₿∑∏√∞≠≤∂←→⇒",
    "\x00\x01\x02\x07\x08\x0e\x1b\x1c\x1d\x1e\x1f\x7f\x80\x9f\xad",
    "\u0378\u0530\ue000\uf8ff\U000e0001\U000e0041\U0010ffff\U0001fbff\ufffd\ufffe\U00031350\U0002ebf0\U0001f9ff",
]
_SNIPPETS = [
    "'s", "'T", "'re", "'VE", "'ll", "'D", "'m", "don't", "I'LL", "\u2019s", "''", "' s",
    "1234567", "3.14159", "1,000,000", "0x1F", "٣٤٥", "１２３４", "12345678901234567890", "1 2  3",
    "    ", "\t\t", "\r\n", "\n\n\n", " \n ", "\n \n", "  \t ", " \r", "\u3000\u3000", "\u00a0 \u00a0", "\x0b\x0b",
    "def f(x):\n    return x ** 2", "a->b::c<d>&&e||f", "<div class=\"a\">", "https://example.org/a?b=c&d=%20",
    "{{ x }}", "/* */", "#!/bin/sh", "\\n", "C:\\Temp", "a_b_c", "CamelCaseWord", "ALLCAPSWORD", "mIxEd", "x" * 40,
    "e\u0301", "n\u0303o", "👩‍👩‍👧‍👦", "🏳️‍🌈", "1️⃣", "Straße", "naïve café", "ÅÄÖ", "ﷺ", "▁", "▁▁a", "Ġ", "Ċ",
    "<0x0A>", "[UNK]", "IMGIMGABCZ", "<sentinel:12>", "GGGGGG", "aaaaaaaaaaaaaaaaaaaaaaaaaa", "-" * 30, "=" * 70,
]  # fmt: skip


def hard_lines(seed: int, count: int, specials: list[str]) -> Iterator[str]:
    """Texts that find differences: mixed scripts, runs of white space, marks, controls, texts of special tokens."""
    draw = random.Random(seed)
    pool = specials if len(specials) < 400 else draw.sample(specials, 400)

    def piece() -> str:
        kind = draw.random()
        if kind < 0.35:
            return draw.choice(_SNIPPETS)
        if kind < 0.45 and pool:
            text = draw.choice(pool)
            return text if draw.random() < 0.8 else text[: draw.randrange(1, len(text) + 1)]
        if kind < 0.5:
            return chr(
                draw.choice([*range(0xD800), *range(0xE000, 0x10000)])
                if draw.random() < 0.8
                else draw.randrange(0x10000, 0x110000)
            )
        if kind < 0.6:
            return " " * draw.randrange(1, 12)
        return "".join(draw.choices(draw.choice(_ALPHABETS), k=draw.randrange(1, 9)))

    for _ in range(count):
        joint = draw.choice(["", "", " ", "\n"])
        yield joint.join(piece() for _ in range(draw.randrange(1, 14)))


def source_lines(seed: int, count: int) -> list[str]:
    """Blocks of lines of Python's own library."""
    draw = random.Random(seed)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found: list[str] = []
    for path in draw.sample(files, len(files)):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        at = 0
        while at < len(lines) and len(found) < count:
            step = draw.randrange(1, 5)
            found.append("".join(lines[at : at + step]))
            at += step
    return found


def write_vocabulary(path: Path, model: str, texts: list[Any], types: list[int] | None = None, **keys: Any) -> Path:
    """A vocabulary file; `keys` follow `tokenizer.ggml.`, with two underscores for a dot, or are whole with a dot."""
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": Typed(texts, ValueType.ARRAY, ValueType.STRING),
    }
    if types:
        metadata["tokenizer.ggml.token_type"] = Typed(types, ValueType.ARRAY, ValueType.INT32)
    for name, value in keys.items():
        key = name.replace("__", ".")
        metadata[key if key.startswith("general.") else f"tokenizer.ggml.{key}"] = value
    path.write_bytes(gguf_io.header_bytes(metadata, []))
    return path


def open_oracle(path: Path, *, whole_rule: bool = False) -> Any:
    """llama.cpp's own tokenizer of a file, read without weights. Its memory lives until `free_oracle`."""
    from edgellama.engine.llamacpp.bindings import bindings
    from edgellama.engine.llamacpp.tokenizer import LlamaTokenizer

    library = bindings()
    params = library.llama_model_default_params()
    params.vocab_only = True
    model = library.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"llama.cpp does not load {path}"
    oracle = LlamaTokenizer(library, model, whole_rule=whole_rule)
    oracle.__dict__["free"] = lambda: library.llama_model_free(model)
    return oracle


def differing(ours: Tokenizer, oracle: Tokenizer, texts: list[str]) -> list[tuple[str, bool]]:
    """(text, special) where the ids are not the same."""
    return [
        (text, special)
        for text in texts
        for special in (False, True)
        if ours.tokenize(text, special=special) != oracle.tokenize(text, special=special)
    ]


def describe(ours: Tokenizer, oracle: Tokenizer, text: str, special: bool) -> str:
    mine, theirs = ours.tokenize(text, special=special), oracle.tokenize(text, special=special)
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    names = [[ours.text_of(t) for t in ids[max(0, at - 2) : at + 4]] for ids in (mine, theirs)]
    numbers = f"ours {names[0]} {mine[at : at + 4]}, llama.cpp {names[1]} {theirs[at : at + 4]}"
    return f"{text!r} special={special}: from {at} {numbers}"


def check_properties(ours: Tokenizer, oracle: Tokenizer) -> None:
    """Everything about single tokens is the same."""
    assert (ours.size, ours.bos, ours.eos, ours.adds_bos) == (oracle.size, oracle.bos, oracle.eos, oracle.adds_bos)
    everything = range(-1, ours.size + 1)
    assert [t for t in everything if ours.piece(t) != oracle.piece(t)] == []
    assert [t for t in everything if ours.text_of(t) != oracle.text_of(t)] == []
    assert [t for t in everything if ours.is_end(t) != oracle.is_end(t)] == []
    assert ours.control_texts() == oracle.control_texts()


Compare = Callable[..., GGUFTokenizer]


@pytest.fixture
def compare() -> Compare:
    """`compare(path, texts, whole_rule=False)` loads both tokenizers, finds them equal in all, and returns ours."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

    def check(path: Path, texts: Iterable[str] | None = None, *, whole_rule: bool = False) -> GGUFTokenizer:
        ours, oracle = tokenizer.load(path, whole_rule=whole_rule), open_oracle(path, whole_rule=whole_rule)
        try:
            check_properties(ours, oracle)
            wanted = list(texts) if texts is not None else list(hard_lines(1, 200, ours.control_texts()))
            found = differing(ours, oracle, wanted)
            assert not found, describe(ours, oracle, *found[0])
            framed = [
                text for text in wanted if ours.tokenize(text, add_bos=True) != oracle.tokenize(text, add_bos=True)
            ]
            assert framed == []
        finally:
            oracle.free()
        return ours

    return check


@pytest.fixture(name="hard_lines")
def _hard_lines() -> Any:
    """`hard_lines(seed, count, special_texts)` yields texts that find differences."""
    return hard_lines


@pytest.fixture(name="source_lines")
def _source_lines() -> Any:
    """`source_lines(seed, count)` gives blocks of lines of Python's own library."""
    return source_lines


@pytest.fixture(name="write_vocabulary")
def _write_vocabulary() -> Any:
    """`write_vocabulary(path, model, texts, types=None, **keys)` writes a vocabulary file."""
    return write_vocabulary

# ruff: noqa: RUF001
"""The tokenizer against llama.cpp on small vocabularies made here: every kind, every pre-tokenizer, every key."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from edgellama.engine.tokenizer import code_points, merging
from edgellama.engine.tokenizer.pre_tokenizers import NAMED
from edgellama.gguf_io import Typed, ValueType

pytestmark = pytest.mark.llamacpp
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = [
    ("<|im_end|>", CONTROL), ("<|im_start|>", CONTROL), ("<s>", UNKNOWN), ("<|x", USER_DEFINED), ("</s>", NORMAL),
    ("<|fim_pad|>", CONTROL), ("\n\n", USER_DEFINED), ("é<", USER_DEFINED), ("<unused_1>", CONTROL),
    ("<|endoftext|>", CONTROL), ("▁▁", UNUSED),
]  # fmt: skip


def random_merges(seed: int, alphabet: list[str], count: int) -> tuple[list[str], list[str]]:
    """(texts, merges): joins of random neighbours, so that a cut in another place shows in the ids."""
    draw = random.Random(seed)
    texts = list(alphabet)
    known, merges = set(texts), []
    frequent = [*"aeinrst AEST1234567890.,'-=(){}\"", "Ġ", "Ċ", "č", "ĉ"]
    frequent = [letter for letter in frequent if letter in known]
    while len(merges) < count:
        pool = frequent if draw.random() < 0.5 else texts
        left, right = draw.choice(pool), draw.choice(texts if draw.random() < 0.3 else frequent)
        if len(left) + len(right) <= 12 and left + right not in known:
            merges.append(f"{left} {right}")
            known.add(left + right)
            texts.append(left + right)
    return texts, merges


@pytest.fixture(scope="module")
def byte_level() -> tuple[list[str], list[str]]:
    return random_merges(1, LETTERS, 6000)


@pytest.mark.parametrize("pre", [name for name in NAMED if name != "whitespace"])
def test_every_pre_tokenizer(
    pre: str, byte_level: Any, tmp_path: Path, compare: Any, write_vocabulary: Any, hard_lines: Any
) -> None:
    texts, merges = byte_level if NAMED[pre].byte_letters else random_merges(2, [*"aeinrst▁AE12\n漢é", *BYTES], 600)
    types = [NORMAL] * len(texts) + [kind for _, kind in SPECIALS]
    texts = [*texts, *(text for text, _ in SPECIALS)]
    keys = {"pre": pre, "merges": merges, "bos_token_id": 5, "eos_token_id": 6}
    first_of_kind = next(name for name, kind in NAMED.items() if kind.splits == NAMED[pre].splits) == pre
    lines = hard_lines(1, 150 if first_of_kind else 10, [text for text, _ in SPECIALS])
    compare(write_vocabulary(tmp_path / "v.gguf", "gpt2", texts, types, **keys), lines, whole_rule=True)


def test_whitespace_model(tmp_path: Path, compare: Any, write_vocabulary: Any, hard_lines: Any) -> None:
    texts, merges = random_merges(3, [*"aeinrst12漢é", *BYTES], 600)
    keys = {"pre": "whitespace", "merges": merges, "bos_token_id": 5, "eos_token_id": 6}
    compare(write_vocabulary(tmp_path / "v.gguf", "whitespace", texts, None, **keys))
    compare(write_vocabulary(tmp_path / "w.gguf", "whitespace", texts, None, normalizer__lowercase=True, **keys))


def spm_keys(seed: int) -> dict[str, Any]:
    """A SentencePiece vocabulary with many equal scores, and special tokens of every type."""
    draw = random.Random(seed)
    learned, _ = random_merges(seed, [*"aeinrst▁AE12.'漢é\n"], 900)
    texts = ["<unk>", "<s>", "</s>", *BYTES, *learned, *(text for text, _ in SPECIALS if text not in ("<s>", "</s>"))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(learned)]
    types += [kind for text, kind in SPECIALS if text not in ("<s>", "</s>")]
    scores = [float(draw.randrange(-40, 0)) for _ in texts]
    return {"model": "llama", "texts": texts, "types": types, "scores": scores}


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"add_space_prefix": False}, {"add_bos_token": False}, {"add_eos_token": True},
        {"general__name": "Phi-3 mini"}, {"bos_token_id": 7, "eos_token_id": 300}, {"eot_token_id": 9},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("whole_rule", [False, True])
def test_sentencepiece(keys: Any, whole_rule: bool, tmp_path: Path, compare: Any, write_vocabulary: Any) -> None:
    compare(write_vocabulary(tmp_path / "v.gguf", **spm_keys(4), **keys), whole_rule=whole_rule)


def test_long_words_are_merged_alike(
    tmp_path: Path, compare: Any, write_vocabulary: Any, byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "LONG", 30)
    draw = random.Random(5)
    texts = [
        "".join(draw.choices(letters, k=500))
        for letters in ("aeinrst", "aet", "ae漢é1\u0301🙂", "a")
        for _ in range(10)
    ]
    compare(write_vocabulary(tmp_path / "v.gguf", **spm_keys(6)), texts)
    keys = {"pre": "gpt-2", "merges": byte_level[1], "bos_token_id": 0, "eos_token_id": 0}
    compare(write_vocabulary(tmp_path / "w.gguf", "gpt2", byte_level[0], None, **keys), texts)


def characters_map(replacements: dict[str, str]) -> bytes:
    """A precompiled character map: every node of the trie has 256 units for its children to itself."""
    units, blob = {0: 256 << 10}, b""
    places = {b"": 0}
    for key, written in replacements.items():
        data = key.encode()
        for end in range(1, len(data) + 1):
            if data[:end] not in places:
                place = places[data[:end]] = 256 * len(places) + 256
                parent = 256 if end == 1 else places[data[: end - 1]]
                child = parent ^ data[end - 1]
                units[child] = data[end - 1] | (child ^ place) << 10
        last = (256 if len(data) == 1 else places[data[:-1]]) ^ data[-1]
        units[last] |= 1 << 8
        units[places[data]] = 1 << 31 | len(blob)
        blob += written.encode() + b"\0"
    trie = [units.get(index, 0) for index in range(max(units) + 512)]
    packed = struct.pack(f"<{len(trie)}I", *trie)
    return struct.pack("<I", len(packed)) + packed + blob


T5_KEYS: list[dict[str, Any]] = [
    {},
    {"add_space_prefix": True},
    {"remove_extra_whitespaces": True},
    {"add_space_prefix": True, "remove_extra_whitespaces": True},
    {"add_eos_token": False, "add_bos_token": True, "bos_token_id": 5},
    {"precompiled_charsmap": {"\t": " ", "\n": " ", "Ａ": "A", "ﬁ": "fi", "\u0301": "", "e\u0308": "ë", "½": "1⁄2"}},
]


@pytest.mark.parametrize("keys", T5_KEYS, ids=str)
@pytest.mark.parametrize("whole_rule", [False, True])
def test_unigram(keys: dict[str, Any], whole_rule: bool, tmp_path: Path, compare: Any, write_vocabulary: Any) -> None:
    draw = random.Random(7)
    learned, _ = random_merges(8, [*"aeinrst▁AE12.'漢é"], 700)
    texts = [
        "<pad>",
        "</s>",
        "<unk>",
        *learned,
        *(text for text, _ in SPECIALS if text != "</s>"),
        "éa",
        "<extra_id_0>",
    ]
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * len(learned)]
    types += [*(kind for text, kind in SPECIALS if text != "</s>"), USER_DEFINED, USER_DEFINED]
    scores = [-draw.random() * 10 for _ in texts]
    if "precompiled_charsmap" in keys:
        data = characters_map(keys["precompiled_charsmap"])
        keys = {"precompiled_charsmap": Typed(list(data), ValueType.ARRAY, ValueType.UINT8)}
    compare(write_vocabulary(tmp_path / "v.gguf", "t5", texts, types, scores=scores, **keys), whole_rule=whole_rule)


@pytest.mark.parametrize("keys", [{}, {"normalizer__lowercase": False}, {"normalizer__strip_accents": False}], ids=str)
def test_wordpiece(keys: dict[str, Any], tmp_path: Path, compare: Any, write_vocabulary: Any) -> None:
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    learned = random_merges(9, [*"abcdefghijklmnopqrstuvwxyzäé0123456789漢'.!$我"], 800)[0]
    texts = [*first, *learned, *("▁" + text for text in learned)]
    ids = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    types = [CONTROL] * 5 + [NORMAL] * (len(texts) - 5)
    compare(write_vocabulary(tmp_path / "v.gguf", "bert", texts, types, **ids, **keys), whole_rule=True)


def test_wordpiece_normalizes_every_character_alike(tmp_path: Path, compare: Any, write_vocabulary: Any) -> None:
    characters = [
        chr(code)
        for code in [*range(0x20, 0x3400), *range(0x9F00, 0xD800, 9), *range(0xF900, 0xFB00), *range(0x1E900, 0x1E950)]
    ]
    kept = [character for character in characters if character not in code_points.SPACES]
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ids = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    texts = [*first, *dict.fromkeys([*kept, "▁", *("▁" + character for character in kept if character != "▁")])]
    types = [CONTROL] * 5 + [NORMAL] * (len(texts) - 5)
    lines = ["x".join(characters[at : at + 500]) for at in range(0, len(characters), 500)]
    compare(write_vocabulary(tmp_path / "v.gguf", "bert", texts, types, **ids), lines)


def test_rwkv(tmp_path: Path, compare: Any, write_vocabulary: Any) -> None:
    single = [f"\\x{byte:02x}" for byte in range(256) if byte not in b"abc \\"]
    texts = [
        "<s>",
        "a",
        "b",
        "c",
        " ",
        "\\\\",
        *single,
        "ab",
        "abc",
        "\\t\\t",
        "é",
        "\\xe6\\xbc",
        " the",
        "漢",
        "\\n\\n",
    ]
    types = [CONTROL, *[NORMAL] * (len(texts) - 1)]
    compare(write_vocabulary(tmp_path / "v.gguf", "rwkv", texts, types), whole_rule=True)


def test_plamo2(tmp_path: Path, compare: Any, write_vocabulary: Any, hard_lines: Any) -> None:
    draw = random.Random(10)
    learned, _ = random_merges(11, [*"aeinrst AE12.'漢é"], 500)
    texts = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", *BYTES, *learned, "</s>"]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(learned) + 1)]
    scores = [-draw.random() * 12 for _ in texts]
    lines = [*hard_lines(12, 200, texts[:4]), "\ufeffa", "漢" * 50, "a e  e"]
    compare(write_vocabulary(tmp_path / "v.gguf", "plamo2", texts, types, scores=scores), lines, whole_rule=True)


@pytest.mark.parametrize(
    "extra",
    [
        ["<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|start|>"], ["<|end|>", "<|return|>"],
        ["<|end|>", "<|calls|>", "<|flush|>"], ["</s>", "<|tool_response>", "<turn|>", "<eos>"],
        ["<|eot_id|>", "<|eom_id|>", "<|repo_name|>", "<|file_sep|>", "<PRE>"], ["[EOS]", "[e~[", "[PAD]", "<EOT>"],
        ["<|endoftext|>", "<|fim_prefix|>", "<|code_suffix|>", "<fim-middle>", "<reponame>", "_<EOT>"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_end_tokens(extra: list[str], kind: int, tmp_path: Path, compare: Any, write_vocabulary: Any) -> None:
    types = [NORMAL] * 256 + [kind] * len(extra)
    keys = {"pre": "gpt-2", "merges": ["a b"], "bos_token_id": 0, "eos_token_id": 256}
    compare(write_vocabulary(tmp_path / "v.gguf", "gpt2", [*LETTERS, *extra], types, **keys))


def test_special_tokens_that_overlap(tmp_path: Path, compare: Any, write_vocabulary: Any) -> None:
    draw = random.Random(13)
    pieces = sorted({"".join(draw.choices("ab<", k=draw.randrange(1, 6))) for _ in range(25)}, key=len)
    chosen = list({len(piece.encode()): piece for piece in pieces}.values())  # equal lengths have no order
    kinds = [draw.choice([CONTROL, USER_DEFINED]) for _ in chosen]
    texts = [*(letter for letter in LETTERS if letter not in chosen), *chosen]
    types = [NORMAL] * (len(texts) - len(chosen)) + kinds
    keys = {"pre": "gpt-2", "merges": ["x y"], "bos_token_id": 0, "eos_token_id": 0}
    lines = ["".join(draw.choices("ab< ", k=draw.randrange(1, 40))) for _ in range(400)]
    compare(write_vocabulary(tmp_path / "v.gguf", "gpt2", texts, types, **keys), lines)

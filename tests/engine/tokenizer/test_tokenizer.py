# ruff: noqa: RUF001
"""The tokenizer on small vocabularies made here, against the `tokenizers` package and the rules of the formats."""

from __future__ import annotations

import inspect
import json
import random
import struct
import textwrap
import threading
import unicodedata
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from edgellama import gguf_io
from edgellama.engine import tokenizer
from edgellama.engine.tokenizer import GGUFTokenizer, code_points, merging, splitting
from edgellama.engine.tokenizer.pre_tokenizers import NAMED
from edgellama.engine.tokenizer.words import WordMemory, before_spaces
from edgellama.errors import EdgellamaError, GGUFError, InvalidFileError, UnsupportedError
from edgellama.gguf_io import Typed, ValueType

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
Write = Callable[..., GGUFTokenizer]

TEXTS = [
    "Hello, world! It's 2026-12-01, isn't it?  Two  spaces,\ttabs\n\nand   trailing   ",
    "Grüße aus Köln — „Straße“ … naïve café ½ ² ³ ① 12345678901",
    "北京是中国的首都。東京は夜です。서울의 봄. السلام عليكم. नमस्ते दुनिया. שלום ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e\u0301 \u200b\u00a0\u3000| \x00\x01\x7f",
    "def f(x):\n    return x ** 2 + 3.14159  # {'key': [1, 2]}\n\r\n\r\n  end",
    "'s 't 'LL 've I'M you'RE CamelCase ALLCAPS mIxEd",
    "   leading", " \n \n  x", "a" * 300, "\n\n\n\n", "1 22 333 4444 55555", "",
]  # fmt: skip


LESSON = inspect.getsource(textwrap) + inspect.getsource(inspect)[:60_000] + " ".join(TEXTS)
"""What vocabularies are trained on: some thousand words, without the text of any control token."""


@pytest.fixture
def write(tmp_path: Path, write_vocabulary: Any) -> Write:
    """`write(model, texts, types=None, whole_rule=False, **keys)` writes a vocabulary file and loads its tokenizer."""

    def make(
        model: str, texts: Iterable[str | bytes], types: list[int] | None = None, whole_rule: bool = False, **keys: Any
    ) -> GGUFTokenizer:
        path = write_vocabulary(tmp_path / "vocabulary.gguf", model, list(texts), types, **keys)
        return tokenizer.load(path, whole_rule=whole_rule)

    return make


def train_bpe(pre: Any, size: int = 900) -> tuple[Any, list[str], list[str]]:
    """(tokenizer, texts, merges) of a byte-level BPE trained on the texts of this file."""
    made = hf.Tokenizer(models.BPE())
    made.pre_tokenizer = pre
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([LESSON, *TEXTS * 4], trainer)
    ids = made.get_vocab()
    merges = [" ".join(merge) for merge in json.loads(made.to_str())["model"]["merges"]]
    return made, sorted(ids, key=lambda text: ids[text]), merges


def split_pre(expression: str) -> Any:
    """The pre-tokenizer of a model's own tokenizer.json: split by `expression`, then bytes as letters."""
    split = pre_tokenizers.Split(hf.Regex(expression), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
ORIGINALS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "dbrx": split_pre(LLAMA3),
    "qwen2": split_pre(LLAMA3.replace("{1,3}", "")),
    "qwen35": split_pre(
        LLAMA3.replace("{1,3}", "").replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
    ),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_bpe_gives_the_ids_of_tokenizers(pre: str, write: Write) -> None:
    theirs, texts, merges = train_bpe(ORIGINALS[pre])
    ours = write("gpt2", texts, pre=pre, merges=merges, bos_token_id=0, eos_token_id=0)
    draw = random.Random(3)
    alphabet = "abcdefgh ABC  \n\t\r0123456789.,;:!?'\"()äöüßéñçøœ漢字かなカナ한글абвгдλμπ🙂🚀\u0301½²"
    for text in [*TEXTS, *("".join(draw.choices(alphabet, k=draw.randrange(1, 90))) for _ in range(400))]:
        ids = ours.tokenize(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert b"".join(map(ours.piece, ids)).decode() == text


def test_merges_follow_ranks_not_the_longest_token(write: Write) -> None:
    texts = ["a", "b", "c", "ab", "bc", "abc", "\u010a"]
    ours = write("gpt2", texts, pre="gpt-2", merges=["b c", "a b", "a bc"], bos_token_id=0, eos_token_id=0)
    assert [ours.text_of(t) for t in ours.tokenize("abcab")] == ["abc", "ab"]
    assert ours.tokenize("xyz") == []  # bytes without a token are left out, as llama.cpp does
    whole = write("gpt2", [*texts, "cab"], pre="llama-bpe", merges=["b c", "a b"], bos_token_id=0, eos_token_id=0)
    assert [whole.text_of(t) for t in whole.tokenize("cab")] == ["cab"]  # a word that is a token needs no merges
    assert [whole.text_of(t) for t in whole.tokenize("cabab")] == ["c", "ab", "ab"]


def spm(extra: list[tuple[str, float, int]]) -> dict[str, Any]:
    """Keys of a SentencePiece vocabulary: three control tokens, the bytes, and `extra` (text, score, type)."""
    return {
        "texts": ["<unk>", "<s>", "</s>", *BYTES, *(text for text, _, _ in extra)],
        "types": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *(kind for _, _, kind in extra)],
        "scores": [0.0] * 259 + [score for _, score, _ in extra],
    }


def train_spm() -> tuple[Any, list[tuple[str, float, int]]]:
    """A BPE over U+2581 text with byte fallback, as converters make it of a SentencePiece model."""
    made = hf.Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    made.train_from_iterator([LESSON], trainer)
    state = json.loads(made.to_str())["model"]
    learned = sorted(state["vocab"], key=lambda text: state["vocab"][text])
    extra = [(text, -float(index), NORMAL) for index, text in enumerate(learned)]
    ids = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *BYTES, *learned])}
    merges = [
        (text[:at], text[at:]) for text in learned for at in range(1, len(text)) if {text[:at], text[at:]} <= ids.keys()
    ]
    model = models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    theirs = hf.Tokenizer(model)
    theirs.normalizer = made.normalizer
    return theirs, extra


def test_sentencepiece_bpe_gives_the_ids_of_tokenizers(write: Write) -> None:
    theirs, extra = train_spm()
    ours = write("llama", **spm(extra))
    draw = random.Random(4)
    alphabet = "the and of\nin to  é▁漢🙂\tdef return self.\"'=()"
    for text in [*filter(None, TEXTS), *("".join(draw.choices(alphabet, k=draw.randrange(1, 90))) for _ in range(300))]:
        ids = ours.tokenize(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert b"".join(map(ours.piece, ids)).decode() == " " + text.replace("▁", " ")


def test_sentencepiece_space_prefix_and_special_tokens(write: Write) -> None:
    keys = spm([("▁", -1.0, NORMAL), ("▁a", -2.0, NORMAL), ("a", -3.0, NORMAL), ("<|im_end|>", 0.0, CONTROL)])
    ours = write("llama", **keys)
    plain, prefixed, end = 261, 260, 262
    assert ours.tokenize("a") == [prefixed]
    assert ours.tokenize("a<|im_end|>a", special=True) == [prefixed, end, prefixed]
    assert ours.tokenize("a a", add_bos=True) == [1, prefixed, prefixed]
    assert end not in ours.tokenize("a<|im_end|>a")
    assert write("llama", **keys, add_space_prefix=False).tokenize("a a") == [plain, prefixed]
    assert write("llama", **keys, add_bos_token=False).tokenize("a", add_bos=True) == [prefixed]
    whole = write("llama", **keys, add_eos_token=True, whole_rule=True)
    assert whole.tokenize("a", add_bos=True) == [1, prefixed, 2]
    assert ours.tokenize("é") == [259, 3 + 0xC3, 3 + 0xA9]
    assert (ours.piece(3 + 0xC3), ours.piece(prefixed), ours.piece(end)) == (b"\xc3", b" a", b"")


def test_unigram_gives_the_ids_of_tokenizers(write: Write) -> None:
    trained = hf.Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(vocab_size=500, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator([LESSON], trainer)
    learned = json.loads(trained.to_str())["model"]["vocab"]
    assert learned[0][0] == "<unk>"
    pieces = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], *learned[1:]]
    theirs = hf.Tokenizer(models.Unigram([tuple(piece) for piece in pieces], 2, False))
    theirs.normalizer = trained.normalizer
    ours = write(
        "t5", [text for text, _ in pieces], [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(pieces) - 3)],
        scores=Typed([score for _, score in pieces], ValueType.ARRAY, ValueType.FLOAT32), add_space_prefix=True,
    )  # fmt: skip
    draw = random.Random(5)
    alphabet = "the and of in toéßø漢漢🙂defreturnself.\"'=()"
    for text in ["x", *("".join(draw.choices(alphabet, k=draw.randrange(1, 60))).strip() for _ in range(300))]:
        if text:
            assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False).ids, text


def test_unigram_white_space_rules(write: Write) -> None:
    texts, types = ["<pad>", "</s>", "<unk>", "▁", "a", "▁a"], [CONTROL, CONTROL, UNKNOWN, NORMAL, NORMAL, NORMAL]
    scores = [0.0, 0.0, 0.0, -3.0, -2.0, -1.0]
    merged = write("t5", texts, types, scores=scores, add_space_prefix=True, remove_extra_whitespaces=True)
    assert merged.tokenize("  a   aé é  ") == [5, 5, 2, 3, 2]
    kept = write("t5", texts, types, scores=scores)
    assert kept.tokenize("a  a ") == [4, 3, 5, 3]
    assert write("t5", texts, types, scores=scores, whole_rule=True).tokenize("a", add_bos=True) == [4, 1]


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT_IDS = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}


def test_wordpiece_gives_the_ids_of_tokenizers(write: Write) -> None:
    words = [
        "the",
        "token",
        "##izer",
        "##s",
        "un",
        "##known",
        "cafe",
        "strasse",
        "##t",
        "a",
        "b",
        "##b",
        "!",
        ",",
        "北",
    ]
    words += ["京", "'", "-", "1", "##2", "##3", "$", "©"]
    pieces = BERT + words
    theirs = hf.Tokenizer(models.WordPiece({text: index for index, text in enumerate(pieces)}, unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=True)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    phantom = [text.removeprefix("##") if text.startswith("##") else "▁" + text for text in words]
    ours = write("bert", BERT + phantom, [CONTROL] * 5 + [NORMAL] * len(words), **BERT_IDS)
    for text in ["The tokenizers, UNKNOWN!", "Café strasset 123 b'b-b", "北京 the\x00 a\u200bb $ ©", "xyz the", "  "]:
        assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False).ids, text
    whole = write("bert", BERT + phantom, [CONTROL] * 5 + [NORMAL] * len(words), whole_rule=True, **BERT_IDS)
    assert whole.tokenize("the", add_bos=True) == [2, 5, 3]
    cased = write(
        "bert", BERT + phantom, [CONTROL] * 5 + [NORMAL] * len(words), normalizer__lowercase=False, **BERT_IDS
    )
    assert cased.tokenize("The the") == [1, 5]


def gpt2_keys(extra: list[tuple[str | bytes, int]]) -> dict[str, Any]:
    """Keys of a byte-level vocabulary without merges, with `extra` (text, type) after its 256 letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {
        "model": "gpt2", "texts": [*letters, *(text for text, _ in extra)],
        "types": [NORMAL] * 256 + [kind for _, kind in extra], "pre": "gpt-2",
        "merges": Typed([], ValueType.ARRAY, ValueType.STRING), "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def special_ids(ours: GGUFTokenizer, text: str, special: bool = True) -> list[str]:
    return [ours.text_of(token) for token in ours.tokenize(text, special=special)]


def test_special_tokens_longest_first_then_leftmost(write: Write) -> None:
    extra = [("<a>", CONTROL), ("<a><b>", CONTROL), ("b><cd", USER_DEFINED), ("<u>", USER_DEFINED)]
    ours = write(**gpt2_keys(extra))
    assert special_ids(ours, "<a><a><b>") == ["<a>", "<a><b>"]
    assert special_ids(ours, "<a><b><cd") == ["<a><b>", "<", "c", "d"]  # six bytes before five
    assert special_ids(ours, "<a><b><cd", special=False) == ["<", "a", ">", "<", "b><cd"]
    assert special_ids(ours, "<u><u>x", special=False) == ["<u>", "<u>", "x"]
    assert sorted(ours.control_texts()) == ["<a>", "<a><b>"]


def test_user_defined_runs_of_spaces_in_a_long_run(write: Write) -> None:
    ours = write(**gpt2_keys([(" " * size, USER_DEFINED) for size in range(2, 25)]))
    ids = ours.tokenize(" " * 200_009 + "x" + "   ")
    widths = [len(ours.text_of(token)) for token in ids]
    assert widths == [24] * 8333 + [17, 1, 3]


def test_special_tokens_may_strip_white_space(write: Write) -> None:
    keys = gpt2_keys([("</s>", CONTROL), ("<|end|>", CONTROL), ("<|endoftext|>", CONTROL)])
    ours = write(**keys, general__name="Phi-3 mini")
    assert special_ids(ours, "a <|end|> \n\t b</s>  ") == ["a", "Ġ", "<|end|>", "b", "</s>"]
    assert special_ids(ours, "<|endoftext|> b") == ["<|endoftext|>", "Ġ", "b"]
    masked = write(**(gpt2_keys([("<mask>", CONTROL)]) | {"pre": "jina-v2-de"}))
    assert special_ids(masked, "a \n<mask> b") == ["a", "<mask>", "Ġ", "b"]


def test_end_tokens_by_id_and_by_text(write: Write) -> None:
    extra = [("<|im_end|>", NORMAL), ("<|file_sep|>", CONTROL), ("[PAD]", CONTROL), ("<|x|>", CONTROL)]
    ours = write(**(gpt2_keys(extra) | {"eos_token_id": 259}))
    assert [token for token in range(ours.size) if ours.is_end(token)] == [256, 257, 258, 259]
    assert ours.piece(256) == b""  # its text makes it a control token, whatever the file says
    extra = [("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL), ("<|channel|>", CONTROL)]
    harmony = write(**(gpt2_keys(extra) | {"eos_token_id": 257}))
    assert [token for token in range(harmony.size) if harmony.is_end(token)] == [257, 258]
    assert harmony.piece(259) == b"<|channel|>"


def test_tokens_that_are_no_utf8_survive(write: Write) -> None:
    ours = write(**gpt2_keys([(b"<\xff>", USER_DEFINED), (b"\xa9", USER_DEFINED)]))
    assert ours.piece(256) == b"<\xff>"
    assert ours.text_of(256) == "<\ufffd>"
    assert ours.tokenize("x\ufffdx")[0] == ours.tokenize("x")[0]
    assert 257 in ours.tokenize("é")  # llama.cpp compares bytes, so the token cuts the character


def test_half_surrogates_become_replacement_characters(write: Write) -> None:
    ours = write(**gpt2_keys([]))
    assert ours.tokenize("a\ud800b") == ours.tokenize("a\ufffdb")


def test_empty_tokens_have_the_name_llama_cpp_gives_them(write: Write) -> None:
    assert write(**gpt2_keys([("", UNUSED), ("x<y", NORMAL)])).text_of(256) == "[EMPTY_256]"


def test_unknown_tokenizers_are_refused_aloud(write: Write) -> None:
    with pytest.raises(UnsupportedError, match="pre-tokenizer 'nonesuch'"):
        write(**(gpt2_keys([]) | {"pre": "nonesuch"}))
    with pytest.raises(UnsupportedError, match="tokenizer 'nonesuch'"):
        write("nonesuch", ["a"])
    keys = gpt2_keys([])
    del keys["pre"]
    assert "pre-tokenizer" in write(**keys).notices[0]
    with pytest.raises(GGUFError):
        write("gpt2", ["a", "a"], merges=["a a"], bos_token_id=0, eos_token_id=0)


def test_damaged_vocabularies_are_refused(write: Write) -> None:
    texts, types = ["<pad>", "</s>", "<unk>", "▁", "a"], [CONTROL, CONTROL, UNKNOWN, NORMAL, NORMAL]
    keys = {"scores": [0.0, 0.0, 0.0, -1.0, -2.0]}
    with pytest.raises(InvalidFileError, match="no array of bytes"):
        write("t5", texts, types, precompiled_charsmap=[1000, 2000], **keys)
    for data in (b"\1\2\3", b"\xff\xff\xff\xff" + bytes(40), b"\x10\0\0\0" + bytes(8)):
        with pytest.raises(InvalidFileError, match="trie"):
            write("t5", texts, types, precompiled_charsmap=as_bytes(data), **keys)
    draw = random.Random(14)
    for _ in range(200):
        data = struct.pack("<I", 1024) + draw.randbytes(1024 + 60)
        try:
            ids = write("t5", texts, types, precompiled_charsmap=as_bytes(data), **keys).tokenize("a b\tcé漢" * 3)
        except InvalidFileError:
            continue
        assert set(ids) <= set(range(5))
    with pytest.raises(InvalidFileError, match="<0x00>"):
        write("plamo2", ["<unk>", "<s>", "</s>", "a"])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_files_with_changed_bytes_are_refused_or_work(kind: str, write_vocabulary: Any, tmp_path: Path) -> None:
    if kind == "gpt2":
        keys = gpt2_keys([("<|im_end|>", CONTROL), ("  ", USER_DEFINED)])
    elif kind == "llama":
        keys = {"model": "llama", **spm([("▁", -1.0, NORMAL), ("▁a", -2.0, NORMAL), ("<s", -2.0, USER_DEFINED)])}
    else:
        keys = {"model": "bert", "texts": [*BERT, "▁a"], "types": [CONTROL] * 5 + [NORMAL], **BERT_IDS}
    path = write_vocabulary(tmp_path / "changed.gguf", **keys)
    whole = path.read_bytes()
    draw = random.Random(15)
    for _ in range(250):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 3])):
            data[draw.randrange(24, len(data))] = draw.choice([0, 255, draw.randrange(256)])
        path.write_bytes(data)
        try:
            ours = tokenizer.load(path)
        except EdgellamaError:
            continue
        assert all(0 <= token < ours.size for token in ours.tokenize("a  é<|im_end|><s>", special=True, add_bos=True))


def as_bytes(data: bytes) -> Typed:
    return Typed(list(data), ValueType.ARRAY, ValueType.UINT8)


def test_texts_without_any_known_character_give_no_invalid_ids(write: Write) -> None:
    ours = write("t5", ["a", "b"], [NORMAL, NORMAL], scores=[-1.0, -2.0])
    assert ours.tokenize("axb") == [0, 1]


def test_a_model_without_vocabulary_takes_no_text(tmp_path: Path) -> None:
    keys = {"general.architecture": "llama", "llama.vocab_size": 2_000_000_000, "tokenizer.ggml.model": "none"}
    path = tmp_path / "none.gguf"
    path.write_bytes(gguf_io.header_bytes(keys, []))
    ours = tokenizer.load(path)
    assert (ours.size, ours.bos, ours.eos, ours.piece(3), ours.control_texts()) == (2_000_000_000, -1, -1, b"", [])
    with pytest.raises(UnsupportedError):
        ours.tokenize("a")


@settings(max_examples=40)
@given(st.text(st.sampled_from("aA1 \n\t\r'sé漢١\u3000.$\u0301🙂\u0378中xyzE"), max_size=60))
@pytest.mark.parametrize("pre", sorted({kind.splits for kind in NAMED.values()}))
def test_words_put_together_are_the_text(pre: str, text: str) -> None:
    stages = next(kind.stages for kind in NAMED.values() if kind.splits == pre)
    words = list(splitting.split(text, stages))
    assert "".join(words) == text
    assert all(words)


@given(st.lists(st.text("a\n▁é", min_size=1, max_size=5)), st.text("a\n▁é", max_size=30))
def test_no_token_reaches_across_a_cut_between_words(texts: list[str], text: str) -> None:
    pieces = before_spaces(texts).split(text)
    assert "".join(pieces) == text
    for left, right in pairwise(pieces):
        assert right.startswith("▁")
        assert not any(left[-1] + right[0] in token for token in texts)


@given(st.text("abc", max_size=120), st.randoms(use_true_random=False))
def test_both_ways_to_merge_agree(text: str, draw: random.Random) -> None:
    pairs = ["ab", "bc", "ca", "aa", "abc", "aab", "aaaa", "abab", "caab", "bcbc"]
    ranks = {pair: draw.randrange(4) for pair in pairs}

    def rank(left: str, right: str) -> int | None:
        return ranks.get(left + right)

    short = merging.merge_short(list(text), rank)
    assert short == merging.merge_long(list(text), rank)
    assert short == _merge_plainly(list(text), ranks)


def _merge_plainly(symbols: list[str], ranks: dict[str, int]) -> list[str]:
    """The definition: of all neighbours that join, the ones with the smallest rank, leftmost first."""
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ranks]
        if not found:
            return symbols
        at = min(found)[1]
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


def test_categories_are_those_of_unicode_where_python_knows_the_character() -> None:
    for code in range(0, 0x110000, 7):
        kind = unicodedata.category(chr(code))
        if kind != "Cn" and code_points.category(chr(code)) != "U":
            assert code_points.category(chr(code)) == kind[0], hex(code)
    assert code_points.category("\U00031350") == "L"  # new in 15.0
    assert code_points.category("\U0002ebf0") == "L"  # new in 15.1
    assert code_points.category("\U00010d4a") == "U"  # new in 16.0


def test_the_memory_of_words_is_bounded() -> None:
    asked: list[str] = []

    def compute(word: str) -> list[int]:
        asked.append(word)
        return [len(word)]

    memory = WordMemory(compute)
    assert memory.ids(["a", "bb", "a", "x" * 100, "x" * 100]) == [1, 2, 1, 100, 100]
    assert asked == ["a", "bb", "x" * 100, "x" * 100]  # long words are not worth remembering
    memory.ids(map(str, range(200_000)))
    assert len(memory) <= 1 << 15


def test_threads_share_a_tokenizer(write: Write) -> None:
    theirs, texts, merges = train_bpe(GPT2, 500)
    ours = write("gpt2", texts, pre="gpt-2", merges=merges, bos_token_id=0, eos_token_id=0)
    expected = [theirs.encode(text).ids for text in TEXTS]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            wrong.extend(text for text, ids in zip(TEXTS, expected, strict=True) if ours.tokenize(text) != ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("text", ["a", " ", "\n", "1", "<", "é", "🙂", "ab1 ", "\u3000", "A"])
@pytest.mark.parametrize("pre", sorted({kind.splits for kind in NAMED.values()}))
def test_long_runs_do_not_take_quadratic_time(pre: str, text: str) -> None:
    stages = next(kind.stages for kind in NAMED.values() if kind.splits == pre)
    hostile = text * (100_000 // len(text) ** 2) + "中"
    assert sum(map(len, splitting.split(hostile, stages))) == len(hostile)  # at n squared this ends in the time limit

"""The default model's tokenizer against Hugging Face's `tokenizers`, built from the file's vocabulary and merges."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.llamacpp, pytest.mark.model]
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")


@pytest.fixture(scope="module")
def both(default_model_path: Path) -> Any:
    """(ours, theirs): llama.cpp's through `LlamaTokenizer`, and an independent byte-level BPE."""
    import gguf
    from tokenizers import Tokenizer, models, pre_tokenizers

    from edgellama.engine.llamacpp.bindings import bindings
    from edgellama.engine.llamacpp.tokenizer import LlamaTokenizer

    fields = gguf.GGUFReader(default_model_path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    theirs = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    c = bindings()
    params = c.llama_model_default_params()
    params.vocab_only = True
    model = c.llama_model_load_from_file(str(default_model_path).encode(), params)
    yield LlamaTokenizer(c, model, whole_rule=False), theirs
    c.llama_model_free(model)


TEXTS = [
    "Hello, world! It's 2026-12-01, isn't it?  Two  spaces,\ttabs\n\nand   trailing   ",
    "Grüße aus Köln — „Straße“ … naïve café ½ ² ³ ①",
    "北京是中国的首都。東京は夜です。서울의 봄. السلام عليكم. नमस्ते दुनिया. שלום ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e\u0301 \u200b\u00a0\u3000|",
    "def f(x):\n    return x ** 2 + 3.14159  # {'key': [1, 2]}\n\r\n",
    "<|im_start|>user\nnot a control token<|im_end|>",
    "'s 't 'LL 've I'M you'RE",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_tokenizers(both: Any, text: str) -> None:
    ours, theirs = both
    assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False).ids


def test_ids_of_random_text(both: Any) -> None:
    ours, theirs = both
    draw = random.Random(5)
    alphabet = "abcdefgh ABC  \n\t0123456789.,;:!?'\"()äöüßéñçøœ漢字かなカナ한글абвгдλμπ🙂🚀\u0301"
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=draw.randrange(1, 120)))
        assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False).ids
        assert b"".join(map(ours.piece, ours.tokenize(text))).decode() == text

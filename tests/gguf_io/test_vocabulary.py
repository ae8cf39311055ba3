"""Tokenizer arrays: lengths, uniqueness, ids, and everything llama.cpp aborts on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellama import gguf_io
from edgellama.errors import GGUFError
from edgellama.gguf_io import Typed, ValueType, specimen, writing

PREFIX = "tokenizer.ggml."


def _file(path: Path, kind: str, **changes: Any) -> Path:
    keys: dict[str, Any] = {"general.architecture": "llama"} | specimen.vocabulary(kind)
    keys |= {PREFIX + name: value for name, value in changes.items()}
    with writing(path, {key: value for key, value in keys.items() if value is not None}):
        pass
    return path


def _tokens(kind: str) -> list[str]:
    tokens = specimen.vocabulary(kind)[PREFIX + "tokens"]
    assert isinstance(tokens, list)
    return list(tokens)


def _types(*values: int) -> Typed:
    return Typed(list(values), ValueType.ARRAY, ValueType.INT32)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_good_vocabularies(tmp_path: Path, kind: str) -> None:
    header = gguf_io.read(_file(tmp_path / "v.gguf", kind))
    assert header.kind == "vocabulary"
    assert header.vocabulary_tokens == len(_tokens(kind))
    assert list(header.array(PREFIX + "tokens")) == _tokens(kind)


def _cases() -> list[tuple[str, dict[str, Any], str]]:
    spm = _tokens("llama")
    twice = [*spm[:-1], "a"]
    count = len(spm)
    return [
        ("llama", {"model": Typed(1, ValueType.UINT32)}, "model"),
        ("llama", {"tokens": None}, "tokens"),
        ("llama", {"tokens": Typed([], ValueType.ARRAY, ValueType.STRING)}, "tokens"),
        ("llama", {"tokens": _types(*range(count))}, "tokens"),
        ("llama", {"tokens": "one"}, "tokens"),
        ("llama", {"tokens": twice}, f"tokens[{count - 1}]"),
        ("llama", {"tokens": ["", "[EMPTY_0]", *spm[2:]]}, "tokens[1]"),
        ("llama", {"tokens": [t for t in spm if t != "<0x0A>"], "token_type": None, "scores": None}, "tokens"),
        ("llama", {"tokens": ["<0xZZ>" if token == "<0x0A>" else token for token in spm]}, "tokens[13]"),
        ("llama", {"token_type": _types(*[1] * (count - 1))}, "token_type"),
        ("llama", {"token_type": [1.0] * count}, "token_type"),
        ("llama", {"token_type": Typed([1] * count, ValueType.ARRAY, ValueType.UINT32)}, "token_type"),
        ("llama", {"token_type": 1}, "token_type"),
        ("llama", {"token_type": _types(*[6] * count)}, "tokens[0]"),
        ("llama", {"scores": [0.0] * (count - 1)}, "scores"),
        ("llama", {"scores": Typed([0.0] * count, ValueType.ARRAY, ValueType.FLOAT64)}, "scores"),
        ("llama", {"scores": [0.0, float("nan")] + [0.0] * (count - 2)}, "scores[1]"),
        ("llama", {"bos_token_id": count}, "bos_token_id"),
        ("llama", {"eos_token_id": 2**31}, "eos_token_id"),
        ("llama", {"eot_token_id": Typed(-1, ValueType.INT32)}, "eot_token_id"),
        ("llama", {"padding_token_id": "0"}, "padding_token_id"),
        ("llama", {"add_bos_token": 1}, "add_bos_token"),
        ("llama", {"pre": 3}, "pre"),
        ("gpt2", {"merges": None}, "merges"),
        ("gpt2", {"merges": [1, 2]}, "merges"),
        ("gpt2", {"merges": "a b"}, "merges"),
        ("gpt2", {"bos_token_id": 2**32 - 1, "tokens": ["a", "b"], "token_type": None, "eos_token_id": None}
         | {"add_bos_token": True}, "bos_token_id"),
        ("bert", {"token_type": _types(*[6] * 9)}, "token_type[0]"),
        ("bert", {"bos_token_id": None}, "bos_token_id"),
        ("bert", {"seperator_token_id": None}, "seperator_token_id"),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "field"), _cases())
def test_broken_vocabularies(tmp_path: Path, kind: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(_file(tmp_path / "v.gguf", kind, **changes))
    assert caught.value.field == PREFIX + field


def test_what_is_only_odd_is_told(tmp_path: Path) -> None:
    count = len(_tokens("llama"))
    header = gguf_io.read(_file(tmp_path / "v.gguf", "llama", padding_token_id=2**32 - 1))
    assert "padding_token_id" in header.notices[0]
    header = gguf_io.read(_file(tmp_path / "v.gguf", "llama", scores=[0.0] * (count + 3)))
    assert "scores" in header.notices[0]
    header = gguf_io.read(_file(tmp_path / "v.gguf", "llama", scores=[float("inf"), float("-inf")] * count))
    assert header.vocabulary_tokens == count
    assert gguf_io.read(_file(tmp_path / "v.gguf", "llama", tokens=["", *_tokens("llama")[1:]])).kind == "vocabulary"


def test_models_need_a_vocabulary_that_fits_their_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    specimen.build(path, "llama", width=32)
    header = gguf_io.read(path, arrays=True)
    keys = {key: Typed(header.metadata[key], *header.value_types[key]) for key in header.metadata}
    keys[PREFIX + "tokens"] = Typed([*_tokens("llama"), "one more"], ValueType.ARRAY, ValueType.STRING)
    for name in ("token_type", "scores"):
        del keys[PREFIX + name]
    specs = [gguf_io.TensorSpec(t.name, t.shape, t.type) for t in header.tensors]
    with writing(path, keys, specs) as out:
        for spec in specs:
            out.write(spec.name, bytes(spec.nbytes))
    with pytest.raises(GGUFError, match="token_embd"):
        gguf_io.read(path)


_TOKENIZE = """
import ctypes, sys
import llama_cpp as lib
quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
lib.llama_log_set(quiet, None)
options = lib.llama_model_default_params()
options.vocab_only = True
model = lib.llama_model_load_from_file(sys.argv[1].encode(), options)
if model:
    out = (ctypes.c_int32 * 64)()
    for text in (b"a b\\n", "é😀".encode(), b"\\x01"):
        lib.llama_tokenize(lib.llama_model_get_vocab(model), text, len(text), out, 64, True, True)
"""


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tokens": [*_tokens("llama")[:-1], "a"]}),
        ("llama", {"tokens": [t for t in _tokens("llama") if t != "<0xC3>"], "token_type": None, "scores": None}),
        ("bert", {"token_type": _types(*[6] * 9)}),
    ],
)
def test_llama_cpp_dies_of_what_we_refuse(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """The reason for the strictest rules: without them the process is gone."""
    pytest.importorskip("llama_cpp")
    path = _file(tmp_path / "v.gguf", kind, **changes)
    with pytest.raises(GGUFError):
        gguf_io.read(path)
    done = subprocess.run(
        [sys.executable, "-c", _TOKENIZE, str(path)],
        capture_output=True,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode != 0

"""Names: nothing unsafe becomes a file, and people find what they mean."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellama.errors import EdgellamaError, UsageError
from edgellama.store.names import (
    closest,
    is_later_split,
    is_safe_file_name,
    match,
    model_name,
    printable,
    safe_file_name,
    split_names,
)


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..",
        "a/b", "a\\b", "/etc/passwd", "C:x", "a:b", "x\n", "\x1b[31m", "a\0", "nul", "CON.gguf", "com1.bin",
        "a.", "a ", " ", ".hidden", "a\u202etxt.gguf", "x" * 300, "a*b", "\ud800",
    ],
)  # fmt: skip
def test_unsafe_names(name: str) -> None:
    assert not is_safe_file_name(name)
    with pytest.raises(EdgellamaError, match="not safe"):
        safe_file_name(name, "x")


@pytest.mark.parametrize("name", ["a.gguf", "Llama-3.2-1B.Q4_K_M.gguf", "模型 é.gguf", "a..b", "console.gguf", "-x"])
def test_safe_names(name: str) -> None:
    assert safe_file_name(name, "x") == name


@given(st.text(max_size=300))
def test_printable_text_never_steers_a_terminal(text: str) -> None:
    shown = printable(text)
    assert len(shown) <= 200
    assert not any(unicodedata.category(letter) in ("Cc", "Cf", "Cs") for letter in shown)


@given(st.text(min_size=1, max_size=60))
def test_model_names_are_safe_and_stable(text: str) -> None:
    try:
        name = model_name(text + ".gguf")
    except EdgellamaError:
        return
    assert is_safe_file_name(name)
    assert model_name(name + ".gguf") == name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "qwen3-0.6b-q8_0"),
        ("M-00001-of-00003.gguf", "m"),
        ("tiny llama é.GGUF", "tiny-llama-é"),
        ("x.bin", "x.bin"),
    ],
)
def test_names_from_files(file: str, name: str) -> None:
    assert model_name(file) == name


def test_splits() -> None:
    assert split_names("M-00002-of-00003.gguf") == tuple(f"M-0000{i}-of-00003.gguf" for i in (1, 2, 3))
    assert split_names("M.gguf") == ("M.gguf",)
    assert is_later_split("M-00002-of-00003.gguf")
    assert not is_later_split("M-00001-of-00003.gguf")
    assert not is_later_split("M.gguf")


@pytest.mark.parametrize(
    "name", ["M-00000-of-00002.gguf", "M-00003-of-00002.gguf", "M-00001-of-00000.gguf", "M-00001-of-99999.gguf"]
)
def test_impossible_splits(name: str) -> None:
    with pytest.raises(UsageError, match="no sense"):
        split_names(name)


def test_matching_is_exact_first_then_without_case() -> None:
    assert match("a", ["A", "a"]) == "a"
    assert match("B", ["b"]) == "b"
    assert match("x", ["X", "x "]) == "X"
    assert match("AB", ["Ab", "aB"]) is None


def test_close_names() -> None:
    names = ["smollm2-135m-instruct", "llama-3.2-1b-instruct", "qwen3-4b"]
    assert closest("smolm2-135m", names)[0] == "smollm2-135m-instruct"
    assert closest("LLAMA-3.2-1B", names)[0] == "llama-3.2-1b-instruct"
    assert closest("zzzz", names) == []

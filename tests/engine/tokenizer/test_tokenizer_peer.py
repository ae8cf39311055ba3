"""The tokenizer against llama.cpp, id for id, on every vocabulary beside its sources. Needs EDGELLAMA_PEER."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from edgellama.engine import tokenizer

pytestmark = [pytest.mark.llamacpp, pytest.mark.timeout(1800)]

VOCABULARIES = Path(os.environ.get("EDGELLAMA_PEER", "/nonexistent"), "src/models")
LINES = int(os.environ.get("EDGELLAMA_PEER_LINES", "1000"))
PATHS = sorted(VOCABULARIES.glob("ggml-vocab-*.gguf"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_ids_equal_those_of_llama_cpp(path: Path, compare: Any, hard_lines: Any, source_lines: Any) -> None:
    specials = tokenizer.load(path).control_texts()
    compare(path, [*hard_lines(1, LINES, specials), *source_lines(2, LINES // 2)])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_published_vectors(path: Path) -> None:
    inputs, outputs = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
    if not inputs.exists():
        pytest.skip("llama.cpp has no vectors for this vocabulary")
    texts = inputs.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [list(map(int, line.split())) for line in outputs.read_text().splitlines()]
    ours = tokenizer.load(path)
    for text, ids in zip(texts, expected, strict=False):
        assert ours.tokenize(text) == ids, text


def test_there_is_a_peer() -> None:
    if not PATHS:
        pytest.skip("EDGELLAMA_PEER is not set: no vocabularies of llama.cpp to compare with")


@pytest.mark.model
def test_ids_of_the_default_model(default_model_path: Path, compare: Any, hard_lines: Any, source_lines: Any) -> None:
    specials = tokenizer.load(default_model_path).control_texts()
    compare(default_model_path, [*hard_lines(3, LINES, specials), *source_lines(4, LINES // 2)])

"""What a host learns of a model from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellama.engine.base import EngineOptions
from edgellama.errors import UsageError
from edgellama.gguf_io import specimen
from edgellama.runtime.model import ModelSpec


def test_a_context_longer_than_trained_is_said(tmp_path: Path) -> None:
    specimen.build(tmp_path / "m.gguf", "llama")
    spec = ModelSpec.from_file(tmp_path / "m.gguf", options=EngineOptions(context_tokens=500))
    assert any("trained for 128 tokens" in notice for notice in spec.notices)
    assert not ModelSpec.from_file(tmp_path / "m.gguf", options=EngineOptions(context_tokens=128)).notices


def test_positions_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    """llama.cpp aborts the process when it is asked to look them up."""
    specimen.build(tmp_path / "m.gguf", "gpt2")
    ModelSpec.from_file(tmp_path / "m.gguf", options=EngineOptions(context_tokens=128))
    with pytest.raises(UsageError, match="no positions beyond 128"):
        ModelSpec.from_file(tmp_path / "m.gguf", options=EngineOptions(context_tokens=129))

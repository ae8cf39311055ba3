"""What a host learns of a model from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellama.engine.base import EngineOptions, LoraAdapter
from edgellama.errors import InvalidFileError, NotFoundError, UsageError
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


def test_what_is_no_adapter_is_refused_before_anything_loads(tmp_path: Path) -> None:
    specimen.build(tmp_path / "m.gguf", "llama")
    given = EngineOptions(loras=(LoraAdapter(str(tmp_path / "m.gguf")),))
    with pytest.raises(InvalidFileError, match="is no LoRA adapter") as caught:
        ModelSpec.from_file(tmp_path / "m.gguf", options=given)
    assert caught.value.exit_code == 4
    assert "\n" not in caught.value.message
    assert caught.value.advice


def test_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    specimen.build(tmp_path / "m.gguf", "llama")
    given = EngineOptions(loras=(LoraAdapter(str(tmp_path / "none.gguf")),))
    with pytest.raises(NotFoundError, match="no such file") as caught:
        ModelSpec.from_file(tmp_path / "m.gguf", options=given)
    assert caught.value.exit_code == 3
    assert "adapter" in caught.value.advice


def test_an_adapter_of_another_architecture(tmp_path: Path) -> None:
    import gguf

    specimen.build(tmp_path / "m.gguf", "llama")
    for architecture in ("llama", "qwen2"):
        writer = gguf.GGUFWriter(tmp_path / f"{architecture}.gguf", architecture)
        writer.add_type("adapter")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    fitting = EngineOptions(loras=(LoraAdapter(str(tmp_path / "llama.gguf")),))
    assert ModelSpec.from_file(tmp_path / "m.gguf", options=fitting).options == fitting
    other = EngineOptions(loras=(LoraAdapter(str(tmp_path / "qwen2.gguf")),))
    with pytest.raises(InvalidFileError, match="is for qwen2 models"):
        ModelSpec.from_file(tmp_path / "m.gguf", options=other)

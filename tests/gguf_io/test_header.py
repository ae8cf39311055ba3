"""What the header tells, file identity, lightness of the import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgellama import gguf_io
from edgellama.errors import GGUFError, NotFoundError
from edgellama.gguf_io import GGMLType, Typed, ValueType, specimen


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    keys = {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "tokenizer.chat_templates": ["tool_use"],
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.license": "apache-2.0",
        "general.license.link": "https://example.org",
        "llama.rope.freq_base": 500000.0,
        "llama.attention.head_count_kv": Typed([2, 2], ValueType.ARRAY, ValueType.INT32),
    }
    specimen.build(path, "llama", keys=keys, tensor_type=GGMLType.Q8_0)
    return path


def test_accessors(model: Path) -> None:
    header = gguf_io.read(model)
    assert header.chat_templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert header.sampling_defaults == {"temp": 0.5, "top_k": 20}
    assert header.licence == {"license": "apache-2.0", "license.link": "https://example.org"}
    assert header.head_counts == (4, 4)
    assert header.head_counts_kv == (2, 2)
    assert (header.key_length, header.value_length) == (16, 16)
    assert header.real("rope.freq_base") == 500000.0
    assert header.get("{arch}.block_count") == 2
    assert header.get("absent", 3) == 3
    assert header.array_length("tokenizer.ggml.tokens") == header.vocabulary_tokens == 266
    assert not header.has_learned_positions
    counts = header.type_counts
    assert counts[GGMLType.Q8_0][0] + counts[GGMLType.F32][0] == len(header.tensors)
    assert sum(nbytes for _, nbytes in counts.values()) == header.weights_bytes
    embedding = header.tensor("token_embd.weight")
    assert embedding is not None
    assert embedding.shape == (64, 266)
    assert header.tensor("absent") is None


def test_weights_lie_where_the_header_says(model: Path) -> None:
    header = gguf_io.read(model)
    norm = header.tensor("output_norm.weight")
    assert norm is not None
    with model.open("rb") as stream:
        stream.seek(norm.offset)
        assert stream.read(norm.nbytes) == b"\0\0\x80\x3f" * 64


def test_identity_follows_the_file(model: Path, tmp_path: Path) -> None:
    first = gguf_io.file_identity(model)
    assert first == gguf_io.file_identity(gguf_io.read(model))
    assert len(first) == 32
    os.utime(model, ns=(1, 1))
    second = gguf_io.file_identity(model)
    assert second != first
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    os.utime(copy, ns=(1, 1))
    if model.stat().st_ino != copy.stat().st_ino:
        assert gguf_io.file_identity(copy) != second
    with model.open("ab") as stream:
        stream.write(b"\0")
    os.utime(model, ns=(1, 1))
    assert gguf_io.file_identity(model) != second
    with pytest.raises(NotFoundError):
        gguf_io.file_identity(tmp_path / "absent.gguf")


def test_errors_carry_everything(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF\x01\0\0\0")
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(path)
    error = caught.value
    assert (error.path, error.offset, error.field, error.found, error.expected) == (
        str(path),
        4,
        "version",
        "1",
        "2 or 3",
    )
    assert error.exit_code == 4
    assert str(path) in str(error)
    assert error.advice in str(error)


def test_import_is_light() -> None:
    code = "import sys, edgellama.gguf_io; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"numpy", "gguf", "llama_cpp", "numba", "msgspec", "hashlib", "mmap", "dataclasses", "inspect"}


def test_reading_never_maps_the_file(model: Path) -> None:
    code = "import sys; from edgellama import gguf_io; gguf_io.read(sys.argv[1]); print('mmap' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_seeded_mutations_end_in_typed_errors(model: Path) -> None:
    """A short run of what scripts/fuzz_gguf does for longer."""
    script = Path(__file__).parents[2] / "scripts" / "fuzz_gguf"
    command = [sys.executable, str(script), "--seconds", "60", "--count", "800", "--seed", "7"]
    command += ["--architecture", "llama", "--architecture", "qwen3moe", "--keep", str(model.parent / "findings")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "800  inputs" in done.stdout

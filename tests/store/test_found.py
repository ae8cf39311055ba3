"""Other programs' models: found by their own layout, read only, whatever lies there."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from edgellama.errors import UsageError
from edgellama.store import Store
from edgellama.store.found import find_all

BODY = b"GGUF" + bytes(100)


def ollama(root: Path, name: str, body: bytes = BODY, manifest: Any = None) -> Path:
    """A model as Ollama 0.x keeps it: a manifest that names layers by digest, and blobs."""
    digest = hashlib.sha256(body).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(body)
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(body)},
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}", "size": 3},
    ]
    content = {"schemaVersion": 2, "layers": layers} if manifest is None else manifest
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return blob


def write(path: Path, body: bytes = BODY) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def names() -> list[str]:
    return [model.name for model in find_all()]


def test_nothing() -> None:
    assert find_all() == []


def test_all_programs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = ollama(home / ".ollama" / "models", "registry.ollama.ai/library/llama3.2/1b")
    ollama(home / ".ollama" / "models", "registry.ollama.ai/me/mine/latest", BODY + b"2")
    ollama(home / ".ollama" / "models", "hf.co/org/repo/Q4_K_M", BODY + b"3")
    write(home / ".lmstudio" / "models" / "pub" / "repo" / "M-Q4.gguf")
    write(home / ".lmstudio" / "models" / "pub" / "repo" / "mmproj-M.gguf")
    write(home / ".lmstudio" / "models" / "pub" / "repo" / "S-00001-of-00002.gguf")
    write(home / ".lmstudio" / "models" / "pub" / "repo" / "S-00002-of-00002.gguf")
    write(home / ".cache" / "llama.cpp" / "org_repo_M.gguf")
    hub = home / ".cache" / "huggingface" / "hub" / "models--org--repo"
    old = write(hub / "snapshots" / "aaa" / "sub" / "M.gguf")
    os.utime(hub / "snapshots" / "aaa", (1, 1))
    stored = write(hub / "blobs" / "b1")
    new = hub / "snapshots" / "bbb" / "sub" / "M.gguf"
    new.parent.mkdir(parents=True)
    try:
        new.symlink_to(stored)
    except OSError:
        pytest.skip("no symbolic links here")
    assert names() == [
        "huggingface/org/repo/sub/M.gguf",
        "llama.cpp/org_repo_M.gguf",
        "lmstudio/pub/repo/M-Q4.gguf",
        "lmstudio/pub/repo/S-00001-of-00002.gguf",
        "ollama/hf.co/org/repo:Q4_K_M",
        "ollama/llama3.2:1b",
        "ollama/me/mine:latest",
    ]
    by_name = {model.name: model for model in find_all()}
    assert by_name["ollama/llama3.2:1b"].path == blob
    assert by_name["huggingface/org/repo/sub/M.gguf"].path == new != old
    store = Store()
    assert store.resolve("ollama/llama3.2:1b", offline=True).path == blob
    assert store.resolve("llama3.2:1b", offline=True).path == blob
    assert store.resolve("me/mine", offline=True).name == "ollama/me/mine:latest"
    assert store.resolve("LMSTUDIO/pub/repo/m-q4.gguf".lower(), offline=True).name == "lmstudio/pub/repo/M-Q4.gguf"
    with pytest.raises(UsageError, match="belongs to ollama"):
        store.remove("ollama/llama3.2:1b")
    assert blob.is_file()


def test_environment_variables_move_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    ollama(tmp_path / "o", "registry.ollama.ai/library/a/b")
    write(tmp_path / "l" / "x.gguf")
    write(tmp_path / "h" / "models--o--r" / "snapshots" / "1" / "y.gguf")
    write(tmp_path / "lm" / "models" / "p" / "z.gguf")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "o"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "l"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "h"))
    (home / ".lmstudio-home-pointer").write_text(str(tmp_path / "lm"), encoding="utf-8")
    assert names() == ["huggingface/o/r/y.gguf", "llama.cpp/x.gguf", "lmstudio/p/z.gguf", "ollama/a:b"]


@pytest.mark.parametrize(
    "manifest",
    [
        b"", b"not json", b"[" * 300_000, b"\xff\xfe", {"layers": None}, {"layers": [{"digest": 5}]}, [],
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../../etc/passwd"}]},
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "A" * 64}]},
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "1" * 64}]},
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "1" * 64}] * 2},
        b'{"layers": [], "pad": "' + b"x" * 2_000_000 + b'"}',
    ],
)  # fmt: skip
def test_hostile_manifests(home: Path, manifest: Any) -> None:
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/x/y", manifest=manifest)
    assert find_all() == []


def test_blobs_must_be_gguf_files(home: Path) -> None:
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/x/y", b"safetensors")
    assert find_all() == []


def test_manifests_at_odd_depths(home: Path) -> None:
    ollama(home / ".ollama" / "models", "loose")
    ollama(home / ".ollama" / "models", "host/loose")
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/tag")
    assert all(name.startswith("ollama/") for name in names())


def test_loops_pipes_and_odd_names(home: Path) -> None:
    root = home / ".lmstudio" / "models"
    write(root / "p" / "good.gguf")
    try:
        (root / "p" / "loop").symlink_to(root, target_is_directory=True)
        (root / "self.gguf").symlink_to(root / "self.gguf")
        (root / "dangling.gguf").symlink_to(root / "nowhere")
    except OSError:
        pytest.skip("no symbolic links here")
    if hasattr(os, "mkfifo"):
        os.mkfifo(root / "pipe.gguf")
    (root / "folder.gguf").mkdir()
    write(root / "empty.gguf", b"")
    write(root / "ev\x1b[31mil.gguf")
    found = find_all()
    assert sorted(model.name for model in found) == ["lmstudio/ev\ufffd[31mil.gguf", "lmstudio/p/good.gguf"]


def test_deep_folders_are_bounded(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    for _ in range(40):
        folder = folder / "d"
    write(folder / "deep.gguf")
    assert find_all() == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_folders_of_other_users(home: Path) -> None:
    folder = write(home / ".lmstudio" / "models" / "x.gguf").parent
    folder.chmod(0)
    try:
        assert find_all() == []
    finally:
        folder.chmod(0o755)

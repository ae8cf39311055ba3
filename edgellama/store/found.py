"""Models that other programs on this machine already have: Ollama, LM Studio, the Hugging Face and llama.cpp caches.

Everything here only reads. Manifests and folders are other programs' data: sizes and depths are bounded, names are
cleaned, links are followed only to plain files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from edgellama.store.names import is_later_split, printable

Program = Literal["ollama", "lmstudio", "huggingface", "llama.cpp"]

PREFIXES = ("ollama/", "lmstudio/", "huggingface/", "llama.cpp/")
"""How names of other programs' models begin."""

_MAX_MANIFEST_BYTES = 1 << 20
_MAX_FILES = 20_000
_MAX_DEPTH = 6
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MODEL_LAYER = "application/vnd.ollama.image.model"


@dataclass(frozen=True, slots=True)
class Found:
    """One model file of another program. `name` is unique and begins with the program's name."""

    name: str
    program: Program
    path: Path
    size_bytes: int
    short_name: str
    """How its own program calls it."""


def find_all() -> list[Found]:
    """Every model found, by program and name."""
    found = [*ollama(), *lm_studio(), *hugging_face(), *llama_cpp()]
    unique = {model.name: model for model in reversed(found)}
    return sorted(unique.values(), key=lambda model: (model.program, model.name))


def _folders(*candidates: str | Path | None) -> list[Path]:
    paths = [Path(candidate).expanduser() for candidate in candidates if candidate]
    return [path for path in dict.fromkeys(paths) if _is_folder(path)]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _walk(root: Path) -> Iterator[Path]:
    """Plain files below `root` (links to files count), without going round in circles."""
    seen: set[tuple[int, int]] = set()
    todo = [(root, 0)]
    count = 0
    while todo:
        folder, depth = todo.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    count += 1
                    if count > _MAX_FILES:
                        return
                    if _is(entry, folder=True) and depth < _MAX_DEPTH:
                        todo.append((Path(entry.path), depth + 1))
                    elif _is(entry, folder=False):
                        yield Path(entry.path)
        except OSError:
            continue  # another user's folder, or one that vanished


def _is(entry: os.DirEntry[str], *, folder: bool) -> bool:
    try:
        return entry.is_dir() if folder else entry.is_file()
    except OSError:
        return False


def _models_below(root: Path) -> Iterator[tuple[Path, str, int]]:
    for path in _walk(root):
        name = path.name.lower()
        if not name.endswith(".gguf") or name.startswith("mmproj") or is_later_split(path.name):
            continue
        size = _size(path)
        if size:
            yield path, printable(path.relative_to(root).as_posix(), 300), size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


class _Layer(msgspec.Struct):
    digest: str
    mediaType: str = ""  # noqa: N815 - the manifest's own name


class _Manifest(msgspec.Struct):
    layers: list[_Layer] = []


def ollama() -> list[Found]:
    """Models of Ollama: manifests name layers, layers are files named by their SHA-256."""
    roots = _folders(os.environ.get("OLLAMA_MODELS"), "~/.ollama/models", "/usr/share/ollama/.ollama/models")
    found = []
    for root in roots:
        for path in _walk(root / "manifests"):
            model = _ollama_model(root, path)
            if model is not None:
                found.append(model)
    return found


def _ollama_model(root: Path, manifest: Path) -> Found | None:
    parts = manifest.relative_to(root / "manifests").parts
    if len(parts) < 3:
        return None
    try:
        if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
            return None
        content = msgspec.json.decode(manifest.read_bytes(), type=_Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # not a manifest; Ollama itself will tell its user
    digests = [_DIGEST.fullmatch(layer.digest) for layer in content.layers if layer.mediaType == _MODEL_LAYER]
    if len(digests) != 1 or digests[0] is None:
        return None
    blob = root / "blobs" / f"sha256-{digests[0][1]}"
    size = _size(blob)
    if not size or not _begins_with_magic(blob):
        return None
    host, *middle, tag = parts
    middle = middle[1:] if host == "registry.ollama.ai" and middle[0] == "library" else middle
    prefix = [] if host == "registry.ollama.ai" else [host]
    short = printable("/".join([*prefix, *middle]) + f":{tag}", 300)
    return Found(f"ollama/{short}", "ollama", blob, size, short)


def _begins_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def lm_studio() -> list[Found]:
    """Models of LM Studio: PUBLISHER/REPOSITORY/FILE.gguf below its models folder."""
    home = _pointed_home()
    roots = _folders(home and home / "models", "~/.lmstudio/models", "~/.cache/lm-studio/models")
    return [
        Found(f"lmstudio/{name}", "lmstudio", path, size, name)
        for root in roots
        for path, name, size in _models_below(root)
    ]


def _pointed_home() -> Path | None:
    try:
        with Path("~/.lmstudio-home-pointer").expanduser().open("rb") as stream:
            text = stream.read(4096).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Path(text) if text and "\0" not in text else None


def hugging_face() -> list[Found]:
    """Models in the Hugging Face cache: models--ORG--REPO/snapshots/REVISION/FILE, the newest snapshot of each."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    found: dict[str, tuple[float, Found]] = {}
    for root in _folders(os.environ.get("HF_HUB_CACHE") or home / "hub"):
        for snapshot in root.glob("models--*--*/snapshots/*"):
            repository = printable(snapshot.parts[-3].removeprefix("models--").replace("--", "/", 1), 200)
            for path, name, size in _models_below(snapshot):
                model = Found(f"huggingface/{repository}/{name}", "huggingface", path, size, f"{repository}/{name}")
                stamp = _changed(snapshot)
                if model.name not in found or found[model.name][0] < stamp:
                    found[model.name] = (stamp, model)
    return [model for _, model in found.values()]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def llama_cpp() -> list[Found]:
    """Models that llama.cpp fetched itself (`-hf`)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    roots = _folders(os.environ.get("LLAMA_CACHE"), Path(cache) / "llama.cpp", "~/Library/Caches/llama.cpp")
    return [
        Found(f"llama.cpp/{name}", "llama.cpp", path, size, name)
        for root in roots
        for path, name, size in _models_below(root)
    ]

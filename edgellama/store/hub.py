"""Hugging Face: which files a repository has, and to whom the token may go."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from edgellama.errors import NetworkError, NotFoundError, UsageError
from edgellama.store import faults
from edgellama.store.names import is_later_split, printable
from edgellama.store.sources import HUGGING_FACE, Source, hugging_face_endpoint
from edgellama.store.transport import Ask, Transport, origin

_MAX_LIST_BYTES = 16 << 20
_MAX_TOKEN_BYTES = 4096


class RepositoryFile(msgspec.Struct):
    """One entry of a repository's file list."""

    path: str
    type: str = "file"
    size: int = 0


def authorization(url: str) -> str:
    """The header value for `url`: HF_TOKEN for huggingface.co over TLS, nothing for a mirror or another host."""
    token = _token()
    return f"Bearer {token}" if token and origin(url) == origin(HUGGING_FACE) else ""


def _token() -> str:
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
        try:
            with path.open("rb") as stream:
                token = stream.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""
    return token if token.isascii() and token.isprintable() and " " not in token else ""


def with_file(source: Source, transport: Transport) -> Source:
    """`source`, or, for a repository without a file, the only model file it has.

    Raises `UsageError` that lists the files when there are several, `NotFoundError` when there is none.
    """
    if source.file or source.kind not in ("hf", "ms"):
        return source
    if source.kind == "ms":
        raise UsageError(f"{source} names no file", "write ms:ORG/REPO/FILE.gguf")
    found = [file for file in _list(source, transport) if _is_model(file.path)]
    if not found:
        raise NotFoundError(f"hf:{source.repo} has no GGUF file", "look for a repository whose name ends in -GGUF")
    if len(found) > 1:
        lines = "\n".join(f"  hf:{source.repo}/{printable(file.path)}  {file.size / 1e9:.2f} GB" for file in found[:40])
        raise UsageError(f"hf:{source.repo} has {len(found)} models:\n{lines}", "name one of them")
    return Source("hf", source.repo, source.revision, found[0].path)


def _is_model(path: str) -> bool:
    name = path.rsplit("/", 1)[-1].lower()
    return name.endswith(".gguf") and not is_later_split(name) and not name.startswith("mmproj")


def _list(source: Source, transport: Transport) -> list[RepositoryFile]:
    url = f"{hugging_face_endpoint()}/api/models/{source.repo}/tree/{source.revision or 'main'}?recursive=true"
    token = authorization(url)
    try:
        body = transport.fetch(Ask(url, f"hf:{source.repo}", authorization=token), _MAX_LIST_BYTES)
    except faults.TransferFault as fault:
        raise fault.error from fault
    try:
        return msgspec.json.decode(body.content, type=list[RepositoryFile])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NetworkError(
            f"hf:{source.repo}: {hugging_face_endpoint()} gave no list of files", "name the file: hf:ORG/REPO/FILE"
        ) from error

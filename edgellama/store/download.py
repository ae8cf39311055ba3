"""Fetch one file over HTTP: resumable by Range and ETag, retried, measured, verified before it gets its name."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgellama import files
from edgellama.errors import DiskFullError, EdgellamaError, InvalidFileError, NetworkError
from edgellama.store import faults
from edgellama.store.faults import TransferFault
from edgellama.store.names import printable
from edgellama.store.partial import Part, State
from edgellama.store.progress import OnProgress, Progress, Stage, notice
from edgellama.store.sources import without_secrets
from edgellama.store.transport import Ask, Reply, Transport

if TYPE_CHECKING:
    import httpx

_ATTEMPTS = 6
_PROGRESS_BYTES = 1 << 20
_MAX_WAIT_SECONDS = 120.0
_SPARE_BYTES = 32 << 20
_SPACE_EVERY_BYTES = 64 << 20
_CONTENT_RANGE = re.compile(r"bytes\s+(?P<first>\d+)-(?P<last>\d+)/(?P<total>\d+|\*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Sleep = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file to fetch. `sha256` and `size_bytes` are what the catalogue or index says; "" and 0 mean unknown."""

    url: str
    what: str
    target: Path
    sha256: str = ""
    size_bytes: int = 0
    magic: bytes = b""
    """The first bytes of every such file: a login page in its place is noticed at once."""
    extra_bytes: int = 0
    """Space needed beside it, for what will be unpacked."""
    authorization: str = ""


def check_space(folder: Path, need_bytes: int, what: str) -> None:
    """Raise `DiskFullError` unless `need_bytes` (and a little more) are free where `folder` is."""
    free = files.free_bytes(folder)
    if need_bytes + _SPARE_BYTES > free:
        raise DiskFullError(
            f"{what} needs {need_bytes:,} more bytes in {folder}, {free:,} are free",
            "free some space, or set EDGELLAMA_MODELS_DIR to a folder on a larger disk; what was fetched is kept",
        )


def download(
    wanted: Wanted, transport: Transport, on_progress: OnProgress, *, sleep: Sleep = time.sleep
) -> tuple[int, str]:
    """Fetch `wanted` to its target; returns size in bytes and SHA-256 (lower-case hexadecimal).

    Raises `NetworkError` and its kin, `NotFoundError`, `DiskFullError`, `InvalidFileError` (wrong length or hash).
    Whatever was fetched is kept for the next try, unless its hash is wrong.
    """
    return _Download(wanted, transport, on_progress, sleep).run()


class _Download:
    def __init__(self, wanted: Wanted, transport: Transport, on_progress: OnProgress, sleep: Sleep) -> None:
        self.wanted = wanted
        self.transport = transport
        self.on_progress = on_progress
        self.sleep = sleep
        self.part = Part(wanted.target)
        self.address = without_secrets(wanted.url)
        self.resumed = False

    def run(self) -> tuple[int, str]:
        try:
            self.part.load(lambda done, total: self._tell("verify", done, total))
            self.resumed = self.part.size_bytes > 0
            self._fetch()
            if self._mismatch() and self.resumed:
                notice(self.on_progress, self.wanted.what, "the resumed file has the wrong SHA-256; fetching it anew")
                self.part.begin(State(address=self.address), keep=False)
                self.resumed = False
                self._fetch()
            self._check_digest()
            self.part.finish()
        finally:
            self.part.close()
        return self.part.size_bytes, self.part.digest.hexdigest()

    def _tell(self, stage: Stage, done: int, total: int | None) -> None:
        self.on_progress(Progress(stage, self.wanted.what, done, total))

    def _fetch(self) -> None:
        """Try until the file is complete, as long as tries bring something."""
        best, failures = self.part.size_bytes, 0
        while not self._is_complete():
            try:
                self._attempt()
            except TransferFault as fault:
                if self.part.size_bytes >= best + _PROGRESS_BYTES:
                    best, failures = self.part.size_bytes, 0
                failures += 1
                self._pause(fault, failures)

    def _pause(self, fault: TransferFault, failures: int) -> None:
        wait = fault.wait_seconds
        if wait is None:
            wait = min(30.0, 2.0 ** (failures - 1)) * random.uniform(0.75, 1.25)  # noqa: S311 - not for secrets
        if not fault.transient or failures >= _ATTEMPTS or wait > _MAX_WAIT_SECONDS:
            raise fault.error from fault
        notice(self.on_progress, self.wanted.what, f"{fault.error.message}; trying again in {wait:.0f} s")
        self.sleep(wait)

    def _is_complete(self) -> bool:
        expected = self.wanted.size_bytes or self.part.state.total_bytes
        return expected is not None and expected > 0 and self.part.size_bytes == expected and self._is_ours()

    def _is_ours(self) -> bool:
        """Whether the bytes there may be added to: same address, or a hash that will tell."""
        return self.part.state.address == self.address or bool(self.wanted.sha256 or self.part.state.announced_sha256)

    def _attempt(self) -> None:
        if self.part.size_bytes and not self._is_ours():
            self.part.begin(State(address=self.address), keep=False)
        headers = self._range_headers()
        ask = Ask(self.wanted.url, self.wanted.what, headers, self.wanted.authorization)
        self._tell("connect", self.part.size_bytes, self.part.state.total_bytes)
        with self.transport.get(ask) as reply:
            if reply.status == 416:
                self._range_refused(reply)
                return
            if reply.status not in (200, 206):
                raise self._status_fault(reply)
            total = self._begin(reply, asked_range=bool(headers))
            self._receive(reply, total)

    def _range_headers(self) -> dict[str, str]:
        if not self.part.size_bytes:
            return {}
        state = self.part.state
        headers = {"Range": f"bytes={self.part.size_bytes}-"}
        validator = state.etag if state.etag and not state.etag.startswith("W/") else state.last_modified
        if validator and state.address == self.address:
            headers["If-Range"] = validator
        elif not (self.wanted.sha256 or state.announced_sha256):
            self.part.begin(
                State(address=self.address), keep=False
            )  # nothing would tell whether the rest belongs to it
            return {}
        return headers

    def _status_fault(self, reply: Reply) -> TransferFault:
        return faults.from_status(
            reply.status, reply.headers(), reply.url, self.wanted.what, token_sent=bool(self.wanted.authorization)
        )

    def _range_refused(self, reply: Reply) -> None:
        """416: the file is complete, or it is another one now."""
        total = re.search(r"\*/(\d+)", reply.header("content-range"))
        if total is not None and int(total[1]) == self.part.size_bytes:
            self.part.state.total_bytes = self.part.size_bytes
            self._check_announcement(self.part.state)
            return
        self.part.begin(State(address=self.address), keep=False)
        raise TransferFault(
            NetworkError(f"{self.wanted.what}: the file on the server is another one now"), transient=True
        )

    def _begin(self, reply: Reply, *, asked_range: bool) -> int | None:
        """Check what the server is about to send, note it, and return the size of the whole file in bytes, if told."""
        if reply.header("content-encoding") not in ("", "identity"):
            raise TransferFault(
                NetworkError(f"{self.wanted.what}: {self.address} sends compressed data, which was not asked for")
            )
        state = State(
            address=self.address,
            etag=printable(reply.response.headers.get("etag", ""), 256),
            last_modified=printable(reply.response.headers.get("last-modified", ""), 64),
            announced_sha256=_announced(reply),
        )
        keep = reply.status == 206 and self._continues(reply, state)
        state.total_bytes = _total_bytes(reply)
        self._check_announcement(state)
        if asked_range and not keep:
            why = "does not resume" if state.etag == self.part.state.etag else "has another file now"
            notice(self.on_progress, self.wanted.what, f"the server {why}; starting from the beginning")
        if reply.status == 206 and not keep:
            self.part.begin(State(address=self.address), keep=False)
            raise TransferFault(
                NetworkError(f"{self.wanted.what}: the server sent another range than asked"), transient=True
            )
        self.part.begin(state, keep=keep)
        self.resumed = self.resumed and keep
        if state.total_bytes is not None:
            need = state.total_bytes - self.part.size_bytes + self.wanted.extra_bytes
            check_space(self.part.path.parent, need, self.wanted.what)
        return state.total_bytes

    def _continues(self, reply: Reply, new: State) -> bool:
        found = _CONTENT_RANGE.fullmatch(reply.header("content-range").strip())
        old = self.part.state
        if found is None or int(found["first"]) != self.part.size_bytes:
            return False
        if old.address == self.address and old.etag and new.etag and old.etag != new.etag:
            return False
        if old.total_bytes is not None and found["total"] not in ("*", str(old.total_bytes)):
            return False
        return not (old.announced_sha256 and new.announced_sha256 and old.announced_sha256 != new.announced_sha256)

    def _check_announcement(self, state: State) -> None:
        wanted = self.wanted
        if state.total_bytes == 0:
            raise InvalidFileError(
                f"{wanted.what}: the file at {self.address} is empty", "use another source or mirror"
            )
        offers = f"{wanted.what}: {self.address} offers"
        if wanted.size_bytes and state.total_bytes is not None and state.total_bytes != wanted.size_bytes:
            raise InvalidFileError(
                f"{offers} {state.total_bytes:,} bytes, {wanted.size_bytes:,} are expected",
                "the publisher has replaced the file, or this is another one: use a newer edgellama, or give a source",
            )
        if wanted.sha256 and state.announced_sha256 not in ("", wanted.sha256):
            raise InvalidFileError(
                f"{offers} SHA-256 {state.announced_sha256}, {wanted.sha256} is expected",
                "the publisher has replaced the file: use a newer edgellama, or give the source by hand",
            )

    def _receive(self, reply: Reply, total: int | None) -> None:
        import httpx

        next_check = self.part.size_bytes + _SPACE_EVERY_BYTES
        try:
            for chunk in _chunks(reply.response, len(self.wanted.magic)):
                if self.part.size_bytes == 0:
                    self._check_magic(chunk, reply)
                self.part.write(chunk)
                self._tell("download", self.part.size_bytes, total)
                if total is None and self.part.size_bytes >= next_check:
                    check_space(self.part.path.parent, self.wanted.extra_bytes, self.wanted.what)
                    next_check += _SPACE_EVERY_BYTES
                if self.wanted.size_bytes and self.part.size_bytes > self.wanted.size_bytes:
                    raise self._too_long()
        except httpx.HTTPError as error:
            raise faults.from_exception(error, reply.url, self.wanted.what) from error
        if total is None:
            self.part.state.total_bytes = self.part.size_bytes
            self._check_announcement(self.part.state if not self.wanted.size_bytes else State(total_bytes=None))
            if self.wanted.size_bytes > self.part.size_bytes:
                raise TransferFault(
                    NetworkError(f"{self.wanted.what}: {self.address} stopped too early"), transient=True
                )
            return
        if self.part.size_bytes < total:
            raise TransferFault(NetworkError(f"{self.wanted.what}: {self.address} stopped too early"), transient=True)

    def _check_magic(self, chunk: bytes, reply: Reply) -> None:
        if chunk.startswith(self.wanted.magic):
            return
        kind = printable(reply.header("content-type")) or "something else"
        page = "html" in kind.lower()
        raise TransferFault(
            NetworkError(
                f"{self.wanted.what}: {without_secrets(reply.url)} answered with {'a web page' if page else kind} "
                f"(it begins with {chunk[:8]!r})",
                "a login page of the network or a proxy may answer in the server's place: open a browser and log in"
                if page
                else "check the source: it must be the address of the file itself",
            )
        )

    def _too_long(self) -> EdgellamaError:
        found, wanted = self.part.size_bytes, self.wanted
        self.part.discard()
        return InvalidFileError(
            f"{wanted.what}: more than {found - 1:,} bytes came, the catalogue says {wanted.size_bytes:,}"
        )

    def _mismatch(self) -> bool:
        expected = self.wanted.sha256 or self.part.state.announced_sha256
        return bool(expected) and self.part.digest.hexdigest() != expected

    def _check_digest(self) -> None:
        if not self._mismatch():
            return
        found = self.part.digest.hexdigest()
        expected = self.wanted.sha256 or self.part.state.announced_sha256
        self.part.discard()
        raise InvalidFileError(
            f"{self.wanted.what}: SHA-256 is {found}, expected {expected}; the file was deleted",
            "it was damaged or changed on the way: run the command again, or use another source or mirror",
        )


def _chunks(response: httpx.Response, head_bytes: int) -> Iterator[bytes]:
    """The body as it comes, since a buffer would be lost when the connection breaks; the first piece can be judged."""
    head = b""
    for chunk in response.iter_raw():
        if len(head) < head_bytes:
            head += chunk
            if len(head) >= head_bytes:
                yield head
            continue
        yield chunk
    if 0 < len(head) < head_bytes:
        yield head


def _announced(reply: Reply) -> str:
    """The SHA-256 that Hugging Face puts into the headers of a stored file, else ""."""
    value = reply.header("x-linked-etag").strip().strip('"').lower()
    return value if _SHA256.fullmatch(value) else ""


def _total_bytes(reply: Reply) -> int | None:
    """The size of the whole file as the reply tells it."""
    if reply.status == 206:
        found = _CONTENT_RANGE.fullmatch(reply.header("content-range").strip())
        return int(found["total"]) if found is not None and found["total"] != "*" else None
    length = reply.response.headers.get("content-length", "")
    return int(length) if length.isdigit() else None

"""The unfinished file of a pull: `FILE.part` with the bytes, `FILE.part.json` with what is needed to go on."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import msgspec

from edgellama import files
from edgellama.errors import EdgellamaError
from edgellama.store import faults

_SYNC_EVERY_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_SCHEMA = 1


class State(msgspec.Struct, kw_only=True):
    """Where the bytes came from. `durable_bytes` of them are known to be on the disk, whatever happens to the power."""

    schema: int = _SCHEMA
    address: str = ""
    etag: str = ""
    last_modified: str = ""
    total_bytes: int | None = None
    announced_sha256: str = ""
    durable_bytes: int = 0
    boot: str = ""


class Part:
    """Appends to `TARGET.part`, hashing on the way; `size_bytes` and `digest` always agree."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(target.name + ".part")
        self.sidecar = target.with_name(target.name + ".part.json")
        self.state = State()
        self.size_bytes = 0
        self.digest = hashlib.sha256()
        self._stream: FileIO | None = None

    def load(self, on_bytes: Callable[[int, int], None]) -> None:
        """Take over what an earlier pull left, hashing it; `on_bytes(done, total)` tells the progress."""
        self.state = _read_state(self.sidecar)
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_symlink():
                self.path.unlink()  # on a foreign medium it could point at any file of this machine
            self._stream = FileIO(self.path, "r+" if self.path.exists() else "w+")
            usable = os.fstat(self._stream.fileno()).st_size
            if self.state.boot != _boot():
                usable = min(usable, self.state.durable_bytes)  # after a power cut the rest may be zeros
            self._stream.truncate(usable)
            while self.size_bytes < usable:
                chunk = self._stream.read(min(_CHUNK_BYTES, usable - self.size_bytes))
                if not chunk:
                    break
                self.digest.update(chunk)
                self.size_bytes += len(chunk)
                on_bytes(self.size_bytes, usable)
        except OSError as error:
            raise faults.from_write(error, self.path) from error

    def begin(self, state: State, *, keep: bool) -> None:
        """Note where the next bytes come from; without `keep` what is there is thrown away."""
        if not keep:
            self._truncate()
        state.durable_bytes = min(self.state.durable_bytes, self.size_bytes)
        state.boot = _boot()
        self.state = state
        self._save()

    def _truncate(self) -> None:
        stream = self._open()
        try:
            stream.seek(0)
            stream.truncate(0)
        except OSError as error:
            raise faults.from_write(error, self.path) from error
        self.size_bytes = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Append `data`; now and then make everything durable."""
        stream = self._open()
        rest = memoryview(data)
        try:
            while rest:
                count = stream.write(rest)
                self.digest.update(rest[:count])
                self.size_bytes += count
                rest = rest[count:]
            if self.size_bytes - self.state.durable_bytes >= _SYNC_EVERY_BYTES:
                self._sync()
        except OSError as error:
            raise faults.from_write(error, self.path) from error

    def _sync(self) -> None:
        os.fsync(self._open().fileno())
        self.state.durable_bytes = self.size_bytes
        self._save()

    def _save(self) -> None:
        try:
            files.write_bytes(self.sidecar, msgspec.json.encode(self.state))
        except OSError as error:
            raise faults.from_write(error, self.sidecar) from error

    def close(self) -> None:
        """Keep what there is for the next pull; never raises, since it runs while another error is on its way."""
        if self._stream is not None:
            with contextlib.suppress(OSError, EdgellamaError):
                if self.size_bytes == 0:
                    self.discard()
                    return
                self._sync()
            self._stream.close()
            self._stream = None

    def finish(self) -> None:
        """Make the complete file durable under its own name and drop the sidecar."""
        try:
            os.fsync(self._open().fileno())
            self._open().close()
            self._stream = None
            self.path.replace(self.target)
            files.sync_folder(self.target.parent)
            self.sidecar.unlink(missing_ok=True)
        except OSError as error:
            raise faults.from_write(error, self.target) from error

    def discard(self) -> None:
        """Remove the part and its sidecar."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        for path in (self.path, self.sidecar):
            path.unlink(missing_ok=True)

    def _open(self) -> FileIO:
        if self._stream is None:
            raise RuntimeError("the part is not open")
        return self._stream


def _read_state(path: Path) -> State:
    try:
        with path.open("rb") as stream:
            state = msgspec.json.decode(stream.read(1 << 16), type=State)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return State()  # without it the bytes are only as good as a known hash says
    return state if state.schema == _SCHEMA else State()


def _boot() -> str:
    """Changes with every start of the machine; a clock set anew may change it too, which only costs some bytes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        import psutil

        return str(round(psutil.boot_time() / 60))

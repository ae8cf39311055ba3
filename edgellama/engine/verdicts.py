"""What the safety ladder found out, kept over restarts: one small file per model and settings in the cache folder.

An attempt is written down as `trying` before it is made. Whoever finds such a mark later, from an earlier start of the
machine, knows that it did not survive the attempt.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgellama import files
from edgellama.engine.base import EngineOptions
from edgellama.engine.probe import FileMark, Reference, Rung, check_schema, digest, read_reference
from edgellama.errors import DiskFullError, InvalidFileError

SCHEMA = 1
_MAX_BYTES = 1 << 20
_MAX_ATTEMPTS = 32
_RETRY_AFTER_SECONDS = 24 * 3600.0

Outcome = Literal["trying", "agreed", "finite-only", "disagreed", "non-finite", "crashed", "failed", "interrupted"]
GOOD: frozenset[Outcome] = frozenset({"agreed", "finite-only"})
BAD: frozenset[Outcome] = frozenset({"disagreed", "non-finite", "crashed"})


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One rung tried."""

    rung: str
    outcome: Outcome
    detail: str = ""
    """For people: what it died of, or how far the numbers were off."""
    time: float = 0.0
    """Seconds since 1970."""
    boot: str = ""
    """Which start of the machine."""
    pid: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All attempts with one model file at one set of settings on one machine, oldest first."""

    schema: int = SCHEMA
    model: str
    identity: str
    engine: str
    machine: str
    asked: EngineOptions
    backend_build: str = ""
    devices: tuple[str, ...] = ()
    probe_seconds: float = 0.0
    attempts: tuple[Attempt, ...] = ()

    def last(self, rung: str) -> Attempt | None:
        """The latest attempt at a rung."""
        return next((a for a in reversed(self.attempts) if a.rung == rung), None)

    def serving(self) -> Attempt | None:
        """The latest attempt, if it ended well."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].outcome in GOOD else None


class Verdicts:
    """The verdict files in a folder. What cannot be read or written is told in `notices`, never raised."""

    def __init__(self, folder: Path, boot: str | None = None) -> None:
        self._folder = folder / "verdicts"
        self._references = folder / "references"
        self._boot = boot if boot is not None else boot_id()
        self._locked: set[Path] = set()
        self.notices: list[str] = []

    def find(self, model: str, identity: str, engine: str, asked: EngineOptions) -> Record:
        """What is known; a record without attempts when nothing is."""
        fresh = Record(model=model, identity=identity, engine=engine, machine=machine_mark(), asked=asked)
        known = self._read(self._path(fresh))
        return known if known is not None and self._path(known) == self._path(fresh) else fresh

    def add(self, record: Record, rung: str, outcome: Outcome, detail: str = "") -> Record:
        """Write an attempt down, replacing the mark of the same attempt in progress."""
        attempts = list(record.attempts)
        if attempts and attempts[-1].outcome == "trying" and attempts[-1].pid == os.getpid():
            attempts.pop()
        attempts.append(
            Attempt(rung=rung, outcome=outcome, detail=detail, time=time.time(), boot=self._boot, pid=os.getpid())
        )
        record = msgspec.structs.replace(record, attempts=tuple(attempts[-_MAX_ATTEMPTS:]))
        self._write(self._path(record), record)
        return record

    def first_rung(self, record: Record, rungs: Sequence[Rung]) -> int:
        """The rung to begin with: the one that served last, else the first that is not known to be bad."""
        serving = record.serving()
        names = [rung.name for rung in rungs]
        if serving is not None and serving.rung in names and not self._outdated(record):
            return names.index(serving.rung)
        return next((i for i, name in enumerate(names) if not self._is_bad(record, name)), 0)

    def listing(self) -> list[Record]:
        """Every record of this machine, for `edgellama doctor`."""
        found = [self._read(path) for path in sorted(self._folder.glob("*.json"))]
        return [record for record in found if record is not None and record.machine == machine_mark()]

    def forget(self) -> int:
        """Delete every record and reference, so that each model is checked anew; returns how many records there were.

        Raises `OSError` when one cannot be deleted.
        """
        records = list(self._folder.glob("*.json"))
        for path in [*records, *self._references.glob("*.json")]:
            path.unlink(missing_ok=True)
        return len(records)

    def reference(self, mark: FileMark) -> Reference | None:
        """Reference logits computed here earlier."""
        try:
            return read_reference(self._reference_path(mark), mark)
        except InvalidFileError as error:
            self.notices.append(f"the cached reference is ignored: {error.message}")
            return None

    def keep_reference(self, reference: Reference) -> None:
        """Keep reference logits for later starts."""
        self._write(self._reference_path(reference.file), reference)

    def _outdated(self, record: Record) -> bool:
        """Whether an upper rung failed for a reason that may have passed, such as memory in use elsewhere."""
        passed = any(a.outcome == "failed" for a in record.attempts)
        return passed and time.time() - record.attempts[-1].time > _RETRY_AFTER_SECONDS

    def _is_bad(self, record: Record, rung: str) -> bool:
        last = record.last(rung)
        if last is None:
            return False
        if last.outcome != "trying":
            return last.outcome in BAD
        # Killed by its user or still at it in another process: no fault. Gone with the whole machine: one.
        return last.boot != self._boot

    def _path(self, record: Record) -> Path:
        key = digest(record.identity, record.engine, record.machine, record.asked)
        return self._folder / f"{key}.json"

    def _reference_path(self, mark: FileMark) -> Path:
        return self._references / f"{digest(mark.header_sha256, str(mark.size_bytes))}.json"

    def _read(self, path: Path) -> Record | None:
        try:
            with path.open("rb") as stream:
                data = stream.read(_MAX_BYTES + 1)
            check_schema(path, data, SCHEMA)
            return msgspec.json.decode(data, type=Record)
        except FileNotFoundError:
            return None
        except InvalidFileError as error:
            if "newer version" in error.message:
                self._locked.add(path)  # the newer version shall find its file again
            self.notices.append(f"a safety verdict is ignored: {error.message}")
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.notices.append(f"a safety verdict is ignored: {path}: {error}")
        return None

    def _write(self, path: Path, content: Record | Reference) -> None:
        if path in self._locked:
            return
        try:
            files.write_bytes(path, msgspec.json.encode(content))
        except (OSError, DiskFullError) as error:
            self._locked.add(path)
            self.notices.append(f"safety verdicts cannot be kept, so every start checks again: {error}")


def boot_id() -> str:
    """Names this start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        import psutil

        return f"{psutil.boot_time():.0f}"


def machine_mark() -> str:
    """Names this kind of machine: a home folder may be shared between several."""
    lines: list[str] = []
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as stream:
            wanted = {"model name", "flags", "Features", "CPU part", "Model"}
            seen: dict[str, str] = {}
            for line in stream:
                name, _, value = line.partition(":")
                if name.strip() in wanted:
                    seen.setdefault(name.strip(), value.strip())
            lines = [f"{name}={seen[name]}" for name in sorted(seen)]
    except OSError:
        lines = [platform.node()]
    text = "\n".join([platform.system(), platform.machine(), *lines])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

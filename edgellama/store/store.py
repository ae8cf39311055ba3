"""The store: models by name, path or source."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from edgellama import paths
from edgellama.errors import EdgellamaError, InvalidFileError, NotFoundError, UsageError
from edgellama.store import catalogue, found, records
from edgellama.store import sources as sources_
from edgellama.store.catalogue import Entry
from edgellama.store.found import Found
from edgellama.store.licences import Accept
from edgellama.store.names import closest, is_later_split, match, model_name, printable, split_names
from edgellama.store.places import require_file
from edgellama.store.progress import OnProgress, notice, silent
from edgellama.store.records import Stored

_TRUE = {"1", "true", "yes", "on"}
_TROUBLE = {"missing": "gone", "damaged": "damaged (its size is another)"}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model file that is here: `path` is its (first) file, `entry` its catalogue entry, `stored` its record."""

    path: Path
    name: str
    entry: Entry | None = None
    stored: Stored | None = None


def default_model() -> Entry:
    """The model that proves a machine."""
    return catalogue.default()


def is_offline(asked: bool | None = None) -> bool:
    """Whether the network may not be used: `asked` for, or by EDGELLAMA_OFFLINE."""
    return bool(asked) or os.environ.get("EDGELLAMA_OFFLINE", "").strip().lower() in _TRUE


class Store:
    """Models in `folder` (default: the models folder of this user) and in the index."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or paths.models_dir()

    def models(self) -> tuple[dict[str, Stored], list[str]]:
        """Models by name, and a sentence for each record that cannot be used."""
        return records.load_all(self.folder)

    def resolve(
        self,
        model: str,
        *,
        offline: bool | None = None,
        progress: OnProgress = silent,
        accept_licence: Accept | None = None,
    ) -> StoredModel:
        """The file behind a path, a name or a source, fetched first if it is not here.

        Names are matched exactly, then without regard to case: the store's, the catalogue's, then other programs'.
        A file written since it was last checked is hashed again. Raises `NotFoundError` with close names,
        `OfflineError`, `InvalidFileError` for a file that is not what was fetched, and what `pull` raises.
        """
        if sources_.is_source(model):
            return self._resolve_source(model, offline, progress, accept_licence)
        if self.is_path(model):
            return self._resolve_path(Path(model).expanduser(), progress)
        entry = catalogue.find(model)
        known, _ = self.models()
        key = _key(model, known, entry)
        if key is not None:
            stored = known[key]
            if stored.state != "here" and _can_fetch(stored) and not is_offline(offline):
                notice(progress, stored.name, f"its file is {_TROUBLE[stored.state]}; fetching it again")
                return self.pull(stored.record.entry, offline=offline, progress=progress, accept_licence=accept_licence)
            return self._sound(stored, progress)
        local = self.find(model)
        if local is not None:
            return local
        if entry is not None:
            return self.pull(entry.name, offline=offline, progress=progress, accept_licence=accept_licence)
        raise self._unknown(model)

    @staticmethod
    def is_path(model: str) -> bool:
        """Whether `model` is meant as a path: it looks like one, or is one. `ollama/NAME:TAG` and its kin are names."""
        if sources_.is_source(model):
            return False
        if model.lower().endswith(".gguf") and not model.startswith(found.PREFIXES):
            return True
        if model.startswith((".", "/", "~")) or (os.sep != "/" and os.sep in model):
            return True
        try:
            return os.path.lexists(model)  # a link that leads nowhere is meant as a path too
        except (OSError, ValueError):
            return False

    def find(self, name: str) -> StoredModel | None:
        """A model that is here, by name or source; never fetches, never hashes."""
        known, _ = self.models()
        if sources_.is_source(name):
            source = str(sources_.parse(name))
            stored = next((s for s in known.values() if s.record.source == source and not s.missing()), None)
            return self._from_stored(stored) if stored is not None else None
        entry = catalogue.find(name)
        key = _key(name, known, entry)
        if key is not None:
            return self._from_stored(known[key])
        if entry is not None:
            return None
        other = self._find_foreign(name)
        return StoredModel(other.path, other.name) if other is not None else None

    def pull(
        self,
        model: str,
        *,
        offline: bool | None = None,
        progress: OnProgress = silent,
        accept_licence: Accept | None = None,
        accepted_by: str = "prompt",
    ) -> StoredModel:
        """Fetch a model of the catalogue (by name) or of a source.

        One that is here already is hashed, and fetched anew if it is not what it was.
        """
        from edgellama.store.pull import Puller

        entry = None if sources_.is_source(model) else catalogue.find(model)
        source = sources_.parse(model) if sources_.is_source(model) else None
        if source is not None:
            entry = catalogue.by_source(str(source))
        elif entry is None:
            raise self._unknown(model)
        with Puller(self.folder, is_offline(offline), progress, accept_licence, accepted_by) as puller:
            stored = puller.pull_entry(entry) if entry is not None else puller.pull_source(_given(source))
        return self._from_stored(stored)

    def remove(self, name: str, *, on_progress: OnProgress = silent) -> Stored:
        """Forget a model; its files are deleted if the store made them, never if they are only referenced.

        One whose record is damaged goes too. Raises `NotFoundError`, and `UsageError` for a model of another program.
        """
        from edgellama.store.locking import locked

        known, _ = self.models()
        key = _key(name, known, catalogue.find(name))
        if key is None:
            torn = self._remove_torn(name, on_progress)
            if torn is not None:
                return torn
            other = self._find_foreign(name)
            if other is not None:
                raise UsageError(f"{other.name} belongs to {other.program}", f"remove it with {other.program} itself")
            raise self._unknown(name)
        stored = known[key]
        if stored.record.how == "unrecorded" and stored.folder == self.folder:
            _delete_files(stored)
            return stored
        with locked(self.folder, key, on_progress):
            _delete_leftovers(self.folder / key)
            if stored.record.how != "referenced":
                _delete_files(stored)
                (self.folder / key / records.RECORD).unlink(missing_ok=True)  # the index may have a newer one
            try:
                records.delete(stored)
            except OSError as error:
                raise _not_deleted(stored.name, error) from error
            with contextlib.suppress(OSError):  # only an empty folder goes
                (self.folder / key).rmdir()
        return stored

    def _remove_torn(self, name: str, on_progress: OnProgress) -> Stored | None:
        """Remove the model called `name` if its record cannot be read: the store's own folder of that name."""
        from edgellama.store.locking import locked

        torn = records.damaged(self.folder)
        entry = catalogue.find(name)
        key = match(name, torn) or (entry.name if entry is not None and entry.name in torn else None)
        if key is None or torn[key].parent.is_symlink():
            return None
        stored = records.without_record(torn[key], key)
        notice(on_progress, key, f"its record {torn[key]} is damaged; it is removed with the model files beside it")
        with locked(self.folder, key, on_progress):
            _delete_files(stored)
            _delete_leftovers(self.folder / key)
            try:
                records.delete(stored)
            except OSError as error:
                raise _not_deleted(key, error) from error
        return stored

    def _resolve_source(
        self, model: str, offline: bool | None, progress: OnProgress, accept_licence: Accept | None
    ) -> StoredModel:
        source = str(sources_.parse(model))
        known, _ = self.models()
        for stored in known.values():
            if stored.record.source == source and not stored.missing():
                return self._sound(stored, progress)
        return self.pull(model, offline=offline, progress=progress, accept_licence=accept_licence)

    def _resolve_path(self, path: Path, progress: OnProgress) -> StoredModel:
        path = path.absolute()
        if is_later_split(path.name):
            path = path.with_name(split_names(path.name)[0])
        require_file(path)
        known, _ = self.models()
        for stored in known.values():
            if path in stored.paths:
                try:
                    return self._sound(stored, progress)
                except InvalidFileError:
                    if stored.record.how != "referenced":
                        raise
                    notice(progress, path.name, f"it is another file than the one imported as {stored.name}")
                    break
        return StoredModel(path, model_name(path.name), catalogue.by_file(path.name))

    def _sound(self, stored: Stored, progress: OnProgress) -> StoredModel:
        """The model, its bytes compared with their SHA-256 if they were written since that was last done."""
        if not stored.missing() and stored.changed():
            from edgellama.store import verify

            stored, differ = verify.check_changed(stored, progress)
            if differ:
                raise _other_bytes(stored, differ[0])
        return self._from_stored(stored)

    def _from_stored(self, stored: Stored) -> StoredModel:
        missing = stored.missing()
        if missing:
            raise _damaged(stored, missing[0])
        entry = catalogue.load().get(stored.record.entry)
        return StoredModel(stored.paths[0], stored.name, entry, stored)

    def _find_foreign(self, name: str) -> Found | None:
        every = found.find_all()
        key = match(name, [model.name for model in every])
        if key is not None:
            return next(model for model in every if model.name == key)
        short = [model for model in every if model.short_name.casefold() == name.casefold()]
        short += [
            model for model in every if ":" not in name and model.short_name.casefold() == f"{name}:latest".casefold()
        ]
        if len({model.path for model in short}) > 1:
            raise UsageError(
                f"{printable(name)} is ambiguous", "use one of: " + ", ".join(model.name for model in short)
            )
        return short[0] if short else None

    def _unknown(self, name: str) -> NotFoundError:
        known, _ = self.models()
        every = [*known, *catalogue.names(), *(model.name for model in found.find_all())]
        near = closest(name, every)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        return NotFoundError(
            f"there is no model {printable(name)!r}",
            f"{hint}`edgellama list --found` names the models here, `edgellama recommend` those that can be fetched",
        )


def _key(name: str, known: dict[str, Stored], entry: Entry | None) -> str | None:
    """The stored model of that name, else one that is the catalogue's model under another name."""
    key = match(name, known) or (entry.name if entry is not None and entry.name in known else None)
    if key is not None or entry is None:
        return key
    return next((k for k, stored in known.items() if stored.record.entry == entry.name and not stored.missing()), None)


def _can_fetch(stored: Stored) -> bool:
    """Whether the catalogue says where a model that the store fetched comes from."""
    entry = catalogue.load().get(stored.record.entry)
    return stored.record.how == "pulled" and entry is not None and bool(entry.sources)


def _given(source: sources_.Source | None) -> sources_.Source:
    if source is None:
        raise UsageError("no source given")
    return source


def _damaged(stored: Stored, path: Path) -> EdgellamaError:
    if not path.exists():
        advice = _again(stored)
        if stored.record.how == "referenced":
            advice = f"connect the disk it lies on, or {advice}"
        return NotFoundError(f"{stored.name}: its file {path} is gone", advice)
    return InvalidFileError(
        f"{stored.name}: {path} is damaged or was replaced: its size is {path.stat().st_size:,} bytes, "
        "it was another when it was added",
        _again(stored),
    )


def _other_bytes(stored: Stored, path: Path) -> InvalidFileError:
    """The error for a file of the right size with other bytes than its SHA-256 stands for."""
    since = {"pulled": "fetched", "copied": "copied"}.get(stored.record.how, "added")
    return InvalidFileError(
        f"{stored.name}: {path} was damaged or replaced since it was {since}: its SHA-256 is another", _again(stored)
    )


def _again(stored: Stored) -> str:
    """How to get a sound file."""
    if stored.record.how == "pulled":
        return f"`edgellama pull {stored.record.entry or stored.record.source}` fetches it again"
    return f"`edgellama remove {stored.name}`, then import it again"


def _delete_files(stored: Stored) -> None:
    for path in stored.paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _not_deleted(str(path), error) from error


def _delete_leftovers(folder: Path) -> None:
    for pattern in ("*.part", "*.part.json", "*.whl"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _not_deleted(what: str, error: OSError) -> EdgellamaError:
    return EdgellamaError(
        f"{what} could not be deleted ({error.strerror or error})",
        "stop the programs that use it, and check that the folder may be written",
    )

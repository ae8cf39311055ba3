"""The store: models by name, path or source."""

from __future__ import annotations

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
from edgellama.store.progress import OnProgress, silent
from edgellama.store.records import Stored

_TRUE = {"1", "true", "yes", "on"}


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
        Raises `NotFoundError` with close names, `OfflineError`, and what `pull` raises.
        """
        if sources_.is_source(model):
            return self._resolve_source(model, offline, progress, accept_licence)
        if self.is_path(model):
            return self._resolve_path(Path(model).expanduser())
        local = self.find(model)
        if local is not None:
            return local
        entry = catalogue.find(model)
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
            return Path(model).exists()
        except (OSError, ValueError):
            return False

    def find(self, name: str) -> StoredModel | None:
        """A model that is here, by name; never fetches."""
        known, _ = self.models()
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
        """Fetch a model of the catalogue (by name) or of a source; one that is here already is left alone."""
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

        Raises `NotFoundError`, and `UsageError` for a model of another program.
        """
        from edgellama.store.locking import locked

        known, _ = self.models()
        key = _key(name, known, catalogue.find(name))
        if key is None:
            other = self._find_foreign(name)
            if other is not None:
                raise UsageError(f"{other.name} belongs to {other.program}", f"remove it with {other.program} itself")
            raise self._unknown(name)
        stored = known[key]
        if stored.record.how == "unrecorded" and stored.folder == self.folder:
            _delete_files(stored)
            return stored
        with locked(self.folder, key, on_progress):
            if stored.record.how != "referenced":
                _delete_files(stored)
            _delete_leftovers(self.folder / key)
            try:
                records.delete(stored)
            except OSError as error:
                raise _not_deleted(stored.name, error) from error
        return stored

    def _resolve_source(
        self, model: str, offline: bool | None, progress: OnProgress, accept_licence: Accept | None
    ) -> StoredModel:
        source = str(sources_.parse(model))
        known, _ = self.models()
        for stored in known.values():
            if stored.record.source == source and not stored.missing():
                return self._from_stored(stored)
        return self.pull(model, offline=offline, progress=progress, accept_licence=accept_licence)

    def _resolve_path(self, path: Path) -> StoredModel:
        path = path.absolute()
        if is_later_split(path.name):
            path = path.with_name(split_names(path.name)[0])
        if path.is_dir():
            raise UsageError(
                f"{path} is a folder", "give the .gguf file in it; `edgellama import FOLDER` adds all of them"
            )
        if not path.exists():
            siblings = _models_in(path.parent)
            near = closest(path.name, siblings) or siblings[:3]
            raise NotFoundError(f"{path} does not exist", f"there: {', '.join(near)}" if near else "")
        if not path.is_file():
            raise UsageError(f"{path} is not a plain file")
        known, _ = self.models()
        for stored in known.values():
            if path in stored.paths:
                return self._from_stored(stored)
        return StoredModel(path, model_name(path.name), catalogue.by_file(path.name))

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


def _given(source: sources_.Source | None) -> sources_.Source:
    if source is None:
        raise UsageError("no source given")
    return source


def _models_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.lower().endswith(".gguf"))  # noqa: PTH208
    except OSError:
        return []


def _damaged(stored: Stored, path: Path) -> EdgellamaError:
    how = stored.record.how
    if not path.exists():
        if how == "referenced":
            advice = (
                f"connect the disk it lies on, or `edgellama remove {stored.name}` and import it from its new place"
            )
        else:
            advice = f"`edgellama pull {stored.record.entry or stored.record.source}` fetches it again"
        return NotFoundError(f"{stored.name}: its file {path} is gone", advice)
    advice = "import it again" if how != "pulled" else "fetch it again"
    return InvalidFileError(
        f"{stored.name}: the size of {path} is {path.stat().st_size:,} bytes; it was another when it was added",
        f"it is damaged or was replaced: `edgellama remove {stored.name}`, then {advice}",
    )


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

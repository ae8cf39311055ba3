"""The catalogue: one TOML file per model, read from the checkout's `models/` or from the installed package."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

import msgspec

from edgellama.errors import InvalidFileError
from edgellama.store.names import match

_PACKAGED = Path(__file__).parent / "catalogue"
_CHECKOUT = Path(__file__).parents[2] / "models"


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. Sizes are in bytes; 0 and "" mean unknown."""

    name: str
    title: str
    sources: tuple[str, ...]
    """Tried in this order."""
    file: str
    sha256: str
    licence: str
    """An identifier of `licences.TERMS`."""
    parameters: int
    context_tokens: int
    """What the model was trained for."""
    languages: tuple[str, ...]
    """ISO 639-1 codes, best supported first."""
    family: str
    """The chat template's family: chatml, llama3, gemma, phi3 …"""
    layers: int
    kv_heads: int
    head_size: int
    """Elements of one key (and one value) of one head."""
    min_memory_bytes: int
    """Memory a machine should have available for a 4,096-token chat."""
    size_bytes: int = 0
    approximate_bytes: int = 0
    """For planning where the exact size is not known."""
    quantization: str = ""
    aliases: tuple[str, ...] = ()
    default: bool = False
    sampling: dict[str, float | int] = {}
    """Defaults by the names of `sampling.options.SamplingOptions`."""
    rank: int = 0
    """Quality among the catalogue's models, higher is better; for `recommend`."""
    notes: str = ""

    @property
    def weight_bytes(self) -> int:
        """Size of the file, exact or approximate."""
        return self.size_bytes or self.approximate_bytes

    def kv_bytes(self, context_tokens: int) -> int:
        """Size of an F16 key-value cache: 2 (key and value) x 2 bytes x layers x heads x head size per token."""
        return 4 * self.layers * self.kv_heads * self.head_size * context_tokens


def folder() -> Path:
    """Where the catalogue lies."""
    return _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT


@functools.cache
def load(directory: Path | None = None) -> dict[str, Entry]:
    """All entries by name, in the order of their size; raises `InvalidFileError` for a file that is not an entry."""
    entries = [_read(path) for path in sorted((directory or folder()).glob("*.toml"))]
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: (entry.weight_bytes, entry.name))}


def _read(path: Path) -> Entry:
    try:
        with path.open("rb") as stream:
            return msgspec.convert(tomllib.load(stream), Entry)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidFileError(f"{path}: {error}") from error


def default() -> Entry:
    """The model that proves a machine: small, fetched without being asked."""
    return next(entry for entry in load().values() if entry.default)


def by_source(source: str) -> Entry | None:
    """The entry that lists `source`."""
    return next((entry for entry in load().values() if source in entry.sources), None)


def by_file(file_name: str, sha256: str = "") -> Entry | None:
    """The entry of a file that came by another way: same hash where known, else the same name."""
    for entry in load().values():
        if sha256 and entry.sha256 == sha256:
            return entry
    same = (entry for entry in load().values() if entry.file.lower() == file_name.lower() and not entry.sha256)
    return next(same, None)


def find(name: str) -> Entry | None:
    """The entry of a name or alias, without regard to case where that is clear."""
    known = names()
    key = match(name, known)
    return load()[known[key]] if key is not None else None


def names() -> dict[str, str]:
    """Every name and alias, to the entry's name."""
    known = {name: name for name in load()}
    for entry in load().values():
        known.update({alias: entry.name for alias in entry.aliases if alias not in known})
    return known

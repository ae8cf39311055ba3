"""Which models of the catalogue suit a machine."""

from __future__ import annotations

from dataclasses import dataclass

from edgellama.store import catalogue
from edgellama.store.catalogue import Entry

CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One model: what it needs for a chat of `CONTEXT_TOKENS`, and whether that is there."""

    entry: Entry
    weight_bytes: int
    kv_bytes: int
    need_bytes: int
    fits: bool
    fits_disk: bool


def recommend(available_bytes: int, free_disk_bytes: int | None = None, language: str = "") -> list[Recommendation]:
    """All models that speak `language` (ISO 639-1, "" for any): those that fit first, the best of them first.

    The proving model comes last, whatever fits.
    """
    wanted = language.strip().lower().replace("_", "-").split("-")[0]
    entries = [entry for entry in catalogue.load().values() if not wanted or wanted in entry.languages]
    judged = [_judge(entry, available_bytes, free_disk_bytes) for entry in entries]
    return sorted(judged, key=lambda r: (not (r.fits and r.fits_disk), r.entry.default, _order(r), r.entry.name))


def _order(recommendation: Recommendation) -> int:
    """The best first among those that fit, the smallest first among the others."""
    suits = recommendation.fits and recommendation.fits_disk
    return -recommendation.entry.rank if suits else recommendation.need_bytes


def _judge(entry: Entry, available_bytes: int, free_disk_bytes: int | None) -> Recommendation:
    kv_bytes = entry.kv_bytes(CONTEXT_TOKENS)
    return Recommendation(
        entry=entry,
        weight_bytes=entry.weight_bytes,
        kv_bytes=kv_bytes,
        need_bytes=max(entry.min_memory_bytes, entry.weight_bytes + kv_bytes),
        fits=max(entry.min_memory_bytes, entry.weight_bytes + kv_bytes) <= available_bytes,
        fits_disk=free_disk_bytes is None or entry.weight_bytes < free_disk_bytes,
    )


def languages() -> list[str]:
    """Every language some model of the catalogue speaks."""
    return sorted({code for entry in catalogue.load().values() for code in entry.languages})

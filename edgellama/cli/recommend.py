"""`edgellama recommend`: the catalogue's models that fit this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.store_output import size_text, table
from edgellama.errors import UsageError

if TYPE_CHECKING:
    from edgellama.store.recommend import Recommendation


@declare(name="recommend", example="edgellama recommend --lang zh")
@click.option(
    "--lang", "language", default="", metavar="CODE", help="Only models that speak this language: en, de, zh …"
)
@click.option("--all", "everything", is_flag=True, help="Also the models that do not fit.")
def command(out: Output, language: str, everything: bool) -> None:
    """Name the catalogue's models that fit this machine, the best first.

    A model fits when its file, a key-value cache for 4,096 tokens and its buffers fit into the memory that is free now,
    and its file onto the disk.
    """
    from edgellama import files
    from edgellama.monitor import memory
    from edgellama.store import Store, recommend

    if language and not recommend.recommend(0, None, language):
        raise UsageError(
            f"no model of the catalogue speaks {language!r}", f"known languages: {', '.join(recommend.languages())}"
        )
    store = Store()
    available, free = memory.available_bytes(), files.free_bytes(store.folder)
    judged = recommend.recommend(available, free, language)
    here, _ = store.models()
    if out.json:
        models = [_json(r, r.entry.name in here) for r in judged if everything or (r.fits and r.fits_disk)]
        out.object({"available_bytes": available, "free_disk_bytes": free, "models": models})
        return
    shown = [r for r in judged if everything or (r.fits and r.fits_disk)]
    out.notice(f"{size_text(available)} of memory and {size_text(free)} of disk are free")
    if not shown:
        smallest = judged[0]
        out.notice(
            f"none fits; the smallest, {smallest.entry.name}, needs {size_text(smallest.need_bytes)} of memory "
            f"and {size_text(smallest.weight_bytes)} of disk"
        )
        return
    rows = [(r.entry.name, *_columns(r), "here" if r.entry.name in here else "") for r in shown]
    table(out, ("NAME", "FILE", "MEMORY", "CONTEXT", "LANGUAGES", "LICENCE", "FITS", ""), rows)
    out.notice(f"`edgellama pull {shown[0].entry.name}` fetches the first")


def _columns(recommendation: Recommendation) -> tuple[str, ...]:
    entry = recommendation.entry
    spoken = " ".join(entry.languages[:5]) + (" …" if len(entry.languages) > 5 else "")
    fits = (
        "yes"
        if recommendation.fits and recommendation.fits_disk
        else "no memory"
        if recommendation.fits_disk
        else "no disk"
    )
    return (
        size_text(recommendation.weight_bytes),
        size_text(recommendation.need_bytes),
        f"{entry.context_tokens:,}",
        spoken,
        entry.licence,
        fits,
    )


def _json(recommendation: Recommendation, here: bool) -> dict[str, object]:
    entry = recommendation.entry
    return {
        "name": entry.name,
        "title": entry.title,
        "fits": recommendation.fits and recommendation.fits_disk,
        "need_bytes": recommendation.need_bytes,
        "weight_bytes": recommendation.weight_bytes,
        "kv_bytes": recommendation.kv_bytes,
        "parameters": entry.parameters,
        "context_tokens": entry.context_tokens,
        "languages": list(entry.languages),
        "licence": entry.licence,
        "here": here,
        "notes": entry.notes,
    }

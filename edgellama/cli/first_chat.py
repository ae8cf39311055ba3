"""What the first chat with the proving model says once."""

from __future__ import annotations

import contextlib

from edgellama import files, paths
from edgellama.cli.common import Output
from edgellama.errors import EdgellamaError

_SHOWN = 3


def tell_once(out: Output, model: str, language: str | None) -> None:
    """Say that the model only proves the machine, and which three would be better here; only the first time."""
    mark = paths.state_dir() / "proving-model-told"
    if mark.exists():
        return
    better = _better(language or "")
    out.notice(f"{model} only proves that this machine works: it is too small to know much.")
    if better:
        out.notice("These fit here and answer far better:")
        for line in better:
            out.notice(f"  {line}")
        out.notice("`edgellama pull NAME` fetches one, `edgellama recommend` shows all.")
    with contextlib.suppress(OSError, EdgellamaError):  # on a read-only disk it is said again
        files.write_text(mark, "")


def _better(language: str) -> list[str]:
    from edgellama.cli.store_output import size_text
    from edgellama.monitor import memory
    from edgellama.store import Store, recommend

    available, free = memory.available_bytes(), files.free_bytes(Store().folder)
    judged = recommend.recommend(available, free, language) or recommend.recommend(available, free)
    good = [r for r in judged if r.fits and r.fits_disk and not r.entry.default][:_SHOWN]
    return [f"{r.entry.name}  ({size_text(r.weight_bytes)}, {r.entry.title})" for r in good]

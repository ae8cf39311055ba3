"""`edgellama remove`: take models out of the store."""

from __future__ import annotations

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.store_output import StoreProgress, size_text, stored_json


@declare(name="remove", example="edgellama remove llama-3.2-1b-instruct")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
def command(out: Output, models: tuple[str, ...]) -> None:
    """Remove models from the store.

    Files that the store fetched or copied are deleted; files that are only referenced stay where they are.
    """
    from edgellama.store import Store

    for name in models:
        with StoreProgress(out) as progress:
            stored = Store().remove(name, on_progress=progress)
        kept = stored.record.how == "referenced"
        if out.json:
            out.object({**stored_json(stored), "missing": [], "files_deleted": not kept})
        elif kept:
            out.line(f"{stored.name} forgotten; its file stays at {stored.paths[0]}")
        else:
            out.line(f"{stored.name} removed, {size_text(stored.size_bytes)} freed")

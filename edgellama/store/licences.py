"""Licences of models: what their terms ask, and who accepted them when.

Acceptances lie in `licences.json` in the configuration folder; an administrator may put that file there beforehand.
`EDGELLAMA_ACCEPT_LICENCE` (identifiers separated by commas, or `all`) accepts without asking.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgellama import files, paths
from edgellama.errors import EdgellamaError, InvalidFileError, LicenceError

_SCHEMA = 1
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Terms:
    """One licence. `version` is the date the licence itself carries; `points` are what a user must know."""

    id: str
    title: str
    url: str
    version: str = ""
    asks: bool = False
    """Whether it has to be accepted before use."""
    policy_url: str = ""
    attribution: str = ""
    points: tuple[str, ...] = ()

    def text(self) -> str:
        """The terms as shown before they are accepted."""
        lines = [f"{self.title}" + (f", version of {self.version}" if self.version else ""), f"  full text: {self.url}"]
        if self.policy_url:
            lines.append(f"  acceptable use: {self.policy_url}")
        lines += [f"  - {point}" for point in self.points]
        return "\n".join(lines)


def _llama(number: str, version: str) -> Terms:
    folder = "https://www.llama.com/llama" + number.replace(".", "_")
    return Terms(
        id=f"llama{number}",
        title=f"Llama {number} Community License Agreement",
        url=f"{folder}/license/",
        version=version,
        asks=True,
        policy_url=f"{folder}/use-policy/",
        attribution=f"Built with Llama. Llama {number} is licensed under the Llama {number} Community License, "
        "Copyright © Meta Platforms, Inc. All Rights Reserved.",
        points=(
            'a product or service that passes the model on shows "Built with Llama"',
            'a model trained or improved with it, or with its output, has a name that begins with "Llama"',
            "its use follows the acceptable use policy",
            "whoever had more than 700 million monthly users when it was released needs a licence from Meta",
        ),
    )


_ALL = (
    Terms("apache-2.0", "Apache License 2.0", "https://www.apache.org/licenses/LICENSE-2.0"),
    Terms("mit", "MIT License", "https://opensource.org/license/mit"),
    _llama("3.1", "2024-07-23"),
    _llama("3.2", "2024-09-25"),
    Terms(
        id="gemma",
        title="Gemma Terms of Use",
        url="https://ai.google.dev/gemma/terms",
        version="2026-04-01",
        asks=True,
        policy_url="https://ai.google.dev/gemma/prohibited_use_policy",
        attribution="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        points=(
            "its use follows the prohibited use policy and the law",
            "whoever passes it or a derivative on passes on these terms, marks changed files and adds the notice",
        ),
    ),
    Terms(
        id="qwen-research",
        title="Qwen Research License Agreement",
        url="https://huggingface.co/Qwen/Qwen2.5-3B-Instruct/blob/main/LICENSE",
        version="2024-09-19",
        asks=True,
        attribution="Built with Qwen",
        points=(
            "research and other non-commercial use only; commercial use needs a licence from Alibaba Cloud",
            'a model made or improved with it, if passed on, shows "Built with Qwen" or "Improved using Qwen"',
        ),
    ),
)
TERMS = {terms.id: terms for terms in _ALL}

Accept = Callable[[Terms, str], bool]
"""Asks the user: the terms and the model's name; True when they are accepted."""


def known(licence: str) -> Terms | None:
    """The terms behind a licence identifier as catalogues and GGUF files write it."""
    return TERMS.get(licence.strip().lower().replace("_", "-"))


_GUESSES = (
    (re.compile(r"llama[-_.]?3[-_.]1(?![0-9])"), "llama3.1"),
    (re.compile(r"llama[-_.]?3[-_.]2(?![0-9])"), "llama3.2"),
    (re.compile(r"gemma[-_.]?[123](?![0-9])"), "gemma"),
)


def guess(source: str) -> Terms | None:
    """The terms of a model that is not in the catalogue, from the names in its source."""
    text = source.lower()
    return next((TERMS[licence] for pattern, licence in _GUESSES if pattern.search(text)), None)


class Acceptance(msgspec.Struct, kw_only=True):
    """Who accepted what. `at` is UTC in ISO form; `by` is "prompt", "--accept-licence", "environment" or "file"."""

    licence: str
    version: str
    at: str
    by: str = "file"
    model: str = ""


class _File(msgspec.Struct, kw_only=True):
    schema: int = _SCHEMA
    accepted: list[Acceptance] = []


def acceptances_file() -> Path:
    """Where acceptances are kept."""
    return paths.config_dir() / "licences.json"


def acceptances() -> list[Acceptance]:
    """All acceptances; raises `InvalidFileError` when their file cannot be read."""
    path = acceptances_file()
    try:
        with path.open("rb") as stream:
            content = msgspec.json.decode(stream.read(_MAX_FILE_BYTES), type=_File)
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidFileError(
            f"{path}: {error}", "repair the file, or delete it and accept the licences again"
        ) from error
    if content.schema > _SCHEMA:
        raise InvalidFileError(f"{path}: written by a newer edgellama (schema {content.schema})", "update edgellama")
    return content.accepted


def accepted(terms: Terms) -> Acceptance | None:
    """The acceptance of this version of `terms`, if there is one."""
    return next((a for a in acceptances() if (a.licence, a.version) == (terms.id, terms.version)), None)


def ensure(terms: Terms | None, model: str, accept: Accept | None, *, by: str = "prompt") -> str:
    """Have `terms` accepted for `model` if they ask for it; returns a sentence about what could not be kept, or "".

    Raises `LicenceError` when nobody accepts.
    """
    if terms is None or not terms.asks or accepted(terms) is not None:
        return ""
    named = {name.strip().lower() for name in os.environ.get("EDGELLAMA_ACCEPT_LICENCE", "").split(",")}
    if named & {terms.id, "all"}:
        by = "environment"
    elif accept is None or not accept(terms, model):
        raise LicenceError(
            f"{model} comes under the {terms.title}, which has not been accepted",
            f"read {terms.url}, then run `edgellama pull {model} --accept-licence` "
            f"(or set EDGELLAMA_ACCEPT_LICENCE={terms.id})",
        )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return _remember(Acceptance(licence=terms.id, version=terms.version, at=now, by=by, model=model))


def _remember(acceptance: Acceptance) -> str:
    import filelock

    path = acceptances_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            content = _File(accepted=[*acceptances(), acceptance])
            files.write_bytes(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except (OSError, EdgellamaError) as error:
        return f"the licence is accepted for now, but {path} could not be written ({error}); it will be asked again"
    return ""

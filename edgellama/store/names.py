"""Names of models and files: what is safe, what is meant, what is close."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

from edgellama.errors import InvalidFileError, UsageError

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<index>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE)
_FORBIDDEN = set('/\\<>:"|?*')
_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{digit}" for port in ("com", "lpt") for digit in range(1, 10)}
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_MAX_NAME_BYTES = 200
_MAX_SPLITS = 512


def printable(text: str, limit: int = 200) -> str:
    """`text` from a manifest, header or server, safe to show: no control or direction characters, bounded length."""
    clean = "".join("\ufffd" if unicodedata.category(letter) in _INVISIBLE else letter for letter in text[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def is_safe_file_name(name: str) -> bool:
    """Whether `name` is one plain file name on every platform: no folder, device, control character or trailing dot."""
    return (
        0 < len(name.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES
        and name.strip(" .") == name.rstrip(" .")
        and name == name.rstrip(" .")
        and not _FORBIDDEN & set(name)
        and not any(unicodedata.category(letter) in _INVISIBLE for letter in name)
        and name.split(".", maxsplit=1)[0].lower() not in _DEVICES
    )


def safe_file_name(name: str, what: str) -> str:
    """`name`, or `InvalidFileError` that says which name of `what` is not one plain file name."""
    if not is_safe_file_name(name):
        raise InvalidFileError(
            f"{printable(what, 500)}: the file name {printable(name)!r} is not safe to use",
            "a file name may hold no folder, no '..' and no control character",
        )
    return name


def split_names(file_name: str) -> tuple[str, ...]:
    """All file names of a split model, or `file_name` alone when it is not one of a split."""
    found = _SPLIT.fullmatch(file_name)
    if found is None:
        return (file_name,)
    count = int(found["count"])
    if not 1 <= count <= _MAX_SPLITS or not 1 <= int(found["index"]) <= count:
        raise UsageError(f"{printable(file_name)}: part {found['index']} of {found['count']} makes no sense")
    return tuple(f"{found['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1))


def is_later_split(file_name: str) -> bool:
    """Whether `file_name` is a split, and not the first."""
    found = _SPLIT.fullmatch(file_name)
    return found is not None and int(found["index"]) != 1


def model_name(file_name: str) -> str:
    """The name a model gets from its file: lower case, no suffix, no split number."""
    found = _SPLIT.fullmatch(file_name)
    stem = found["stem"] if found else re.sub(r"\.gguf$", "", file_name, flags=re.IGNORECASE)
    name = unicodedata.normalize("NFC", re.sub(r"\s+", "-", stem.strip())).lower()
    return safe_file_name(name.strip(".") or "model", file_name)


def match(wanted: str, names: Iterable[str]) -> str | None:
    """The name that equals `wanted`, else the only one that equals it without regard to case, else None."""
    known = list(names)
    if wanted in known:
        return wanted
    folded = [name for name in known if name.casefold() == wanted.casefold()]
    return folded[0] if len(folded) == 1 else None


def closest(wanted: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` names that a person may have meant by `wanted`, best first."""
    known = {name.casefold(): name for name in names}
    want = wanted.casefold()
    found = difflib.get_close_matches(want, known, n=count, cutoff=0.55)
    found += [name for name in known if len(want) >= 3 and (want in name or name in want) and name not in found]
    return [known[name] for name in found[:count]]

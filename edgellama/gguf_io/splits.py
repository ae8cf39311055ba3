"""Models in several files: NAME-00001-of-0000N.gguf, complete, consistent and in order."""

from __future__ import annotations

import os
import re

from edgellama.errors import GGUFError
from edgellama.gguf_io.parse import Options, RawFile, parse
from edgellama.gguf_io.types import MAX_SPLITS, ValueType

NUMBER = "split.no"
COUNT = "split.count"
TENSORS = "split.tensors.count"
_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_ADVICE = "fetch all parts of the model into one folder, with their names unchanged"


def split_name(stem: str, index: int, count: int) -> str:
    """The file name of part `index` (from 0) of `count`."""
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


def parse_all(path: str, options: Options) -> list[RawFile]:
    """Parse `path` and, when it is one part of several, all parts in order. Any part may be named."""
    raw = parse(path, options)
    count = _declared(raw, COUNT, 1)
    if count <= 1:
        _refuse_lonely_part(raw, path)
        return [raw]
    if count > MAX_SPLITS:
        raise _error(raw, COUNT, count, f"at most {MAX_SPLITS}")
    number = _declared(raw, NUMBER, -1)
    match = _NAME.match(path)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        expected = split_name("NAME", max(number, 0), count)
        raise _error(raw, COUNT, f"part {number + 1} of {count} in a file of another name", f"the name {expected}")
    files: list[RawFile] = []
    for index in range(count):
        part = split_name(match["stem"], index, count)
        files.append(raw if index == number else _parse_part(raw, part, options))
    _check_parts(files)
    return files


def _base(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119  (plain strings keep start-up free of pathlib)


def _error(raw: RawFile, key: str, found: object, expected: object) -> GGUFError:
    return GGUFError(raw.path, raw.offsets.get(key, 0), key, str(found), str(expected), _ADVICE)


def _declared(raw: RawFile, key: str, default: int) -> int:
    value = raw.metadata.get(key, default)
    if key in raw.metadata:
        # llama.cpp aborts on any other type.
        expected = ValueType.INT32 if key == TENSORS else ValueType.UINT16
        kind = raw.value_types[key][0]
        if kind is not expected or not isinstance(value, int):
            raise _error(raw, key, f"type {kind.name.lower()}", f"type {expected.name.lower()}")
    return value if isinstance(value, int) else default


def _refuse_lonely_part(raw: RawFile, path: str) -> None:
    match = _NAME.match(path)
    if match and int(match["count"]) > 1 and COUNT not in raw.metadata:
        raw.notices.append(
            f"the name says part {int(match['number'])} of {int(match['count'])}, the file says it is whole"
        )


def _parse_part(named: RawFile, path: str, options: Options) -> RawFile:
    if not os.path.exists(path):  # noqa: PTH110
        raise _error(named, COUNT, f"no file {_base(path)}", f"{named.metadata[COUNT]} parts in its folder")
    return parse(path, options)


def _check_parts(files: list[RawFile]) -> None:
    first = files[0]
    architecture = first.metadata.get("general.architecture")
    names: dict[str, str] = {}
    for index, raw in enumerate(files):
        if NUMBER not in raw.metadata or _declared(raw, NUMBER, -1) != index:
            raise _error(raw, NUMBER, raw.metadata.get(NUMBER, "no such key"), index)
        if _declared(raw, COUNT, 1) != len(files):
            raise _error(raw, COUNT, raw.metadata.get(COUNT, "no such key"), len(files))
        if raw.metadata.get("general.architecture", architecture) != architecture:
            raise _error(raw, "general.architecture", raw.metadata["general.architecture"], architecture)
        for tensor in raw.tensors:
            if tensor.name in names:
                raise _error(raw, f"tensor {tensor.name!r}", f"also in {names[tensor.name]}", "each tensor once")
            names[tensor.name] = _base(raw.path)
    for raw in files:
        total = _declared(raw, TENSORS, -1)
        if total != len(names) and (raw is first or TENSORS in raw.metadata):
            found = f"{len(names):,} tensors in all parts"
            raise _error(raw, TENSORS, found, f"{total:,}" if total >= 0 else "the key")

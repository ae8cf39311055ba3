"""Importance matrices: reading `.gguf` and legacy `.dat` files, checking them, and handing out a tensor's weights.

An entry holds the mean square of each input of a weight, per expert. Source of the formats: common/imatrix-loader.cpp
and tools/imatrix of the pinned llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import InvalidFileError, NotFoundError, UsageError
from edgellama.gguf_io import GGMLType, read

RUN = 16
"""The smallest sub-block of any type: a run of zeros this long would leave a sub-block without weights."""


@dataclass(slots=True)
class Imatrix:
    """Entries by tensor name: float32[experts, inputs]. `warnings` says what was repaired."""

    path: str
    entries: dict[str, NDArray[np.float32]]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    warnings: list[str] = field(default_factory=list)
    holes: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Where inputs were never active and got a neutral weight instead, bool[experts, inputs]."""

    def filtered(self, include: Iterable[str], exclude: Iterable[str]) -> Imatrix:
        """Entries whose names contain one of `include` (if any) and none of `exclude`."""
        wanted, unwanted = tuple(include), tuple(exclude)
        if wanted and unwanted:
            raise UsageError("--include-weights and --exclude-weights cannot be combined")
        kept = {
            name: values
            for name, values in self.entries.items()
            if (not wanted or any(part in name for part in wanted)) and not any(part in name for part in unwanted)
        }
        return Imatrix(self.path, kept, self.datasets, self.chunks, self.warnings, self.holes)

    def true_weights(self, name: str) -> NDArray[np.float32] | None:
        """An entry as it was measured, zeros included: for judging errors, not for quantizing."""
        values, holes = self.entries.get(name), self.holes.get(name)
        return values if values is None or holes is None else np.where(holes, np.float32(0), values)


@dataclass(slots=True)
class Sums:
    """A file as it is: squares of the inputs summed over tokens, and how many tokens they were."""

    entries: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
    """float32[experts, inputs] and float32[experts] by tensor name."""
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0
    """Tokens per chunk; 0 in legacy files, whose counts are chunks."""


def read_sums(path: str | Path) -> Sums:
    """Read an importance matrix without averaging. Raises NotFoundError, InvalidFileError."""
    file = Path(path)
    if not file.is_file():
        raise NotFoundError(f"{file}: no such importance matrix")
    with file.open("rb") as stream:
        is_gguf = stream.read(4) == b"GGUF"
    sums = _read_gguf(file) if is_gguf else _read_legacy(file)
    if not sums.entries:
        raise InvalidFileError(f"{file}: the importance matrix has no entries")
    return sums


def load(path: str | Path) -> Imatrix:
    """Read, check and average an importance matrix. Raises NotFoundError, InvalidFileError."""
    file, sums = Path(path), read_sums(path)
    matrix, unseen = Imatrix(str(file), {}, sums.datasets, sums.chunks), 0
    for name, (table, counts) in sums.entries.items():
        seen = counts > 0
        unseen += int((~seen).sum())
        matrix.entries[name] = np.where(seen[:, None], table / np.where(seen, counts, 1)[:, None], np.float32(1))
    if unseen:
        matrix.warnings.append(f"{unseen} experts were never active: their inputs weigh the same")
    for name, values in matrix.entries.items():
        if not np.isfinite(values).all():
            where = np.argwhere(~np.isfinite(values))[0]
            raise InvalidFileError(
                f"{file}: {name}: value {values[tuple(where)]} of input {where[1]}, expert {where[0]}",
                "collect the importance matrix again, with a model and a text that give finite activations",
            )
        _fill_holes(matrix, name, values)
    if matrix.holes:
        worst = max(matrix.holes, key=lambda name: float(matrix.holes[name].mean()))
        matrix.warnings.append(
            f"{len(matrix.holes)} of {len(matrix.entries)} weights have runs of {RUN} inputs that were never active "
            f"(most in {worst}: {float(matrix.holes[worst].mean()):.0%}); they get a neutral weight"
        )
    return matrix


def _fill_holes(matrix: Imatrix, name: str, values: NDArray[np.float32]) -> None:
    """Give runs of zeros a neutral weight in place: ggml would silently quantize such sub-blocks to zero."""
    if values.shape[1] % RUN:
        return
    runs = values.reshape(-1, RUN)
    dead = ~runs.any(axis=1)
    if dead.any():
        runs[dead] = 1.0
        matrix.holes[name] = np.repeat(dead, RUN).reshape(values.shape)


def _read_gguf(file: Path) -> Sums:
    header = read(file)
    if header.kind != "imatrix" and not any(t.name.endswith(".in_sum2") for t in header.tensors):
        raise InvalidFileError(f"{file}: a GGUF file, but no importance matrix ({header.kind})")
    for key in ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"):
        if header.get(key) is None:
            raise InvalidFileError(f"{file}: the key {key} is missing", "collect the importance matrix again")
    found = {tensor.name: tensor for tensor in header.tensors}
    datasets = tuple(str(d) for d in header.array("imatrix.datasets"))
    result = Sums({}, datasets, *(_number(header.get(f"imatrix.chunk_{what}")) for what in ("count", "size")))
    with file.open("rb") as stream:

        def values(name: str) -> NDArray[np.float32]:
            tensor = found.get(name)
            if tensor is None or tensor.type is not GGMLType.F32:
                raise InvalidFileError(f"{file}: {name} is missing or not F32: sums and counts do not match")
            stream.seek(tensor.offset)
            return np.frombuffer(stream.read(tensor.nbytes), "<f4").astype(np.float32)

        for name in sorted(n.removesuffix(".in_sum2") for n in found if n.endswith(".in_sum2")):
            sums, counts = values(f"{name}.in_sum2"), np.rint(values(f"{name}.counts")).astype(np.float32)
            if not counts.size or sums.size % counts.size:
                raise InvalidFileError(f"{file}: {name} has {sums.size} sums for {counts.size} counts")
            result.entries[name] = sums.reshape(counts.size, -1), counts
    return result


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _read_legacy(file: Path) -> Sums:
    data, size = file.read_bytes() if file.stat().st_size < 2**31 else b"", file.stat().st_size
    at = 0

    def take(count: int, what: str) -> bytes:
        nonlocal at
        if count < 0 or at + count > len(data):
            raise InvalidFileError(
                f"{file}: at byte {at} of {size}: {what} needs {count} bytes",
                "it is no importance matrix, or truncated",
            )
        at += count
        return data[at - count : at]

    def number(what: str) -> int:
        return int(struct.unpack("<i", take(4, what))[0])

    result = Sums({})
    for index in range(number("the number of entries")):
        name = take(number(f"entry {index}'s name length"), f"entry {index}'s name").decode(errors="replace")
        calls, count = number(f"{name}'s calls"), number(f"{name}'s length")
        sums = np.frombuffer(take(count * 4, f"{name}'s values"), "<f4").astype(np.float32)
        # A file without calls holds what is averaged already.
        result.entries[name] = sums.reshape(1, -1), np.full(1, calls if calls > 0 else 1, np.float32)
    if at < len(data):
        result.chunks = number("the number of chunks")
        length = number("the data set's name length") if at < len(data) else 0
        result.datasets = (take(length, "the data set's name").decode(errors="replace"),) if length > 0 else ()
    return result

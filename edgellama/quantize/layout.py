"""What the output file (or files) will be, before the first byte is written: header bytes and every tensor's place.

Metadata is copied byte for byte in the source's order; quantization version, file type and overrides are taken out and
put at the end, as llama.cpp does.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellama.errors import UsageError
from edgellama.gguf_io import GGMLType, Header, TensorInfo, Typed, ValueType
from edgellama.gguf_io.types import BLOCKS
from edgellama.gguf_io.writer import Encoded, TensorSpec, header_bytes
from edgellama.quantize.choice import Decision, dimensions
from edgellama.quantize.imatrix import Imatrix
from edgellama.quantize.recipes import Recipe

ALIGNMENT = 32
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor of an output file: where it comes from and where its data goes."""

    decision: Decision
    offset: int
    nbytes: int

    @property
    def source(self) -> TensorInfo:
        """The tensor as the source has it."""
        return self.decision.tensor


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file: its header and its tensors in order, without gaps but for the padding to 32 bytes."""

    path: Path
    header: bytes
    tensors: tuple[Placed, ...]
    size: int


def row_bytes(kind: GGMLType, row: int) -> int:
    """Bytes of a row of `row` values."""
    block, size = BLOCKS[kind]
    return row // block * size


def nbytes_as(tensor: TensorInfo, kind: GGMLType) -> int:
    """Bytes of a tensor's data once it has type `kind`."""
    return tensor.elements // tensor.shape[0] * row_bytes(kind, tensor.shape[0])


def metadata(
    header: Header, recipe: Recipe, overrides: Mapping[str, object], matrix: Imatrix | None
) -> dict[str, object]:
    """The output's metadata in order. `overrides` are --override-kv values, already typed."""
    values: dict[str, object] = {
        key: Encoded(data) for key, data in header.encoded_metadata().items() if key not in _SPLIT_KEYS
    }
    values.pop("general.alignment", None)  # the data is aligned to 32 whatever the source had
    file_type = header.get("general.file_type") if recipe.copies else recipe.file_type
    late: dict[str, object] = {
        "general.quantization_version": Typed(2, ValueType.UINT32),
        "general.file_type": Typed(file_type if isinstance(file_type, int) else _guess(header), ValueType.UINT32),
        **overrides,
    }
    if matrix is not None:
        late["quantize.imatrix.file"] = _cut(matrix.path)
        if matrix.datasets:
            late["quantize.imatrix.dataset"] = _cut(matrix.datasets[0])
        late["quantize.imatrix.entries_count"] = Typed(len(matrix.entries), ValueType.UINT32)
        if matrix.chunks > 0:
            late["quantize.imatrix.chunks_count"] = Typed(matrix.chunks, ValueType.UINT32)
    for key, value in late.items():
        values.pop(key, None)
        values[key] = value
    return values


def _cut(text: str) -> Encoded:
    """A string of at most 127 bytes: llama.cpp's overrides hold no more."""
    data = text.encode()[:127]
    return Encoded(struct.pack("<IQ", ValueType.STRING, len(data)) + data)


def _guess(header: Header) -> int:
    """File type of a source that does not say: that of its most common tensor type, marked as guessed."""
    known = {
        GGMLType.F32: 0,
        GGMLType.F16: 1,
        GGMLType.BF16: 32,
        GGMLType.Q8_0: 7,
        GGMLType.Q4_K: 15,
        GGMLType.Q6_K: 18,
    }
    counts: dict[GGMLType, int] = {}
    for tensor in header.tensors:
        counts[tensor.type] = counts.get(tensor.type, 0) + 1
    return known.get(max(counts, key=lambda kind: counts[kind]), 0) | 1024


def pruned_names(names: Iterable[str], prune: Sequence[int]) -> tuple[dict[str, str], int]:
    """New name of each tensor that stays when layers are pruned, and the number of layers left. Names come in order."""
    mapped: dict[int, int | None] = {}
    kept: dict[str, str] = {}
    following = 0
    removed = set(prune)
    for name in names:
        match = _LAYER.search(name)
        if not match:
            kept[name] = name
            continue
        layer = int(match[1])
        if layer not in mapped:
            mapped[layer] = None if layer in removed else following
            following += layer not in removed
        new = mapped[layer]
        if new is not None:
            kept[name] = f"{name[: match.start(1)]}{new}{name[match.end(1) :]}"
    missing = removed - set(mapped)
    if missing:
        raise UsageError(f"--prune-layers: the model has no layer {min(missing)}")
    return kept, following


def lay_out(
    target: Path, values: Mapping[str, object], decisions: Sequence[Decision], groups: Sequence[Sequence[int]]
) -> list[OutputFile]:
    """Output files for `groups` of decision indices; one group is one plain file, more are splits."""
    files = []
    total = sum(len(group) for group in groups)
    for number, group in enumerate(groups):
        own: dict[str, object] = dict(values) if number == 0 else {}
        path = target
        if len(groups) > 1:
            own["split.no"] = Typed(number, ValueType.UINT16)
            own["split.count"] = Typed(len(groups), ValueType.UINT16)
            own["split.tensors.count"] = Typed(total, ValueType.INT32)
            path = split_path(target, number, len(groups))
        files.append(_one_file(path, own, [decisions[i] for i in group]))
    return files


def split_path(target: Path, number: int, count: int) -> Path:
    """llama.cpp's name of a split: PREFIX-00001-of-0000N.gguf."""
    stem = target.name.removesuffix(".gguf")
    return target.with_name(f"{stem}-{number + 1:05d}-of-{count:05d}.gguf")


def _one_file(path: Path, values: Mapping[str, object], decisions: Sequence[Decision]) -> OutputFile:
    specs = []
    for decision in decisions:
        shape = decision.tensor.shape[: dimensions(decision.tensor.shape)]
        specs.append(TensorSpec(decision.tensor.name, shape, decision.type))
    header = header_bytes(values, specs)
    placed, offset = [], len(header)
    for decision in decisions:
        nbytes = nbytes_as(decision.tensor, decision.type)
        placed.append(Placed(decision, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return OutputFile(path, header, tuple(placed), offset)


def groups_by_size(decisions: Sequence[Decision], limit_bytes: int) -> list[list[int]]:
    """Consecutive groups of tensors of at most `limit_bytes` of data each (a larger tensor stands alone)."""
    groups: list[list[int]] = [[]]
    filled = 0
    for index, decision in enumerate(decisions):
        nbytes = nbytes_as(decision.tensor, decision.type)
        if groups[-1] and filled + nbytes > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += nbytes
    return groups

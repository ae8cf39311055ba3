"""Sums of an importance matrix as a file: merging others in, writing llama-imatrix's format, and its statistics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import UsageError
from edgellama.gguf_io import GGMLType, TensorSpec, Typed, ValueType, writing
from edgellama.quantize.imatrix import read_sums

_LAYER = re.compile(r"blk\.(\d+)\.")
_ACTIVE = 1e-5
"""A mean square at or below this counts as inactive (llama-imatrix's threshold)."""


@dataclass(slots=True)
class Entry:
    """One weight: squares summed over tokens, float64[experts, inputs], and the tokens, int64[experts] (or one)."""

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean square of each input, float64[experts seen, inputs]."""
        counts = self.counts if self.counts.size == len(self.sums) else np.repeat(self.counts, len(self.sums))
        seen = counts > 0
        return self.sums[seen] / counts[seen][:, None]


Entries = dict[str, Entry]


def add_file(entries: Entries, path: str | Path, context: int) -> tuple[str, ...]:
    """Add another matrix's sums; returns its data sets. Raises UsageError when the shapes differ."""
    other = read_sums(path)
    unit = 1 if other.chunk_size else context  # legacy files count chunks
    for name, (sums, counts) in other.entries.items():
        wide, tokens = sums.astype(np.float64) * unit, np.rint(counts).astype(np.int64) * unit
        mine = entries.get(name)
        if mine is None:
            entries[name] = Entry(wide, tokens)
            continue
        if mine.sums.size != wide.size or (
            mine.counts.size != tokens.size and 1 not in {mine.counts.size, tokens.size}
        ):
            raise UsageError(
                f"{path}: {name} has {wide.size} inputs of {tokens.size} experts, not {mine.sums.size} "
                f"of {mine.counts.size}",
                "merge matrices of one model only",
            )
        mine.sums = mine.sums + wide.reshape(mine.sums.shape)
        mine.counts = mine.counts + tokens
    return other.datasets


def write(path: Path, entries: Mapping[str, Entry], datasets: Sequence[str], chunks: int, chunk_size: int) -> None:
    """Write a matrix in llama-imatrix's GGUF format."""
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": Typed(list(datasets), ValueType.ARRAY, ValueType.STRING),
        "imatrix.chunk_count": Typed(chunks, ValueType.UINT32),
        "imatrix.chunk_size": Typed(chunk_size, ValueType.UINT32),
    }
    specs, data = [], []
    for name in sorted(entries, key=str.encode):
        entry = entries[name]
        experts = entry.counts.size
        specs.append(_spec(f"{name}.in_sum2", entry.sums.size // experts, experts))
        specs.append(_spec(f"{name}.counts", 1, experts))
        data += [entry.sums.astype("<f4"), entry.counts.astype("<f4")]
    with writing(path, keys, specs) as out:
        for spec, values in zip(specs, data, strict=True):
            out.write(spec.name, values.tobytes())


def _spec(name: str, width: int, experts: int) -> TensorSpec:
    return TensorSpec(name, (width, experts) if experts > 1 else (width,), GGMLType.F32)


def statistics(entries: Mapping[str, Entry]) -> tuple[dict[str, float | str], ...]:
    """Per weight: sum, extremes, mean and deviation of the mean squares, how many inputs are active, their entropy,
    the share above one deviation, and the cosine to the same weight of the layer before."""
    rows = []
    for name in sorted(entries, key=lambda n: (int(m[1]) if (m := _LAYER.match(n)) else -1, n)):
        values = entries[name].mean.ravel()
        if not values.size:
            continue
        total, deviation = float(values.sum()), float(values.std())
        shares = values[values > 0] / total if total > 0 else np.ones(1)
        row: dict[str, float | str] = {
            "tensor": name,
            "sum": total,
            "min": float(values.min()),
            "max": float(values.max()),
            "mean": float(values.mean()),
            "deviation": deviation,
            "active": float((np.abs(values) > _ACTIVE).mean()),
            "inputs": values.size,
            "entropy_bits": float(-(shares * np.log2(shares)).sum()),
            "above_deviation": float((values > values.mean() + deviation).mean()) if deviation > 0 else 0.0,
        }
        cosine = _cosine_to_layer_before(entries, name)
        if cosine is not None:
            row["cosine"] = cosine
        rows.append(row)
    return tuple(rows)


def _cosine_to_layer_before(entries: Mapping[str, Entry], name: str) -> float | None:
    match = _LAYER.match(name)
    before = entries.get(f"blk.{int(match[1]) - 1}.{name[match.end() :]}") if match else None
    if before is None or before.sums.size != entries[name].sums.size:
        return None
    a, b = entries[name].sums.ravel(), before.sums.ravel()
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale else None

"""How much of a tensor's output is lost by each type: the squared error of its weights, weighted by how strongly each
input is used, over the same sum of the weights themselves. Measured on a sample of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from edgellama.gguf_io import GGMLType as T
from edgellama.gguf_io import TensorInfo
from edgellama.gguf_io.types import BLOCKS
from edgellama.quantize.layout import row_bytes
from edgellama.quantize.source import SourceFile, check_finite, codec_of, to_float32

LADDER = (T.Q2_K, T.Q3_K, T.IQ4_XS, T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_0)
"""Types for rows of whole superblocks, smallest first: what stock llama.cpp computes with at full speed."""
NARROW_LADDER = (T.IQ4_NL, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0)
"""Types for rows that only divide into blocks of 32."""
Weights = Callable[[TensorInfo], NDArray[np.float32] | None]
ErrorTable = dict[str, dict[T, float]]
"""Relative error by tensor name and type; 0 for the source's own type."""


def ladder_of(tensor: TensorInfo) -> tuple[T, ...]:
    """Types a tensor may get, smallest first, besides its own."""
    for ladder in (LADDER, NARROW_LADDER):
        if all(tensor.shape[0] % BLOCKS[kind][0] == 0 for kind in ladder):
            return ladder
    return ()


def measure(
    tensors: Sequence[TensorInfo],
    paths: Sequence[str],
    weights: Weights,
    true_weights: Weights,
    *,
    sample_weights: int,
    threads: int,
    on_progress: Callable[[float, str], None] | None = None,
) -> ErrorTable:
    """Errors of all `tensors`, on about `sample_weights` weights of each. Raises InvalidFileError for NaN and Inf.

    Quantized with `weights`, judged with `true_weights`.
    """
    files = [SourceFile(path) for path in paths]
    table: ErrorTable = {}
    try:
        with ThreadPoolExecutor(threads) as pool:
            work = pool.map(lambda t: _errors(t, files[t.split], weights(t), true_weights(t), sample_weights), tensors)
            for index, (tensor, errors) in enumerate(zip(tensors, work, strict=True)):
                table[tensor.name] = dict(errors)
                if on_progress is not None:
                    on_progress((index + 1) / len(tensors), tensor.name)
    finally:
        for file in files:
            file.close()
    return table


def _errors(
    tensor: TensorInfo,
    file: SourceFile,
    importance: NDArray[np.float32] | None,
    judging: NDArray[np.float32] | None,
    sample_weights: int,
) -> Mapping[T, float]:
    k = tensor.shape[0]
    rows = tensor.elements // k
    experts = 1 if importance is None else len(importance)
    # Every expert gives its share, and the rows are spread over the whole of it.
    picks = max(1, min(rows, sample_weights // k) // experts)
    error: dict[T, float] = dict.fromkeys(ladder_of(tensor), 0.0)
    power = 0.0
    for expert in range(experts):
        own = rows // experts
        chosen = np.unique(np.linspace(expert * own, (expert + 1) * own - 1, picks).astype(np.int64))
        x = _read_rows(tensor, file, chosen)
        row_weights = importance[expert] if importance is not None else None
        # The root, not the mean square itself: a few massive activations, mostly of a text's first token, would
        # otherwise be all that counts in some layers.
        scale = np.ones(k, np.float32) if judging is None else np.sqrt(judging[expert])
        power += float((np.square(x, dtype=np.float32).sum(axis=0, dtype=np.float64) * scale).sum())
        for kind in error:
            codec = codec_of(kind)
            gap = codec.dequantize(codec.quantize(x, row_weights)) - x
            error[kind] += float((np.square(gap, out=gap).sum(axis=0, dtype=np.float64) * scale).sum())
    return {kind: value / power if power > 0 else 0.0 for kind, value in error.items()}


def _read_rows(tensor: TensorInfo, file: SourceFile, chosen: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows as float32[n, k]; neighbours are read at once."""
    stride = row_bytes(tensor.type, tensor.shape[0])
    parts = []
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
        start, count = int(run[0]), len(run)
        raw = file.read(tensor.offset + start * stride, count * stride, tensor.name)
        values = to_float32(raw.reshape(count, stride), tensor.type)
        check_finite(values, tensor, start)
        parts.append(values)
    return np.concatenate(parts)

"""Importance matrices: the mean square of every input of every weight, taken from the running model.

llama.cpp shows each node of its graph before and after it is computed. Of the matrix products the right operand is
read, squared and summed per input; products with experts by the expert that got the row. Sums are kept in float64.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellama.engine import ggml_tensor
from edgellama.engine.base import Engine
from edgellama.engine.ggml_tensor import F32, MUL_MAT, MUL_MAT_ID, Tensor
from edgellama.errors import EngineError, NumericError, UnsupportedError
from edgellama.evaluate import chunks, coverage, partial
from edgellama.evaluate.importance_file import Entries, Entry, add_file, statistics, write
from edgellama.evaluate.jobs import Answer, ImportanceJob, Measured, Progress

LEAST_TOKENS = 16
"""Products of fewer rows are not prompts (llama-imatrix's rule)."""
SAVE_SECONDS = 20.0
_BLOCK_ROWS = 64
"""Rows summed in float32 before float64 takes over."""


@dataclass(slots=True)
class Collector:
    """Sums by tensor name; `on_node` is what the engine calls."""

    output_tensor: bool = False
    entries: Entries = field(default_factory=dict)
    error: Exception | None = None
    _last: tuple[int, NDArray[np.float64]] | None = None

    def on_node(self, address: int, ask: bool) -> bool:
        """See `LlamaEngine`. Faults are kept in `error`, since nothing may be raised through C."""
        try:
            node = Tensor.at(address)
            if ask:
                return self._wants(node)
            self._take(node)
        except Exception as error:  # noqa: BLE001 - raised again by `check`
            self.error = self.error or error
        return True

    def check(self) -> None:
        """Raise what went wrong inside the graph."""
        error, self.error, self._last = self.error, None, None
        if error is not None:
            raise error

    def _wants(self, node: Tensor) -> bool:
        if node.op == MUL_MAT_ID:
            return True
        if node.op != MUL_MAT:
            return False
        weight, inputs = node.source(0), node.source(1)
        if weight is None or inputs is None or inputs.ne[1] < LEAST_TOKENS or inputs.type != F32:
            return False
        name = tensor_name(weight)
        return name.startswith("blk.") or (self.output_tensor and name == "output.weight")

    def _take(self, node: Tensor) -> None:
        weight, inputs = node.source(0), node.source(1)
        if weight is None or inputs is None:
            return
        name = tensor_name(weight)
        if node.op == MUL_MAT_ID:
            ids = node.source(2)
            if ids is not None:
                self._add_routed(name, weight, inputs.read(), ids.read())
        else:
            self._add_dense(name, weight, inputs)

    def _entry(self, name: str, matrices: int, inputs: int, counts: int) -> Entry:
        entry = self.entries.get(name)
        if entry is None:
            entry = self.entries[name] = Entry(np.zeros((matrices, inputs)), np.zeros(counts, np.int64))
        if entry.sums.shape != (matrices, inputs):
            raise EngineError(f"{name} had inputs {entry.sums.shape} before, now {(matrices, inputs)}")
        return entry

    def _add_dense(self, name: str, weight: Tensor, inputs: Tensor) -> None:
        matrices = weight.ne[2] * weight.ne[3]
        entry = self._entry(name, matrices, inputs.ne[0], 1)
        squares = self._squares(inputs)
        for third in range(inputs.ne[3]):
            for second in range(inputs.ne[2]):
                # Inputs of more dimensions than the weight belong to it together.
                entry.sums[third % weight.ne[3] * weight.ne[2] + second % weight.ne[2]] += squares[third, second]
        entry.counts += inputs.ne[1] * inputs.ne[2] * inputs.ne[3] // matrices
        _check_finite(name, entry.sums)

    def _squares(self, inputs: Tensor) -> NDArray[np.float64]:
        """Sum of squares over the rows, float64[ne3, ne2, inputs]; several weights in a row share their inputs."""
        import ctypes

        address = ctypes.addressof(inputs)
        if self._last is None or self._last[0] != address:
            self._last = address, _sum_squares(inputs.read())
        return self._last[1]

    def _add_routed(self, name: str, weight: Tensor, inputs: NDArray[np.float32], ids: NDArray[np.int32]) -> None:
        """Inputs float32[1, tokens, 1 or used, k], ids int32[1, 1, tokens, used]."""
        self._last = None
        experts, rows, chosen = weight.ne[2], inputs[0], ids[0, 0]
        entry = self._entry(name, experts, rows.shape[-1], experts)
        if inputs.shape[0] != 1 or chosen.shape[0] != rows.shape[0]:
            raise EngineError(f"{name}: inputs {inputs.shape} and expert ids {ids.shape} do not fit together")
        if chosen.min() < 0 or chosen.max() >= experts:
            raise NumericError(f"{name}: expert {chosen.max()} of {experts} was chosen")
        for slot in range(chosen.shape[1]):
            order = np.argsort(chosen[:, slot], kind="stable")
            found, starts, counts = np.unique(chosen[order, slot], return_index=True, return_counts=True)
            squares = np.square(rows[order, slot % rows.shape[1]], dtype=np.float64)
            entry.sums[found] += np.add.reduceat(squares, starts, axis=0)
            entry.counts[found] += counts
        _check_finite(name, entry.sums)


def tensor_name(tensor: Tensor) -> str:
    """Name of a weight without what a scheduler adds: `CUDA0#blk.0.attn_k.weight#0`."""
    name = bytes(tensor.name).decode(errors="replace")
    return name.split("#")[1] if "#" in name else name


def _sum_squares(values: NDArray[np.float32]) -> NDArray[np.float64]:
    total = np.zeros((*values.shape[:2], values.shape[3]))
    for start in range(0, values.shape[2], _BLOCK_ROWS):
        total += np.square(values[:, :, start : start + _BLOCK_ROWS]).sum(axis=2)
    return total


def _check_finite(name: str, sums: NDArray[np.float64]) -> None:
    if not np.isfinite(sums).all():
        raise NumericError(
            f"{name}: the model computed inputs that are not finite",
            "fetch or convert it again; `edgellama doctor` shows what its device did wrong",
        )


def collect(job: ImportanceJob, tell: Callable[[Answer], None], on_load: Callable[[float], None]) -> Measured:
    """Collect, merge and write a matrix."""
    if job.engine != "llamacpp":
        raise UnsupportedError(f"engine {job.engine} cannot show its graph", "use --engine llamacpp")
    from edgellama.engine.llamacpp.engine import LlamaEngine

    ggml_tensor.check()
    text = chunks.read_text(job.text)
    collector = Collector(job.output_tensor)
    context = job.options.context_tokens
    with LlamaEngine(job.model, job.options, on_load, collector.on_node) as engine:
        tokens = chunks.cut(engine.tokenizer, text, context, job.chunks, job.text)
        used = text[: int(len(text) * tokens.size / max(tokens.size, _length(engine, text)))]
        _walk(job, engine, collector, tokens, tell)
    warnings = [] if not job.wanted else coverage.missing(used, job.wanted)
    datasets = [name for path in job.merge for name in add_file(collector.entries, path, context)]
    largest = max((int(entry.counts.max()) for entry in collector.entries.values()), default=0)
    if not largest:
        raise EngineError(f"{job.model}: the model showed no matrix product", "use chunks of at least 16 tokens")
    warnings += [
        f"{name}: {int((entry.counts == 0).sum())} of {entry.counts.size} experts were never active"
        for name, entry in collector.entries.items()
        if (entry.counts == 0).any()
    ]
    write(Path(job.output), collector.entries, [*datasets, job.text], largest // context, context)
    partial.remove(job.output)
    total = tokens.size // context
    return Measured({}, total, context, tokens.size, tuple(warnings), statistics(collector.entries))


def _length(engine: Engine, text: str) -> int:
    return len(engine.tokenizer.tokenize(text))


def _walk(
    job: ImportanceJob,
    engine: Engine,
    collector: Collector,
    tokens: NDArray[np.int32],
    tell: Callable[[Answer], None],
) -> None:
    context = job.options.context_tokens
    total = tokens.size // context
    model = f"{engine.info.description} {engine.info.parameters} {engine.info.size_bytes} {job.output_tensor}"
    key = hashlib.sha256(f"{model} {context}".encode() + tokens.tobytes()).hexdigest()
    done = 0
    if job.resume:
        done, collector.entries = partial.load(job.output, key)
    saved = time.monotonic()
    for part in chunks.decode(engine, tokens[done * context :], context, everything=True):
        collector.check()
        if not part.complete:
            continue
        finished = done + part.chunk + 1
        tell(Progress(finished, total))
        if time.monotonic() - saved > SAVE_SECONDS and finished < total and engine.info.sequences == 1:
            partial.save(job.output, key, finished, collector.entries)
            saved = time.monotonic()

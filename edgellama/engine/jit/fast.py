"""The fast mode: a recorded program, run by threads in compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import edgellama
from edgellama.engine.base import EngineOptions
from edgellama.engine.jit.block import forward, head
from edgellama.engine.jit.cells import Cells, Step
from edgellama.engine.jit.engine import Control
from edgellama.engine.jit.kernels import layout as at
from edgellama.engine.jit.kernels.emit import host, integer_dot
from edgellama.engine.jit.model import Model
from edgellama.engine.jit.pool import Job, Pool
from edgellama.engine.jit.recorder import Recorder, Value
from edgellama.engine.jit.storage import Storage
from edgellama.errors import AbortedError

Floats = NDArray[np.float32]


class FastCompute:
    """One program for all batches of an engine."""

    def __init__(self, model: Model, cells: Cells, storage: Storage, control: Control, options: EngineOptions) -> None:
        self._model, self._cells, self._control = model, cells, control
        rows = min(options.micro_batch_tokens, options.batch_tokens, cells.count)
        recorder = Recorder(model, storage, rows, max(1, options.threads))
        hidden = forward(recorder, model)
        body = recorder.operations
        head(recorder, model, hidden)
        self._program = recorder.finish()
        self._recorder = recorder  # keeps the memory that the program points to
        self._body_operations = body
        self._input = _view(recorder.input, rows)
        self._hidden = _view(hidden, rows)
        self._step = np.zeros(at.STEP_WORDS, np.int64)
        self._table = model.tensors["token_embd.weight"]
        self._pool = Pool()
        self._threads = (1, 1)

    @property
    def name(self) -> str:
        """Identity of the code."""
        import numba

        kind = next((name for name in ("x86_64", "aarch64", "arm64") if name in host()), "other")
        return f"edgellama {edgellama.__version__} jit, Numba {numba.__version__}, {kind} {integer_dot()}"

    def run(self, step: Step, logits: Floats | None) -> Floats:
        """See `Compute.run`."""
        n = len(step.tokens)
        self._input[:n] = self._table.floats(step.tokens)
        turns = [part.astype(np.float32) for rope in self._model.ropes for part in rope.cos_sin(step.positions)]
        words = self._step
        words[at.TOKENS], words[at.WANTED] = n, len(step.wanted)
        pointers = (step.positions, step.sequences, step.cells, step.wanted, self._cells.table)
        words[at.POSITIONS : at.POSITIONS + 5] = [array.ctypes.data for array in pointers]
        words[at.CONTEXT], words[at.CELL_COUNT] = self._cells.context, self._cells.count
        words[at.LOGITS] = 0 if logits is None or not len(step.wanted) else logits.ctypes.data
        words[at.TURNS : at.TURNS + len(turns)] = [array.ctypes.data for array in turns]
        operations = self._body_operations if words[at.LOGITS] == 0 else len(self._program)
        job = Job(self._program.ctypes.data, operations, words.ctypes.data, self._control.memory.ctypes.data)
        threads = self._threads[0] if n <= 4 else self._threads[1]
        if not self._pool.run(job, threads):
            self._program[:, at.COUNTER] = 0
            self._control.memory[at.ARRIVED] = 0
            raise AbortedError("the step was aborted")
        return self._hidden[: len(step.wanted)]

    def set_threads(self, threads: int, prefill_threads: int) -> None:
        """See `Compute.set_threads`."""
        self._threads = (threads, prefill_threads)

    def close(self) -> None:
        """See `Compute.close`."""
        self._pool.close()


def _view(value: Value, rows: int) -> Floats:
    assert value.buffer is not None  # noqa: S101
    return value.buffer.memory[: 4 * rows * value.width].view(np.float32).reshape(rows, value.width)

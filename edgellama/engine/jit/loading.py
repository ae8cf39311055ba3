"""From a file and options to an engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import edgellama
from edgellama.engine.base import EngineOptions, Tokenizer
from edgellama.engine.jit import options as limits
from edgellama.engine.jit.block import forward, head
from edgellama.engine.jit.cells import Cells, Step
from edgellama.engine.jit.engine import Compute, Control, JitEngine
from edgellama.engine.jit.exact import ExactOps
from edgellama.engine.jit.model import Model, load_model
from edgellama.engine.jit.storage import Storage


class ExactCompute:
    """The exact mode. Matrix products use NumPy's own threads."""

    def __init__(self, model: Model, cells: Cells, storage: Storage, control: Control) -> None:
        self._model, self._cells, self._storage, self._control = model, cells, storage, control

    @property
    def name(self) -> str:
        """Identity of the code."""
        return f"edgellama {edgellama.__version__} jit exact, NumPy {np.__version__}"

    def run(self, step: Step, logits: NDArray[np.float32] | None) -> NDArray[np.floating]:
        """See `Compute.run`."""
        ops = ExactOps(self._model, self._cells, self._storage, step, self._control.tick)
        hidden = forward(ops, self._model)
        if logits is not None and len(hidden):
            logits[:] = head(ops, self._model, hidden)
        return hidden

    def set_threads(self, threads: int, prefill_threads: int) -> None:
        """See `Compute.set_threads`."""

    def close(self) -> None:
        """See `Compute.close`."""


def load_engine(
    path: str,
    options: EngineOptions,
    on_progress: Callable[[float], None] | None,
    *,
    exact: bool,
    tokenizer: Callable[[], Tokenizer] | None,
) -> JitEngine:
    """See `edgellama.engine.jit.load`."""
    limits.check(options)
    control = Control()

    def progress(fraction: float) -> None:
        control.memory[1] += 1
        if on_progress is not None:
            on_progress(fraction)

    model = load_model(path, options.context_tokens, mapped=options.use_mmap, loras=options.loras, on_progress=progress)

    def compute(model: Model, cells: Cells, storage: Storage, control: Control, options: EngineOptions) -> Compute:
        if exact:
            return ExactCompute(model, cells, storage, control)
        from edgellama.engine.jit.fast import FastCompute

        return FastCompute(model, cells, storage, control, options)

    return JitEngine(model, options, tokenizer or (lambda: _own_tokenizer(model)), compute, control)


def _own_tokenizer(model: Model) -> Tokenizer:
    found: Tokenizer = importlib.import_module("edgellama.engine.tokenizer").load(model.header)
    return found

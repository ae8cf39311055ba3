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
        self._ops: ExactOps | None = None

    @property
    def name(self) -> str:
        """Identity of the code."""
        return f"edgellama {edgellama.__version__} jit exact, NumPy {np.__version__}"

    def hidden(self, step: Step) -> NDArray[np.floating]:
        """See `Compute.hidden`."""
        self._ops = ExactOps(self._model, self._cells, self._storage, step, self._control.tick)
        return forward(self._ops, self._model)

    def logits(self, hidden: NDArray[np.floating], out: NDArray[np.float32]) -> None:
        """See `Compute.logits`."""
        assert self._ops is not None  # noqa: S101
        out[:] = head(self._ops, self._model, hidden.astype(np.float64, copy=False))

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

    model = load_model(path, options.context_tokens, mapped=options.use_mmap, on_progress=progress)

    def compute(model: Model, cells: Cells, storage: Storage, control: Control, options: EngineOptions) -> Compute:
        return ExactCompute(model, cells, storage, control)

    return JitEngine(model, options, tokenizer or (lambda: _own_tokenizer(model)), compute, control)


def _own_tokenizer(model: Model) -> Tokenizer:
    found: Tokenizer = importlib.import_module("edgellama.engine.tokenizer").load(model.header)
    return found

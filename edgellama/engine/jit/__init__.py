"""The engine in Numba: needs no native library, and its exact mode is the numeric reference of the house.

Importing it compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellama.engine.base import EngineOptions, Tokenizer
    from edgellama.engine.jit.engine import JitEngine


def prepare() -> None:
    """Load the compiled kernels, and compile those that are missing: seconds at the first start, a moment later.

    A process that is about to confine itself calls this first, since compiled kernels are kept on disk.
    """
    from edgellama.engine.jit import fast
    from edgellama.engine.jit.kernels import compiled

    del fast  # imported only so that nothing is left to import
    compiled.prepare()


def load(
    path: str,
    options: EngineOptions,
    on_progress: Callable[[float], None] | None = None,
    *,
    exact: bool = False,
    tokenizer: Callable[[], Tokenizer] | None = None,
) -> JitEngine:
    """Load a GGUF file; see `EngineFactory`.

    `exact` computes every operation by its definition in float64 on weights dequantized to float32: slow, and the
    reference others are measured against. `tokenizer` makes the tokenizer at its first use; without one it is read
    from the file.
    """
    from edgellama.engine.jit.loading import load_engine

    return load_engine(path, options, on_progress, exact=exact, tokenizer=tokenizer)

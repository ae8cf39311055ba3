"""What of `EngineOptions` this engine takes, and what it refuses aloud."""

from __future__ import annotations

from typing import Literal

from edgellama.engine import bounds
from edgellama.engine.base import EngineOptions
from edgellama.engine.jit.model import Model
from edgellama.errors import InvalidFileError, UnsupportedError, UsageError

MAX_THREADS = 512
_POOLINGS: dict[int, Literal["none", "mean", "cls", "last"]] = {0: "none", 1: "mean", 2: "cls", 3: "last"}
"""`{arch}.pooling_type` of GGUF files."""


def check(options: EngineOptions) -> None:
    """Raise `UsageError` for values out of range, `UnsupportedError` for what this engine cannot do."""
    bounds.check(options, most_sequences=4096, most_threads=MAX_THREADS)
    if options.gpu_layers > 0:
        raise UnsupportedError("the JIT engine computes on the CPU", "use gpu_layers 0, or the engine llamacpp")
    if options.use_mlock:
        raise UnsupportedError("the JIT engine cannot lock weights in memory", "use the engine llamacpp")


def check_threads(threads: int, prefill_threads: int) -> None:
    """Raise `UsageError` unless both are possible."""
    if not (1 <= threads <= MAX_THREADS and 1 <= prefill_threads <= MAX_THREADS):
        raise UsageError(f"{threads} and {prefill_threads} threads: 1 to {MAX_THREADS} are possible")


def threads(options: EngineOptions) -> tuple[int, int]:
    """Threads for steps and for prompts."""
    from edgellama.engine.threads import default_threads

    for_steps = options.threads or default_threads()
    return for_steps, options.prefill_threads or for_steps


def pooling(options: EngineOptions, model: Model) -> Literal["none", "mean", "cls", "last"]:
    """How `embed` makes one vector of a sequence."""
    if options.pooling == "rank":
        raise UnsupportedError("the JIT engine has no ranking models", "use the engine llamacpp")
    if options.pooling != "model":
        return options.pooling
    stored = model.header.number("pooling_type")
    if stored not in _POOLINGS:
        raise UnsupportedError(f"the JIT engine does not know pooling type {stored}", "choose mean, cls or last")
    return _POOLINGS[stored]


def misfit(found: int, expected: int) -> InvalidFileError:
    """The error for a saved sequence of the wrong size."""
    return InvalidFileError(f"the saved sequence has {found:,} bytes of cache, expected are {expected:,}")

"""llama.cpp through the low-level bindings of llama-cpp-python: the engine for every device it supports."""

from __future__ import annotations

from collections.abc import Callable

from edgellama.engine.base import EngineOptions
from edgellama.engine.llamacpp.engine import LlamaEngine


def load(path: str, options: EngineOptions, on_progress: Callable[[float], None] | None = None) -> LlamaEngine:
    """Load a GGUF file; an `EngineFactory`."""
    return LlamaEngine(path, options, on_progress)

"""One small file per family of models: what it declares is all that differs from the shared block."""

from __future__ import annotations

import importlib

from edgellama.engine.jit.families.base import Family
from edgellama.errors import UnsupportedError

_MODULES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "granite": "granite",
    "granitemoe": "granite",
    "internlm2": "internlm2",
    "llama": "llama",
    "minicpm": "minicpm",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
}

ARCHITECTURES = tuple(_MODULES)
"""Values of `general.architecture` this engine computes."""


def family(architecture: str) -> Family:
    """The family of an architecture. Raises `UnsupportedError` for one this engine does not know."""
    module = _MODULES.get(architecture)
    if module is None:
        raise UnsupportedError(
            f"the JIT engine does not know models of architecture {architecture!r}",
            f"use the engine llamacpp, or a model of {', '.join(ARCHITECTURES)}",
        )
    found = importlib.import_module(f"edgellama.engine.jit.families.{module}").FAMILY
    assert isinstance(found, Family)  # noqa: S101
    return found

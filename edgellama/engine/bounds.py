"""Values of `EngineOptions` that every engine refuses, before native code or an allocation sees them."""

from __future__ import annotations

from edgellama.engine.base import EngineOptions
from edgellama.errors import UsageError

_MAX_CELLS = 2**31 - 256


def check(options: EngineOptions, *, most_sequences: int, most_threads: int) -> None:
    """Raise `UsageError` for values out of range."""
    bounds = (
        ("sequences", options.sequences, 1, most_sequences),
        ("context_tokens", options.context_tokens, 0, _MAX_CELLS // max(1, options.sequences)),
        ("batch_tokens", options.batch_tokens, 1, 2**20),
        ("micro_batch_tokens", options.micro_batch_tokens, 1, 2**20),
        ("logits_rows", options.logits_rows, 0, 2**20),
        ("threads", options.threads, 0, most_threads),
        ("prefill_threads", options.prefill_threads, 0, most_threads),
        ("gpu_layers", options.gpu_layers, -1, 2**20),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise UsageError(f"{name} is {value}, allowed is {low} to {high}")

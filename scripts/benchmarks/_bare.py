"""A child process: llama.cpp's bindings and nothing of edgellama around its `llama_decode`.

Takes one JSON object per line: first `{"path", "options"}`, then `{"prompt", "answer"}` (ids to decode at once, and
one by one); answers `{"prompt_seconds", "step_seconds", "step_cpu_seconds"}`. Context settings come from the same
options as the worker's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import msgspec

from edgellama.engine.base import EngineOptions
from edgellama.engine.llamacpp import options as translate
from edgellama.engine.llamacpp.bindings import bindings


class Loop:
    """One context and one batch, filled token by token."""

    def __init__(self, path: str, options: EngineOptions) -> None:
        self.c = bindings()
        self.model = self.c.llama_model_load_from_file(os.fsencode(path), translate.model_params(self.c, options))
        params = translate.context_params(self.c, options, options.context_tokens, -1, unified=True)
        params.n_outputs_max = 0
        self.context = self.c.llama_init_from_model(self.model, params)
        self.batch = self.c.llama_batch_init(options.batch_tokens, 0, 1)

    def decode(self, tokens: list[int], start: int) -> None:
        batch = self.batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        if self.c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.c.llama_get_logits(self.context)

    def measure(self, prompt: list[int], answer: list[int]) -> dict[str, Any]:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        begun = time.perf_counter()
        self.decode(prompt, 0)
        after_prompt, cpu = time.perf_counter(), time.process_time()
        for i, token in enumerate(answer):
            self.decode([token], len(prompt) + i)
        steps = (time.perf_counter() - after_prompt) / len(answer)
        cpu = (time.process_time() - cpu) / len(answer)
        return {"prompt_seconds": after_prompt - begun, "step_seconds": steps, "step_cpu_seconds": cpu}


def main() -> None:
    """Serve until stdin ends."""
    first = json.loads(sys.stdin.readline())
    loop = Loop(first["path"], msgspec.convert(first["options"], EngineOptions))
    print("{}", flush=True)
    for request in map(json.loads, sys.stdin):
        print(json.dumps(loop.measure(request["prompt"], request["answer"])), flush=True)


if __name__ == "__main__":
    main()

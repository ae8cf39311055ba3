"""llama.cpp in a child process that may die."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

CHILD_SECONDS = 30.0


class Native:
    """A child that loads files in llama.cpp; a new one takes its place when it dies."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
        return subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def try_file(self, path: Path) -> str:
        """`ok`, `refused …`, or how the child died. A death is confirmed in a fresh child."""
        verdict = self._ask(path)
        if verdict.startswith(("died", "hung")):
            verdict = self._ask(path)
        return verdict

    def _ask(self, path: Path) -> str:
        if self._child is None:
            self._child = self._start()
        child = self._child
        assert child.stdin
        assert child.stdout
        child.stdin.write(f"{path}\n".encode())
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], CHILD_SECONDS)
        answer = child.stdout.readline().decode().strip() if ready else ""
        if answer:
            return answer
        self.close()
        return "hung" if not ready else f"died with {child.returncode}"

    def close(self) -> None:
        if self._child is not None:
            for stream in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(OSError):
                    if stream:
                        stream.close()
            if self._child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(1)
            if self._child.poll() is None:
                self._child.kill()
            self._child.wait()
            self._child = None


def child() -> int:
    """Load, tokenize, decode eight tokens: one line per path on stdin."""
    import ctypes
    import resource

    import llama_cpp as lib

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    def quiet(_level: int, _text: bytes, _data: object) -> None:
        return

    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    for line in sys.stdin:
        print(load(lib, ctypes, line.strip()), flush=True)
    return 0


def load(lib, ctypes, path: str) -> str:  # type: ignore[no-untyped-def]
    options = lib.llama_model_default_params()
    options.n_gpu_layers = 0
    options.use_extra_bufts = False
    model = lib.llama_model_load_from_file(path.encode(), options)
    if not model:
        return "refused by the loader"
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 64, 64, 64
    settings.n_threads = settings.n_threads_batch = 1
    context = lib.llama_init_from_model(model, settings)
    if not context:
        lib.llama_model_free(model)
        return "refused at the context"
    vocabulary = lib.llama_model_get_vocab(model)
    text = "Hello, aäb 😀\n<|im_end|>\x01".encode()
    tokens = (ctypes.c_int32 * 128)()
    count = lib.llama_tokenize(vocabulary, text, len(text), tokens, 128, True, True)
    piece = ctypes.create_string_buffer(256)
    for token in range(min(lib.llama_vocab_n_tokens(vocabulary), 300)):
        lib.llama_token_to_piece(vocabulary, token, piece, 256, 0, True)
    # Positions beyond the trained context are the engine's to refuse: learned ones do not exist there.
    room = lib.llama_model_n_ctx_train(model)
    count = max(1, min(count, 8, room - 1))
    result = lib.llama_decode(context, lib.llama_batch_get_one(tokens, count))
    if not result and count < room:
        result = lib.llama_decode(context, lib.llama_batch_get_one(tokens, 1))
    lib.llama_free(context)
    lib.llama_model_free(model)
    return "ok" if result == 0 else f"decode answered {result}"


if __name__ == "__main__":
    sys.exit(child())

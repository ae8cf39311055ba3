"""From a GGUF file to a llama.cpp model and context; everything made so far is freed when a later part fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellama.engine import ggml
from edgellama.engine.base import EngineOptions, LoraAdapter
from edgellama.engine.llamacpp import options as translate
from edgellama.engine.llamacpp.bindings import uses_openmp
from edgellama.engine.llamacpp.log import RING
from edgellama.engine.llamacpp.ticker import Ticker, new_ticker
from edgellama.errors import EngineError, EngineLoadError, MemoryShortageError, NotFoundError, UnsupportedError

OnNode = Callable[[int, bool], bool]
"""`on_node(tensor address, ask)`: see `LlamaEngine`."""
_OUT_OF_MEMORY = re.compile(
    r"(failed|unable) to allocate|out of memory|bad_alloc|cudaMalloc|ErrorOutOfDeviceMemory|insufficient memory", re.I
)


@dataclass(slots=True)
class Loaded:
    """Handles of llama.cpp; `stack` frees them in the right order."""

    library: Any
    model: int
    context: int
    memory: int | None
    """None for models that keep no state (encoders)."""
    ticker: Ticker
    context_tokens: int
    pooling: int
    unified: bool
    threads: tuple[int, int]
    pools: list[ggml.ThreadPools]
    """At most one: what is attached now."""
    stack: contextlib.ExitStack
    load_ticks: int


def load(
    library: Any,
    path: str,
    options: EngineOptions,
    on_progress: Callable[[float], None] | None,
    ticks: list[int],
    on_node: OnNode | None = None,
) -> Loaded:
    """Load model, adapters and context. `ticks[0]` grows while it goes on."""
    translate.check(options)
    with contextlib.ExitStack() as stack:
        model = _load_model(library, path, options, on_progress, ticks)
        stack.callback(library.llama_model_free, model)
        pooling = translate.pooling_type(options, _model_pooling(library, model))
        tokens = options.context_tokens or int(library.llama_model_n_ctx_train(model))
        ticker = new_ticker(library.ggml_abort_callback)
        unified = translate.unified_kv(options, tokens, _long_rope_above(library, model))
        context = _new_context(library, model, options, tokens, pooling, unified, ticker, on_node, stack)
        stack.callback(library.llama_free, context)
        memory = library.llama_get_memory(context)
        _check_purpose(library, model, memory, options)
        threads = translate.threads(options)
        pools: list[ggml.ThreadPools] = []
        stack.callback(close_pools, pools)
        if not uses_openmp():
            pools.append(ggml.ThreadPools(context, *threads))
        _apply_loras(library, model, context, options.loras)
        library.llama_set_embeddings(context, memory is None)
        return Loaded(
            library, model, context, memory, ticker, tokens, pooling, unified, threads, pools, stack.pop_all(), ticks[0]
        )


def close_pools(pools: list[ggml.ThreadPools]) -> None:
    """End the attached thread pool, if any."""
    while pools:
        pools.pop().close()


def metadata(library: Any, model: int, key: str) -> str | None:
    """A value of the file's metadata as text, None when it is missing."""
    buffer = ctypes.create_string_buffer(256)
    length = library.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if length >= 0 else None


def description(library: Any, model: int) -> str:
    """llama.cpp's one-line description: architecture, size, quantization."""
    buffer = ctypes.create_string_buffer(256)
    library.llama_model_desc(model, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


def _load_model(
    library: Any, path: str, options: EngineOptions, on_progress: Callable[[float], None] | None, ticks: list[int]
) -> int:
    if not Path(path).is_file():
        raise NotFoundError(f"{path}: no such model file")
    params = translate.model_params(library, options)
    stopped: list[BaseException] = []

    @library.llama_progress_callback  # type: ignore[untyped-decorator]
    def progress(fraction: float, _data: object) -> bool:
        ticks[0] += 1
        if on_progress is not None and not stopped:
            try:
                on_progress(fraction)
            except BaseException as error:  # noqa: BLE001 - raised again below: it must not pass through C
                stopped.append(error)
        return not stopped

    params.progress_callback = progress
    mark = RING.mark()
    name = path.encode() if sys.platform == "win32" else os.fsencode(path)
    model = library.llama_model_load_from_file(name, params)
    if stopped:
        if model:
            library.llama_model_free(model)
        raise stopped[0]
    if not model:
        raise load_error(f"{path}: llama.cpp could not load the model", mark)
    return int(model)


def _new_context(
    library: Any,
    model: int,
    options: EngineOptions,
    tokens: int,
    pooling: int,
    unified: bool,
    ticker: Ticker,
    on_node: OnNode | None,
    stack: contextlib.ExitStack,
) -> int:
    params = translate.context_params(library, options, tokens, pooling, unified=unified)
    params.abort_callback = ticker.callback
    params.abort_callback_data = ticker.data
    if on_node is not None:
        callback = library.ggml_backend_sched_eval_callback(lambda tensor, ask, _data: on_node(tensor, ask))
        params.cb_eval = callback
        stack.callback(lambda: callback)  # must live as long as the context
    mark = RING.mark()
    context = library.llama_init_from_model(model, params)
    if not context:
        what = f"a context of {tokens:,} tokens x {options.sequences} sequences"
        kinds = f"KV cache {options.kv_type_key}/{options.kv_type_value}, flash attention {options.flash_attention}"
        raise load_error(f"llama.cpp could not make {what} ({kinds})", mark)
    return int(context)


def load_error(what: str, mark: int) -> EngineError | MemoryShortageError:
    """The error for a part that could not be made, with llama.cpp's reasons since `mark`."""
    reason = RING.reason(mark)
    message = f"{what}\n{reason}" if reason else what
    if _OUT_OF_MEMORY.search(reason):
        return MemoryShortageError(message, "use a smaller context, a smaller KV cache type or a smaller model")
    return EngineLoadError(message)


def _model_pooling(library: Any, model: int) -> int:
    architecture = metadata(library, model, "general.architecture") or ""
    text = metadata(library, model, f"{architecture}.pooling_type") or "0"
    return int(text) if text.isdigit() else 0


def _long_rope_above(library: Any, model: int) -> int | None:
    """Context above which LongRoPE's long factors hold, None for models without them."""
    architecture = metadata(library, model, "general.architecture") or ""
    text = metadata(library, model, f"{architecture}.rope.scaling.original_context_length") or ""
    kind = metadata(library, model, f"{architecture}.rope.scaling.type") or "longrope"
    return int(text) if text.isdigit() and kind == "longrope" else None


def _check_purpose(library: Any, model: int, memory: int | None, options: EngineOptions) -> None:
    """Refuse models this engine has no way to run."""
    name = description(library, model)
    if library.llama_vocab_type(library.llama_model_get_vocab(model)) == 0:
        raise UnsupportedError(f"{name}: the file has no tokenizer")
    if library.llama_model_has_encoder(model):
        raise UnsupportedError(f"{name}: models with an encoder and a decoder are not supported")
    if library.llama_model_is_diffusion(model):
        raise UnsupportedError(f"{name}: diffusion models are not supported")
    if memory is None and not options.embeddings:
        raise UnsupportedError(f"{name}: the model makes embeddings and generates no text", "use it for embeddings")


def _apply_loras(library: Any, model: int, context: int, loras: tuple[LoraAdapter, ...]) -> None:
    """Adapters belong to the model, which frees them."""
    if not loras:
        return
    handles = (ctypes.POINTER(ctypes.c_void_p) * len(loras))()
    scales = (ctypes.c_float * len(loras))(*(adapter.scale for adapter in loras))
    for i, adapter in enumerate(loras):
        if not Path(adapter.path).is_file():
            raise NotFoundError(f"{adapter.path}: no such adapter file")
        mark = RING.mark()
        handle = library.llama_adapter_lora_init(model, os.fsencode(adapter.path))
        if not handle:
            raise load_error(f"{adapter.path}: llama.cpp could not load the LoRA adapter", mark)
        handles[i] = handle
    if library.llama_set_adapters_lora(context, handles, len(loras), scales) != 0:
        raise EngineLoadError(f"llama.cpp refused the adapters {', '.join(a.path for a in loras)}")

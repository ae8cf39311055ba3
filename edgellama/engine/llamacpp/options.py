"""EngineOptions as llama.cpp's parameter structs."""

from __future__ import annotations

import ctypes
from typing import Any

from edgellama.engine import bounds
from edgellama.engine.base import EngineOptions, KVType
from edgellama.engine.ggml import MAX_THREADS
from edgellama.engine.threads import default_threads

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
_MIN_ROWS = 64
_KV_TYPES: dict[KVType, int] = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
_FLASH = {"auto": -1, "off": 0, "on": 1}
_POOLING = {"model": -1, "none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
MEAN = _POOLING["mean"]
_NO_DEVICES = (ctypes.c_void_p * 1)(None)


def check(options: EngineOptions) -> None:
    """Raise `UsageError` for values that would abort or overflow inside llama.cpp."""
    bounds.check(options, most_sequences=MAX_SEQUENCES, most_threads=MAX_THREADS)


def threads(options: EngineOptions) -> tuple[int, int]:
    """Threads for steps and for prompts."""
    for_steps = options.threads or default_threads()
    return for_steps, options.prefill_threads or for_steps


def model_params(library: Any, options: EngineOptions) -> Any:
    """`llama_model_params` without its callbacks."""
    params = library.llama_model_default_params()
    params.n_gpu_layers = options.gpu_layers
    params.use_extra_bufts = options.repack_weights
    params.load_mode = int(options.use_mmap) | int(options.use_mlock) << 1
    if options.gpu_layers == 0:  # else a device would still take the KV cache and large products
        params.devices = ctypes.addressof(_NO_DEVICES)
    return params


def unified_kv(options: EngineOptions, context_tokens: int, long_rope_above: int | None) -> bool:
    """Whether the sequences share one cache.

    In a shared one llama.cpp takes the whole pool for the context of each, and beyond `long_rope_above` tokens LongRoPE
    has other factors: then a short context would be computed as a long one, so the sequences get caches of their own.
    """
    if long_rope_above is not None and context_tokens <= long_rope_above < context_tokens * options.sequences:
        return False
    return options.unified_kv


def context_params(library: Any, options: EngineOptions, context_tokens: int, pooling: int, *, unified: bool) -> Any:
    """`llama_context_params` for `context_tokens` per sequence, without the abort callback.

    `n_ctx` is the whole pool. Rows of logits are limited because llama.cpp reserves vocabulary x rows x 4 bytes.
    """
    params = library.llama_context_default_params()
    params.n_ctx = context_tokens * options.sequences
    params.n_seq_max = options.sequences
    params.n_batch = options.batch_tokens
    params.n_ubatch = min(options.batch_tokens, options.micro_batch_tokens)
    params.n_outputs_max = logits_rows(options)
    params.n_threads, params.n_threads_batch = threads(options)
    params.flash_attn_type = _FLASH[options.flash_attention]
    params.type_k = _KV_TYPES[options.kv_type_key]
    params.type_v = _KV_TYPES[options.kv_type_value]
    params.kv_unified = unified
    params.offload_kqv = params.op_offload = options.gpu_layers != 0
    params.pooling_type = pooling
    if options.embeddings:  # a pooled sequence must lie in one micro-batch, and makes every token an output
        params.n_ubatch = params.n_batch
        params.n_outputs_max = 0
        params.embeddings = True
    return params


def logits_rows(options: EngineOptions) -> int:
    """Most rows of logits that one call to llama.cpp computes."""
    wanted = options.logits_rows or _MIN_ROWS
    return min(max(wanted, options.sequences), max(options.batch_tokens, options.sequences))


def pooling_type(options: EngineOptions, of_model: int) -> int:
    """llama.cpp's pooling number: the option's, else the model's (0 or less: it has none), else the mean."""
    if not options.embeddings:
        return _POOLING["model"]
    wanted = _POOLING[options.pooling]
    if wanted >= 0:
        return wanted
    return of_model if of_model > 0 else MEAN

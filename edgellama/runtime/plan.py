"""Whether a model fits into memory, before it is loaded: weights, KV cache, compute buffers against what there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from edgellama.engine.base import EngineOptions, KVType
from edgellama.errors import MemoryShortageError

if TYPE_CHECKING:
    from edgellama.gguf_io import Header
    from edgellama.runtime.model import ModelSpec

DEFAULT_CONTEXT_TOKENS = 8192
"""When nobody asks for a length: a trained context of 128k would take gigabytes that most chats never use."""
LEAST_CONTEXT_TOKENS = 512
_PROCESS_BYTES = 96 << 20
"""Python, NumPy and the engine's library in the worker."""
_LOGITS_ROWS = 64
"""Rows of logits that the engine reserves unless told otherwise."""
_CELL_PADDING = 256
_MIB = 1 << 20

# (bytes, elements) of a block: ggml's type traits.
_BLOCKS: dict[KVType, tuple[int, int]] = {
    "f32": (4, 1),
    "f16": (2, 1),
    "bf16": (2, 1),
    "q8_0": (34, 32),
    "q5_1": (24, 32),
    "q5_0": (22, 32),
    "q4_1": (20, 32),
    "q4_0": (18, 32),
    "iq4_nl": (18, 32),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps per token (numbers in K and V) or per sequence (`state_bytes`)."""

    key: int = 0
    value: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides the size of cache and compute buffers."""

    layers: tuple[Layer, ...] = ()
    embedding: int = 0
    feed_forward: int = 0
    heads: int = 0
    vocabulary: int = 0
    masks: int = 1
    """Attention masks: models with sliding windows have one for the windows and one for the rest."""

    @classmethod
    def from_header(cls, header: Header) -> CacheShape:
        """Grouped heads, heads per layer, compressed (MLA) caches and recurrent states included."""
        key = header.key_length
        value = 0 if header.number("attention.key_length_mla") else header.value_length  # MLA reads V out of K
        state = _recurrent_bytes(header)
        layers = [Layer(heads * key, heads * value, 0 if heads else state) for heads in header.head_counts_kv]
        experts = header.number("expert_used_count") * header.number("expert_feed_forward_length")
        return cls(
            tuple(layers) or (Layer(state_bytes=state),) * header.layers,
            header.embedding_length,
            max(header.number("feed_forward_length"), experts),
            max(header.head_counts, default=0),
            header.vocabulary_tokens,
            2 if header.number("attention.sliding_window") else 1,
        )


def _recurrent_bytes(header: Header) -> int:
    inner, state = header.number("ssm.inner_size"), header.number("ssm.state_size")
    return 4 * inner * (state + max(0, header.number("ssm.conv_kernel") - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Predicted bytes against the limit."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    other_bytes: int
    limit_bytes: int
    """What may be used: available memory minus the reserve."""
    reserve_bytes: int
    """Left to the system and everything else."""
    options: EngineOptions

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.other_bytes

    @property
    def fits(self) -> bool:
        """Whether it may be loaded."""
        return self.total_bytes <= self.limit_bytes


def predict(spec: ModelSpec, options: EngineOptions, available_bytes: int) -> Plan:
    """The plan for a model at given options, with `context_tokens` set."""
    reserve = min(512 * _MIB, available_bytes // 10)
    return Plan(
        weights_bytes=spec.weights_bytes,
        kv_bytes=kv_bytes(spec.shape, options),
        compute_bytes=compute_bytes(spec.shape, options),
        other_bytes=_PROCESS_BYTES if spec.engine != "fake" else 0,
        limit_bytes=available_bytes - reserve,
        reserve_bytes=reserve,
        options=options,
    )


def kv_bytes(shape: CacheShape, options: EngineOptions) -> int:
    """Bytes of the KV cache of all sequences.

    Sliding-window layers count in full: the engine asks llama.cpp for that (`swa_full`), since a window's cache can
    neither be cut back nor shared between sequences.
    """
    cells = _padded(options.context_tokens) * options.sequences
    total = 0
    for layer in shape.layers:
        total += cells * (_row_bytes(layer.key, options.kv_type_key) + _row_bytes(layer.value, options.kv_type_value))
        total += layer.state_bytes * options.sequences
    return total


def compute_bytes(shape: CacheShape, options: EngineOptions) -> int:
    """Scratch memory of one micro batch: what llama.cpp reserves for logits or activations, attention scores where
    flash attention does not avoid them, and the mask. Within a tenth of its own figures for Llama models."""
    batch = min(options.batch_tokens, options.micro_batch_tokens)
    cells = _padded(options.context_tokens) * (options.sequences if options.unified_kv else 1)
    activations = 4 * batch * (2 * shape.feed_forward + 4 * shape.embedding)
    logits = 4 * shape.vocabulary * max(options.logits_rows or _LOGITS_ROWS, options.sequences)
    flash = options.flash_attention != "off"
    scores = 0 if flash else 4 * batch * shape.heads * cells
    masks = batch * cells * (2 if flash else 4) * shape.masks
    return max(logits, activations + scores) + masks + 4 * batch * shape.embedding


def _row_bytes(elements: int, kind: KVType) -> int:
    size, block = _BLOCKS[kind]
    return -(-elements // block) * size


def _padded(tokens: int) -> int:
    return -(-tokens // _CELL_PADDING) * _CELL_PADDING


def choose(spec: ModelSpec, available_bytes: int) -> Plan:
    """Options with a context length that fits, as near to what was asked as allowed.

    An asked length is kept or refused; without one, up to `DEFAULT_CONTEXT_TOKENS` as memory allows.
    Raises `MemoryShortageError` with the figures.
    """
    asked = spec.options.context_tokens
    trained = spec.trained_context_tokens or DEFAULT_CONTEXT_TOKENS
    context = asked or min(trained, DEFAULT_CONTEXT_TOKENS)
    plan = predict(spec, _with_context(spec, context), available_bytes)
    while not plan.fits and not asked and context > LEAST_CONTEXT_TOKENS:
        context = max(LEAST_CONTEXT_TOKENS, context // 2)
        plan = predict(spec, _with_context(spec, context), available_bytes)
    if not plan.fits:
        raise MemoryShortageError(_shortage(spec, plan), _advice(spec, plan, available_bytes))
    return plan


def _with_context(spec: ModelSpec, tokens: int) -> EngineOptions:
    return msgspec.structs.replace(spec.options, context_tokens=tokens)


def _shortage(spec: ModelSpec, plan: Plan) -> str:
    parts = {
        "weights": plan.weights_bytes,
        "KV cache": plan.kv_bytes,
        "compute": plan.compute_bytes,
        "program": plan.other_bytes,
    }
    figures = ", ".join(f"{name} {size / _MIB:,.0f}" for name, size in parts.items())
    return (
        f"{spec.name} needs {plan.total_bytes / _MIB:,.0f} MiB ({figures}; {plan.options.context_tokens} tokens of "
        f"context x {plan.options.sequences}), {max(0, plan.limit_bytes) / _MIB:,.0f} MiB may be used "
        f"({plan.reserve_bytes / _MIB:,.0f} MiB are left to the system)"
    )


def _advice(spec: ModelSpec, plan: Plan, available_bytes: int) -> str:
    ways = []
    if (context := _longest_context(spec, plan, available_bytes)) is not None:
        trained = spec.trained_context_tokens
        words = f", the model was trained for {trained:,} tokens" if trained else ""
        ways.append(f"a shorter context (--ctx {context} fits{words})")
    if plan.options.sequences > 1:
        ways.append("fewer sequences (--parallel 1)")
    smaller = msgspec.structs.replace(plan.options, kv_type_key="q8_0", kv_type_value="q8_0")
    if plan.options.kv_type_key in {"f32", "f16", "bf16"} and predict(spec, smaller, available_bytes).fits:
        ways.append("a smaller cache type (--kv-type q8_0)")
    ways.append("a smaller model or recipe (edgellama recommend)")
    return f"close other programs, or try {', '.join(ways)}"


def _longest_context(spec: ModelSpec, plan: Plan, available_bytes: int) -> int | None:
    """The longest context in whole cells that fits and that the model was trained for; None when none is shorter."""
    high = plan.options.context_tokens // _CELL_PADDING
    if spec.trained_context_tokens:
        high = min(high, spec.trained_context_tokens // _CELL_PADDING)
    low = LEAST_CONTEXT_TOKENS // _CELL_PADDING - 1
    while low < high:
        middle = (low + high + 1) // 2
        options = _with_context(spec, middle * _CELL_PADDING)
        if predict(spec, options, available_bytes).fits:
            low = middle
        else:
            high = middle - 1
    context = low * _CELL_PADDING
    return context if LEAST_CONTEXT_TOKENS <= context < plan.options.context_tokens else None

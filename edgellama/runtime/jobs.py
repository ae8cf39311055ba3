"""What the worker computes between steps, beside answers: the ladder's probe, and embeddings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import Batch, Engine, EngineOptions
from edgellama.errors import ContextOverflowError, UnsupportedError, UsageError
from edgellama.runtime.messages import MAX_FRAME_BYTES, Embedded, EmbedTexts, Probe, Probed

PROBE_TEXT = (
    "The quick brown fox jumps over the lazy dog. 2 + 2 = 4, and Paris is the capital of France.\n"
    "def add(a, b):\n    return a + b\n"
)
_PROBE_ROWS = 16
_ROOM_BYTES = MAX_FRAME_BYTES - (1 << 16)


def probe(engine: Engine, options: EngineOptions, message: Probe) -> Probed:
    """Decode the probe in sequence 0, which must be empty and is emptied again.

    All but the last `one_by_one` tokens go in batches, these one at a time: prompts and steps run different kernels.
    """
    tokens = message.tokens or tuple(engine.tokenizer.tokenize(PROBE_TEXT, add_bos=True))
    tokens = tokens[: engine.info.context_tokens]
    vocabulary = engine.info.vocabulary_tokens
    if not tokens or not all(0 <= token < vocabulary for token in tokens):
        raise UsageError(f"a probe of {len(tokens)} tokens does not fit a vocabulary of {vocabulary:,}")
    rows = max(1, min(_PROBE_ROWS, len(tokens), _ROOM_BYTES // (4 * vocabulary)))
    logits = np.empty((rows, vocabulary), np.float32)
    begun = time.perf_counter()
    filled = 0
    for start, stop in _probe_parts(len(tokens), message.one_by_one, options.batch_tokens):
        batch = Batch.one_sequence(tokens[start:stop], start, logits="none")
        batch.want_logits[:] = batch.positions >= len(tokens) - rows
        found = engine.decode(batch)
        logits[filled : filled + len(found)] = found
        filled += len(found)
    seconds = time.perf_counter() - begun
    engine.remove_sequence(0)
    return Probed(tokens=tokens, logits=logits.astype("<f4").tobytes(), seconds=seconds)


def _probe_parts(count: int, one_by_one: int, batch_tokens: int) -> Iterator[tuple[int, int]]:
    together = max(count - max(one_by_one, 0), 1)
    for start in range(0, together, batch_tokens):
        yield start, min(start + batch_tokens, together)
    for start in range(together, count):
        yield start, start + 1


def embed(engine: Engine, options: EngineOptions, message: EmbedTexts) -> Embedded:
    """Vectors of texts, in batches of as many sequences as the engine has. All sequences must be empty."""
    if not (options.embeddings and engine.capabilities.embeddings):
        raise UnsupportedError("this model was not loaded for embeddings", "load it with embeddings on")
    prompts = [engine.tokenizer.tokenize(text, add_bos=True) for text in message.texts]
    limit = min(options.batch_tokens, options.micro_batch_tokens, engine.info.context_tokens)
    for place, tokens in enumerate(prompts):
        if not tokens:
            raise UsageError(f"text {place + 1} is empty: it has no vector")
        if len(tokens) > limit:
            raise ContextOverflowError(len(tokens), limit, f"shorten text {place + 1}")
    if len(prompts) * engine.info.embedding_length * 4 > _ROOM_BYTES:
        raise UsageError(f"{len(prompts):,} texts are too many for one answer", "send fewer at a time")
    found = [_normalized(engine.embed(batch)) for batch in _embed_batches(prompts, engine.info.sequences, limit)]
    vectors = np.concatenate(found) if found else np.empty((0, engine.info.embedding_length), np.float32)
    total = sum(map(len, prompts))
    return Embedded(call_id=message.call_id, vectors=vectors.astype("<f4").tobytes(), tokens=total)


def _embed_batches(prompts: Sequence[Sequence[int]], sequences: int, limit: int) -> Iterator[Batch]:
    group: list[Sequence[int]] = []
    for prompt in prompts:
        if group and (len(group) == sequences or sum(map(len, group)) + len(prompt) > limit):
            yield _embed_batch(group)
            group = []
        group.append(prompt)
    if group:
        yield _embed_batch(group)


def _embed_batch(group: Sequence[Sequence[int]]) -> Batch:
    lengths = [len(prompt) for prompt in group]
    return Batch(
        np.concatenate([np.asarray(prompt, np.int32) for prompt in group]),
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        np.repeat(np.arange(len(group), dtype=np.int32), lengths),
        np.ones(sum(lengths), np.bool_),
    )


def _normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; a row of zeros stays one."""
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    return (vectors / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)

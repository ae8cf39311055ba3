"""Perplexity and KL divergence in the measuring process: an engine's logits against a text, or against a base."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgellama.engine import factory
from edgellama.engine.base import Engine
from edgellama.errors import DiskFullError, UsageError
from edgellama.evaluate import chunks, logits_file
from edgellama.evaluate.jobs import Answer, DivergenceJob, Job, Measured, PerplexityJob, Progress
from edgellama.evaluate.statistics import Divergence, Perplexity
from edgellama.files import free_bytes, replacing

Tell = Callable[[Answer], None]
OnLoad = Callable[[float], None]


@contextlib.contextmanager
def opened(job: Job, on_load: OnLoad) -> Iterator[Engine]:
    """The job's engine, closed at the end."""
    engine = factory(job.engine)(job.model, job.options, on_load)
    try:
        yield engine
    finally:
        engine.close()


def perplexity(job: PerplexityJob, tell: Tell, on_load: OnLoad) -> Measured:
    """Perplexity of a text, and its distributions as a file if asked."""
    text = chunks.read_text(job.text)
    context = job.options.context_tokens
    sums = Perplexity()
    with opened(job, on_load) as engine:
        tokens = chunks.cut(engine.tokenizer, text, context, job.chunks, job.text)
        total = tokens.size // context
        with _saving(job.save_logits, context, engine.tokenizer.size, tokens) as out:
            for part in chunks.decode(engine, tokens, context):
                sums.add(part.logits, part.targets)
                if out is not None:
                    out.write(logits_file.encode(part.logits).astype("<u2", copy=False).tobytes())
                tell(Progress(part.chunk + 1, total, sums.figures() if sums.count else {}))
    return Measured(sums.figures(), total, context, sums.count)


@contextlib.contextmanager
def _saving(path: str | None, context: int, vocabulary: int, tokens: NDArray[np.int32]) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
        return
    target = Path(path)
    size, free = logits_file.file_bytes(context, vocabulary, tokens.size // context), free_bytes(target.parent)
    if size > free:
        raise DiskFullError(
            f"{target}: {size:,} bytes are needed, {free:,} are free there",
            "measure fewer --chunks, or free some space",
        )
    with replacing(target) as stream:
        logits_file.write_header(stream, context, vocabulary, tokens)
        yield stream


def divergence(job: DivergenceJob, tell: Tell, on_load: OnLoad) -> Measured:
    """Divergence from a base's distributions."""
    base = logits_file.LogitsFile.open(job.base)
    context = job.options.context_tokens
    if base.context != context:
        raise UsageError(f"{job.base} has chunks of {base.context} tokens, not {context}")
    count = min(job.chunks, base.chunks) if job.chunks else base.chunks
    tokens = base.tokens[: count * context]
    sums = Divergence()
    with base.stream, opened(job, on_load) as engine:
        if engine.tokenizer.size != base.vocabulary:
            raise UsageError(
                f"{job.base} has a vocabulary of {base.vocabulary} tokens, the model one of {engine.tokenizer.size}",
                "compare models that share their tokenizer",
            )
        for part in chunks.decode(engine, tokens, context):
            if len(part.targets):
                sums.add(part.logits, base.rows(len(part.targets)), part.targets)
                tell(Progress(part.chunk + 1, count, sums.running()))
    return Measured(sums.figures(), count, context, sums.model.count)

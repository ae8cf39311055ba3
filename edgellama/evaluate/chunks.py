"""A text cut into chunks, each decoded from an empty context: the positions of its second half are what counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import Batch, Engine, Tokenizer
from edgellama.errors import NotFoundError, UsageError
from edgellama.evaluate.logits_file import first_position

BATCH_TOKENS = 2048
LOGITS_LIMIT_BYTES = 512 << 20
MIN_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Logits of consecutive positions of one chunk, and the tokens that follow them."""

    chunk: int
    logits: NDArray[np.float32]
    """float32[n, vocabulary]; valid until the next part is asked for."""
    targets: NDArray[np.int32]
    complete: bool
    """Whether nothing of its chunk comes after it."""


def read_text(path: str | Path) -> str:
    """A text file without its last line end, as llama.cpp's tools read it. Raises NotFoundError, UsageError."""
    file = Path(path)
    if not file.is_file():
        raise NotFoundError(f"{file}: no such text file")
    data = file.read_bytes()
    try:
        return data.removesuffix(b"\n").decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: byte {error.start:,} is not UTF-8", "convert the text to UTF-8") from error


def cut(tokenizer: Tokenizer, text: str, context: int, chunks: int, what: str) -> NDArray[np.int32]:
    """Tokens int32[n * context] of the first `chunks` chunks of a text (0: all)."""
    tokens = tokenizer.tokenize(text, add_bos=True)
    available = len(tokens) // context
    if available < 1:
        raise UsageError(
            f"{what} has {len(tokens)} tokens, one chunk needs {context}", "give a longer text or a smaller --ctx"
        )
    count = min(chunks, available) if chunks else available
    return np.asarray(tokens[: count * context], np.int32)


def sequences_at_once(context: int, vocabulary: int) -> int:
    """How many chunks are decoded together: llama-perplexity's number, unless their logits take too much memory."""
    chunk_bytes = (context - first_position(context)) * vocabulary * 4
    return max(1, min(BATCH_TOKENS // context, LOGITS_LIMIT_BYTES // max(1, chunk_bytes)))


def decode(engine: Engine, tokens: NDArray[np.int32], context: int, *, everything: bool = False) -> Iterator[Part]:
    """Decode all chunks; yields the counted positions in order (`everything`: all, as importance matrices need it)."""
    sequences = engine.info.sequences
    total = tokens.size // context
    for start in range(0, total, sequences):
        group = range(start, min(start + sequences, total))
        for sequence in range(sequences):
            engine.remove_sequence(sequence)
        step = min(context, BATCH_TOKENS)
        for first in range(0, context, step):
            yield from _decode_part(engine, tokens, context, group, first, min(first + step, context), everything)


def _decode_part(
    engine: Engine, tokens: NDArray[np.int32], context: int, group: range, first: int, stop: int, everything: bool
) -> Iterator[Part]:
    """Positions [first, stop) of the chunks in `group`, as one batch."""
    counted = range(max(first, first_position(context)), min(stop, context - 1))
    table = tokens.reshape(-1, context)[group.start : group.stop]
    given = table[:, first:stop].copy()
    if first == 0 and engine.tokenizer.adds_bos:
        given[:, 0] = engine.tokenizer.bos
    positions = np.arange(first, stop, dtype=np.int32)
    want = (positions >= counted.start) & (positions < counted.stop)
    want |= everything
    count = len(group)
    logits = engine.decode(
        Batch(
            given.reshape(-1),
            np.tile(positions, count),
            np.repeat(np.arange(count, dtype=np.int32), stop - first),
            np.tile(want, count),
        )
    )
    rows = int(want.sum())
    skipped = max(0, counted.start - first) if everything else 0
    for index, chunk in enumerate(group):
        own = logits[index * rows + skipped : index * rows + skipped + len(counted)]
        yield Part(chunk, own, table[index, counted.start + 1 : counted.stop + 1], stop == context)

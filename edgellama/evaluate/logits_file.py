"""The file of log-probabilities that llama-perplexity writes and reads, so that one model can be compared to another.

Layout, little-endian: `_logits_`, u32 context, i32 vocabulary, i32 chunks, i32 tokens[chunks * context]; then for each
chunk and each position from context / 2 to context - 2: f32 scale, f32 minimum, u16 level[vocabulary] (one more where
the vocabulary is odd). A log-probability is scale * level + minimum, at least 16 below the largest.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import InvalidFileError, NotFoundError

MAGIC = b"_logits_"
LEVELS = 65535
DEPTH = 16.0
_HEADER = struct.Struct("<Iii")
_MAX_VOCABULARY, _MAX_CHUNKS = 1 << 21, 1 << 24


def first_position(context: int) -> int:
    """The first position of a chunk that counts: before it the model has seen too little."""
    return context // 2


def rows_per_chunk(context: int) -> int:
    """Positions of a chunk that count; the last one has no next token."""
    return context - 1 - first_position(context)


def row_words(vocabulary: int) -> int:
    """16-bit words of a row: four for scale and minimum, then an even number of levels."""
    return 2 * ((vocabulary + 1) // 2) + 4


def file_bytes(context: int, vocabulary: int, chunks: int) -> int:
    """Size of a whole file."""
    rows = chunks * rows_per_chunk(context)
    return len(MAGIC) + _HEADER.size + 4 * chunks * context + 2 * rows * row_words(vocabulary)


def encode(logits: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32[rows, vocabulary] -> uint16[rows, row_words]."""
    rows, vocabulary = logits.shape
    out = np.zeros((rows, row_words(vocabulary)), np.uint16)
    largest = logits.max(axis=1)
    smallest = np.maximum(logits.min(axis=1), largest - np.float32(DEPTH))
    spread = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
    scale = ((largest - smallest) / np.float32(LEVELS)).astype(np.float32)
    heads = out[:, :4].view(np.float32)
    heads[:, 0], heads[:, 1] = scale, smallest - largest - np.log(spread).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    levels = np.maximum(logits - smallest[:, None], 0) * inverse[:, None]
    out[:, 4 : 4 + vocabulary] = np.rint(levels).astype(np.uint16)
    return out


def decode(rows: NDArray[np.uint16], vocabulary: int) -> NDArray[np.float32]:
    """uint16[rows, row_words] -> log-probabilities float32[rows, vocabulary]."""
    heads = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    return heads[:, :1] * rows[:, 4 : 4 + vocabulary].astype(np.float32) + heads[:, 1:2]


def write_header(stream: BinaryIO, context: int, vocabulary: int, tokens: NDArray[np.int32]) -> None:
    """Everything before the rows; `tokens` are int32[chunks * context]."""
    stream.write(MAGIC + _HEADER.pack(context, vocabulary, tokens.size // context) + tokens.astype("<i4").tobytes())


@dataclass(slots=True)
class LogitsFile:
    """A file opened for reading; `rows` goes through its chunks in order."""

    path: str
    context: int
    vocabulary: int
    chunks: int
    tokens: NDArray[np.int32]
    """int32[chunks * context]."""
    stream: BinaryIO

    @classmethod
    def open(cls, path: str | Path) -> LogitsFile:
        """Open and check a file. Raises NotFoundError, InvalidFileError."""
        file = Path(path)
        if not file.is_file():
            raise NotFoundError(f"{file}: no such file of log-probabilities", "write one with eval ppl --save-logits")
        stream = file.open("rb")
        try:
            return cls._read(str(file), stream)
        except BaseException:
            stream.close()
            raise

    @classmethod
    def _read(cls, path: str, stream: BinaryIO) -> LogitsFile:
        if stream.read(len(MAGIC)) != MAGIC:
            raise InvalidFileError(
                f"{path}: this is no file of log-probabilities", "write one with eval ppl --save-logits"
            )
        head = stream.read(_HEADER.size)
        size = os.fstat(stream.fileno()).st_size
        if len(head) < _HEADER.size:
            raise InvalidFileError(f"{path}: the file ends after {size} bytes, inside its header")
        context, vocabulary, chunks = _HEADER.unpack(head)
        if not (4 <= context < 2**31 and 0 < vocabulary <= _MAX_VOCABULARY and 0 < chunks <= _MAX_CHUNKS):
            raise InvalidFileError(
                f"{path}: context {context}, vocabulary {vocabulary} and {chunks} chunks are impossible"
            )
        expected = file_bytes(context, vocabulary, chunks)
        if size != expected:
            raise InvalidFileError(
                f"{path}: the file has {size:,} bytes, {chunks} chunks need {expected:,}",
                "it was cut while it was written or copied: write it again",
            )
        tokens = np.frombuffer(stream.read(4 * chunks * context), "<i4").astype(np.int32)
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise InvalidFileError(f"{path}: a token is outside the vocabulary of {vocabulary}")
        return cls(path, context, vocabulary, chunks, tokens, stream)

    def rows(self, count: int) -> NDArray[np.float32]:
        """The next `count` rows as log-probabilities float32[count, vocabulary]."""
        words = row_words(self.vocabulary)
        data = self.stream.read(2 * count * words)
        if len(data) < 2 * count * words:
            raise InvalidFileError(f"{self.path}: the file became shorter while it was read")
        return decode(np.frombuffer(data, "<u2").reshape(count, words), self.vocabulary)

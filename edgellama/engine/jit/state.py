"""Saved sequences of the JIT engine: versioned and checksummed; what does not fit is refused before it is used."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import InvalidFileError

_MAGIC = b"edgellama-jit\0"
_VERSION = 1
_HEADER = struct.Struct("<14sHIQ16s16s")  # magic, version, cells, payload bytes, layout hash, payload hash


def layout(model: bytes, *words: str) -> bytes:
    """Hash over all that gives a state its meaning: the model, the cache's types, the RoPE rules, adapters."""
    return hashlib.blake2b(model + "\0".join(words).encode(), digest_size=16).digest()


def seal(positions: NDArray[np.intp], content: bytes, layout_hash: bytes) -> bytes:
    """The state of a sequence that holds `positions`."""
    payload = positions.astype("<i4").tobytes() + content
    digest = hashlib.blake2b(payload, digest_size=16).digest()
    return _HEADER.pack(_MAGIC, _VERSION, len(positions), len(payload), layout_hash, digest) + payload


def unseal(state: bytes, layout_hash: bytes, context: int) -> tuple[NDArray[np.intp], memoryview]:
    """(positions, content) of a sealed state.

    Raises `InvalidFileError` when it is damaged, foreign, of another layout, or longer than `context`.
    """
    if len(state) < _HEADER.size:
        raise InvalidFileError(f"a saved sequence of {len(state)} bytes is too short")
    magic, version, cells, size, found_layout, digest = _HEADER.unpack_from(state)
    payload = memoryview(state)[_HEADER.size :]
    if magic != _MAGIC:
        raise InvalidFileError("this is no saved sequence of the engine jit")
    if version != _VERSION:
        raise InvalidFileError(f"the saved sequence has format {version}, this version reads {_VERSION}")
    if size != len(payload) or hashlib.blake2b(payload, digest_size=16).digest() != digest:
        raise InvalidFileError(f"the saved sequence is damaged: {len(payload):,} of {size:,} bytes, or changed ones")
    if found_layout != layout_hash:
        raise InvalidFileError("the saved sequence belongs to another model or KV cache type")
    if 4 * cells > len(payload):
        raise InvalidFileError(f"the saved sequence is damaged: {cells:,} positions in {len(payload):,} bytes")
    positions = np.frombuffer(payload, "<i4", cells).astype(np.intp)
    if cells and (positions[0] < 0 or (np.diff(positions) < 1).any()):
        raise InvalidFileError("the saved sequence is damaged: its positions do not ascend")
    if cells and positions[-1] >= context:
        raise InvalidFileError(f"the saved sequence has {positions[-1] + 1} tokens, the context holds {context}")
    return positions, payload[4 * cells :]

"""The envelope around llama.cpp's sequence state: what does not fit is refused before native code reads it."""

from __future__ import annotations

import hashlib
import struct

from edgellama.engine.base import EngineOptions
from edgellama.errors import InvalidFileError

_MAGIC = b"edgellama-seq\0"
_VERSION = 1
_HEADER = struct.Struct("<14sHIQ16s16s")  # magic, version, positions, payload bytes, layout hash, payload hash
HEADER_BYTES = _HEADER.size


def layout(options: EngineOptions, model: str, build: str) -> bytes:
    """Hash over all that gives a state its meaning: model, KV types, attention layout, adapters, llama.cpp version."""
    words = (
        model,
        build,
        options.kv_type_key,
        options.kv_type_value,
        options.flash_attention,
        *(f"{adapter.path}*{adapter.scale}" for adapter in options.loras),
    )
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).digest()


def seal(buffer: bytearray, positions: int, layout_hash: bytes) -> bytes:
    """Write the header into the first `HEADER_BYTES` of `buffer`, whose rest is the payload."""
    payload = memoryview(buffer)[HEADER_BYTES:]
    digest = hashlib.blake2b(payload, digest_size=16).digest()
    _HEADER.pack_into(buffer, 0, _MAGIC, _VERSION, positions, len(payload), layout_hash, digest)
    return bytes(buffer)


def unseal(state: bytes, layout_hash: bytes) -> tuple[int, memoryview]:
    """(positions, payload) of a sealed state. Raises `InvalidFileError` when it is damaged or of another layout."""
    if len(state) < HEADER_BYTES:
        raise InvalidFileError(f"a saved sequence of {len(state)} bytes is too short")
    magic, version, positions, size, found_layout, digest = _HEADER.unpack_from(state)
    payload = memoryview(state)[HEADER_BYTES:]
    if magic != _MAGIC:
        raise InvalidFileError("this is no saved sequence of the engine llamacpp")
    if version != _VERSION:
        raise InvalidFileError(f"the saved sequence has format {version}, this version reads {_VERSION}")
    if size != len(payload) or hashlib.blake2b(payload, digest_size=16).digest() != digest:
        raise InvalidFileError(f"the saved sequence is damaged: {len(payload):,} of {size:,} bytes, or changed ones")
    if found_layout != layout_hash:
        raise InvalidFileError("the saved sequence belongs to another model, KV cache type or llama.cpp version")
    return positions, payload

"""A cheap identity of a model file, for caches of what was measured about it."""

from __future__ import annotations

import os

from edgellama.gguf_io.header import Header, read
from edgellama.gguf_io.source import open_regular, unreadable


def file_identity(model: str | os.PathLike[str] | Header) -> str:
    """Hash over header bytes, size, modification time and inode of every file of the model, 32 hex digits.

    It changes with the file's content in every ordinary way of changing it, but is no proof of content: that is
    SHA-256 at pull. Raises as `read` does.
    """
    import hashlib

    header = model if isinstance(model, Header) else read(model)
    digest = hashlib.blake2b(digest_size=16)
    for path, header_bytes in zip(header.paths, header.header_bytes, strict=True):
        stream, info = open_regular(path)
        with stream:
            digest.update(f"{info.st_size} {info.st_mtime_ns} {info.st_ino} ".encode())
            left = header_bytes
            try:
                while left and (chunk := stream.read(min(left, 1 << 20))):
                    digest.update(chunk)
                    left -= len(chunk)
            except OSError as error:
                raise unreadable(path, error) from error
    return digest.hexdigest()

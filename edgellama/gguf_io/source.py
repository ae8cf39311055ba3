"""Plain chunked reading of a file: never memory-mapped, so that a stick pulled out is an error, not a crash."""

from __future__ import annotations

import os
import stat
import struct
from io import FileIO

from edgellama.errors import GGUFError, InvalidFileError, NotFoundError
from edgellama.gguf_io.types import MAX_HEADER_BYTES

_CHUNK = 1 << 20
_FIRST_CHUNK = 1 << 16
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

DOWNLOAD_AGAIN = "the file is incomplete or damaged; fetch it again (edgellama pull resumes where it stopped)"


def open_regular(path: str) -> tuple[FileIO, os.stat_result]:
    """Open a regular file unbuffered. Pipes and devices are refused, since opening them may wait for ever."""
    try:
        info = os.stat(path)  # noqa: PTH116  (a plain string keeps start-up free of pathlib)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{path}: no such file", "edgellama list shows the models you have") from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(info.st_mode):
        what = "a folder" if stat.S_ISDIR(info.st_mode) else "no regular file"
        raise InvalidFileError(f"{path}: is {what}, expected a GGUF file")
    try:
        return FileIO(path, "rb"), info
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: Exception) -> InvalidFileError:
    """The error for a file the system cannot or may not read."""
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, PermissionError):
        return InvalidFileError(f"{path}: {reason}", "allow your user to read it, or copy it to a folder of yours")
    return InvalidFileError(f"{path}: cannot be read: {reason}", "check that the disk is still there and healthy")


class Source:
    """A read cursor over the header of one file, with at most a few megabytes in memory.

    `require` raises `GGUFError` before anything is allocated for bytes the file does not have, or that lie beyond
    what a header may take.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file, info = open_regular(path)
        self.size = info.st_size
        self.buffer = b""
        self.base = 0
        """File offset of `buffer[0]`."""
        self.position = 0
        """Index of the cursor in `buffer`."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def offset(self) -> int:
        """File offset of the cursor."""
        return self.base + self.position

    @property
    def remaining(self) -> int:
        """Bytes between the cursor and the end of the file."""
        return self.size - self.base - self.position

    def error(self, field: str, found: object, expected: object, advice: str = "", offset: int = -1) -> GGUFError:
        """A `GGUFError` at `offset` (default: the cursor)."""
        where = self.offset if offset < 0 else offset
        return GGUFError(self.path, where, field, str(found), str(expected), advice)

    def require(self, count: int, field: str) -> None:
        """Make `count` bytes from the cursor present in `buffer`."""
        if self.position + count <= len(self.buffer):
            return
        self._check_room(count, field)
        rest = self.buffer[self.position :]
        self.base += self.position
        self.position = 0
        self.buffer = rest + self._read(self.base + len(rest), count - len(rest), field)

    def _check_room(self, count: int, field: str) -> None:
        if count > self.remaining:
            raise self.error(
                field, f"a file that ends at byte {self.size:,}", f"{count:,} more bytes here", DOWNLOAD_AGAIN
            )
        if self.offset + count > MAX_HEADER_BYTES:
            raise self.error(field, f"a header of {self.offset + count:,} bytes", f"at most {MAX_HEADER_BYTES:,}")

    def _read(self, offset: int, at_least: int, field: str) -> bytes:
        chunk = _FIRST_CHUNK if offset == 0 else _CHUNK
        goal = min(max(at_least, chunk), self.size - offset)
        parts = []
        have = 0
        try:
            self._file.seek(offset)
            while have < goal:
                part = self._file.read(goal - have)
                if not part:
                    break
                parts.append(part)
                have += len(part)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if have < at_least:
            raise self.error(field, f"a file that shrank to {offset + have:,} bytes", f"{self.size:,} bytes")
        return b"".join(parts)

    def take(self, count: int, field: str) -> bytes:
        """The next `count` bytes."""
        self.require(count, field)
        start = self.position
        self.position = start + count
        return self.buffer[start : start + count]

    def skip(self, count: int, field: str) -> None:
        """Move over `count` bytes without reading them."""
        self._check_room(count, field)
        if self.position + count <= len(self.buffer):
            self.position += count
        else:
            self.base += self.position + count
            self.buffer, self.position = b"", 0

    def u32(self, field: str) -> int:
        self.require(4, field)
        (value,) = _U32.unpack_from(self.buffer, self.position)
        self.position += 4
        return int(value)

    def u64(self, field: str) -> int:
        self.require(8, field)
        (value,) = _U64.unpack_from(self.buffer, self.position)
        self.position += 8
        return int(value)

    def strings(self, count: int, limit: int, field: str, keep: bool) -> list[bytes]:
        """Walk over `count` length-prefixed strings of at most `limit` bytes; returns them if `keep`."""
        kept: list[bytes] = []
        unpack = _U64.unpack_from
        done = 0
        while done < count:
            self.require(8, f"{field}[{done}]")
            buffer, position, last = self.buffer, self.position, len(self.buffer) - 8
            for _ in range(count - done):
                if position > last:
                    break
                following = position + 8 + unpack(buffer, position)[0]
                if following > last + 8:
                    break
                if keep:
                    kept.append(buffer[position + 8 : following])
                position = following
                done += 1
            self.position = position
            if done < count and position <= last:  # the string crosses the chunk, or its length is a lie
                (length,) = unpack(buffer, position)
                self._check_string(length, limit, f"{field}[{done}]")
                self.require(8 + length, f"{field}[{done}]")
        return kept

    def _check_string(self, length: int, limit: int, field: str) -> None:
        if length > limit:
            raise self.error(field, f"a string of {length:,} bytes", f"at most {limit:,} bytes")

    def string(self, limit: int, field: str) -> bytes:
        """One length-prefixed string."""
        start = self.offset
        length = self.u64(f"{field} (length)")
        if length > limit:
            raise self.error(field, f"a string of {length:,} bytes", f"at most {limit:,} bytes", offset=start)
        return self.take(length, field)

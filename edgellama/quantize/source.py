"""Reading slabs of rows from a source file as float32, and refusing what is not finite."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from io import FileIO
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from edgellama.codecs.base import Codec, codec
from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import bits_of
from edgellama.errors import InvalidFileError, UnsupportedError
from edgellama.gguf_io import GGMLType, TensorInfo

EXPONENT = 0x7F800000


@kernel
def largest_bits(x: Any) -> Any:
    """Bits of the largest magnitude in x, float32[n]: at least `EXPONENT` when a value is not finite."""
    largest = np.int32(0)
    for i in range(x.size):
        largest = max(largest, np.int32(bits_of(x[i]) & np.int32(0x7FFFFFFF)))
    return largest


@kernel
def _widen_bf16(raw: Any, out: Any) -> Any:
    for i in range(raw.size):
        out[i] = np.uint32(raw[i]) << np.uint32(16)


def codec_of(kind: GGMLType) -> Codec:
    """The codec of a file's tensor type; raises UnsupportedError where there is none."""
    try:
        return codec(GGMLQuantizationType(int(kind)))
    except ValueError:
        raise UnsupportedError(f"there is no codec for tensor type {kind.name}", "choose another recipe") from None


def to_float32(data: NDArray[np.uint8], kind: GGMLType) -> NDArray[np.float32]:
    """Packed rows uint8[n, row_bytes] of any type -> float32[n, k]."""
    if kind is GGMLType.F32:
        return data.view(np.float32)
    if kind is GGMLType.F16:
        return data.view(np.float16).astype(np.float32)
    if kind is GGMLType.BF16:
        wide = np.empty((data.shape[0], data.shape[1] // 2), np.uint32)
        _widen_bf16(data.reshape(-1).view(np.uint16), wide.reshape(-1))
        return wide.view(np.float32)
    return codec_of(kind).dequantize(data)


def check_finite(x: NDArray[np.float32], tensor: TensorInfo, first_row: int) -> float:
    """Largest magnitude of a slab; raises InvalidFileError naming the place of the first NaN or infinity."""
    bits = int(largest_bits(x.reshape(-1)))
    if bits >= EXPONENT:
        row, column = np.argwhere(~np.isfinite(x))[0]
        raise InvalidFileError(
            f"{tensor.name}: the value in row {first_row + int(row)}, column {int(column)} is {x[row, column]}",
            "the source is damaged or overflowed when it was converted (BF16 to F16): convert or fetch it again",
        )
    return float(np.int32(bits).view(np.float32))


class SourceFile:
    """Positioned reads of one file, each thread through a handle of its own; says what will not be read again."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._local = threading.local()
        self._handles: list[FileIO] = []
        self._handle()

    def _handle(self) -> FileIO:
        handle: FileIO | None = getattr(self._local, "handle", None)
        if handle is None:
            handle = self._local.handle = FileIO(self.path)
            self._handles.append(handle)
        return handle

    def read(self, offset: int, nbytes: int, what: str) -> NDArray[np.uint8]:
        """`nbytes` at `offset`; raises InvalidFileError when the file has become shorter."""
        buffer, handle, done = np.empty(nbytes, np.uint8), self._handle(), 0
        handle.seek(offset)
        while done < nbytes:
            count = handle.readinto(buffer[done:].data)
            if not count:
                raise InvalidFileError(
                    f"{self.path}: {what} ends after {done:,} of {nbytes:,} bytes", "the file changed while it was read"
                )
            done += count
        return buffer

    def forget(self, offset: int, nbytes: int) -> None:
        """Drop cached pages of a range that was used, so that other programs keep theirs."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._handle().fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close every thread's handle."""
        for handle in self._handles:
            handle.close()

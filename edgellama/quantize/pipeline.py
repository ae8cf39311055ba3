"""Slabs of whole rows through read, quantize and write, on all cores, in bounded memory, resumable after a kill.

Every slab has its place in the output from the start, so slabs may finish in any order. A finished slab is noted in a
journal beside the part file; its data is on the disk before the note is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import DiskFullError, InvalidFileError
from edgellama.files import disk_full, free_bytes, is_disk_full, sync_folder, write_text
from edgellama.gguf_io import TensorInfo
from edgellama.quantize.layout import OutputFile, Placed, row_bytes
from edgellama.quantize.source import SourceFile, check_finite, codec_of, to_float32

SLAB_WEIGHTS = 1 << 20
FLUSH_BYTES = 256 << 20
JOURNAL_VERSION = 1
HALF_MAX = 65504.0
Weights = Callable[[TensorInfo], NDArray[np.float32] | None]
"""Importance of a source tensor, float32[experts, k], or None."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Rows [first, first + rows) of one tensor, all of one expert."""

    index: int
    placed: Placed
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Progress:
    """`done_bytes` of `total_bytes` of the source went through; `tensor` is the last one touched."""

    done_bytes: int
    total_bytes: int
    tensor: str


def slabs(output: OutputFile) -> Iterator[Slab]:
    """All slabs of a file, none across the border between two experts (each has its own importance)."""
    index = 0
    for placed in output.tensors:
        shape = placed.source.shape
        rows = placed.source.elements // shape[0]
        expert_rows = shape[1] if len(shape) > 1 else rows
        step = max(1, SLAB_WEIGHTS // shape[0])
        for start in range(0, rows, expert_rows):
            for first in range(start, start + expert_rows, step):
                yield Slab(index, placed, first, min(step, start + expert_rows - first))
                index += 1


class PartFile:
    """The output under its temporary name, with the journal of what is safely in it."""

    def __init__(self, output: OutputFile, identity: str, *, resume: bool) -> None:
        self.output = output
        self.path = output.path.with_name(f".{output.path.name}.part")
        self.journal = output.path.with_name(f".{output.path.name}.part.json")
        digest = hashlib.sha256(identity.encode() + output.header).hexdigest()
        self._key = f"{JOURNAL_VERSION}:{digest}"
        self.done: set[int] = self._resumable() if resume else set()
        self._pending: set[int] = set(self.done)
        self._unsynced = 0
        self._lock = threading.Lock()
        self._preflight()
        self._stream = FileIO(self.path, "r+" if self.done else "w+")
        try:
            with self._disk_full_told():
                self._allocate()
                self._put(0, output.header)
        except BaseException:
            self._stream.close()
            raise

    def _resumable(self) -> set[int]:
        try:
            saved = json.loads(self.journal.read_text())
        except (OSError, ValueError):
            return set()
        same = isinstance(saved, dict) and saved.get("key") == self._key and self.path.is_file()
        done = saved.get("done") if same else None
        return {i for i in done if isinstance(i, int)} if isinstance(done, list) else set()

    def _preflight(self) -> None:
        held = 0
        if sys.platform != "win32" and self.path.exists():
            held = self.path.stat().st_blocks * 512
        free = free_bytes(self.path.parent)
        if self.output.size > free + held:
            raise DiskFullError(
                f"{self.output.path}: {self.output.size:,} bytes are needed, {free + held:,} are free there",
                "free some space, or write to another disk",
            )

    def _allocate(self) -> None:
        """Reserve the whole file, where the file system can; a full disk shows here and not after an hour."""
        if sys.platform == "linux":
            try:
                os.posix_fallocate(self._stream.fileno(), 0, self.output.size)
            except OSError as error:
                if is_disk_full(error):
                    raise
        self._stream.truncate(self.output.size)

    def _put(self, offset: int, data: bytes | memoryview) -> None:
        view, done = memoryview(data), 0
        self._stream.seek(offset)
        while done < view.nbytes:
            done += self._stream.write(view[done:]) or 0

    @contextlib.contextmanager
    def _disk_full_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(self.path, error) from error
            raise

    def write(self, slab: Slab, data: NDArray[np.uint8]) -> None:
        """Put a slab in its place. Raises DiskFullError."""
        size = row_bytes(slab.placed.decision.type, slab.placed.source.shape[0])
        with self._lock, self._disk_full_told():
            self._put(slab.placed.offset + slab.first * size, data.reshape(-1).data)
            self._pending.add(slab.index)
            self._unsynced += data.nbytes
            if self._unsynced >= FLUSH_BYTES:
                self._flush()

    def _flush(self) -> None:
        os.fsync(self._stream.fileno())
        write_text(self.journal, json.dumps({"key": self._key, "done": sorted(self._pending)}))
        self.done, self._unsynced = set(self._pending), 0

    def suspend(self) -> None:
        """Keep what is done for a later --resume."""
        if self._stream.closed:
            return
        with self._lock, contextlib.suppress(OSError, DiskFullError):
            self._flush()
        self._stream.close()

    def seal(self) -> None:
        """Make the part durable; `publish` then gives it its name."""
        with self._disk_full_told():
            os.fsync(self._stream.fileno())
        self._stream.close()

    def publish(self) -> None:
        """Replace the output file."""
        self.path.replace(self.output.path)
        self.journal.unlink(missing_ok=True)
        sync_folder(self.output.path.parent)


def run(
    outputs: Sequence[OutputFile],
    source_paths: Sequence[str],
    weights: Weights,
    *,
    identity: str,
    threads: int,
    resume: bool,
    on_progress: Callable[[Progress], None] | None = None,
) -> None:
    """Fill and publish all output files. What was done is kept for --resume when anything stops it."""
    sources = [SourceFile(path) for path in source_paths]
    parts: list[PartFile] = []
    total = sum(placed.source.nbytes for output in outputs for placed in output.tensors)
    try:
        parts.extend(PartFile(output, identity, resume=resume) for output in outputs)
        done = 0
        for part in parts:
            for slab in _all(part, sources, weights, threads):
                done += slab.rows * row_bytes(slab.placed.source.type, slab.placed.source.shape[0])
                if on_progress is not None:
                    on_progress(Progress(done, total, slab.placed.source.name))
            part.seal()
        for part in parts:
            part.publish()
    except BaseException:
        for part in parts:
            part.suspend()
        raise
    finally:
        for source in sources:
            source.close()


def _all(part: PartFile, sources: Sequence[SourceFile], weights: Weights, threads: int) -> Iterator[Slab]:
    """Run every slab of a file that is not done yet; yields each when it is written, done ones at once."""

    def work(slab: Slab) -> Slab:
        part.write(slab, _convert(slab, sources, weights))
        return slab

    with ThreadPoolExecutor(threads, "quantize") as pool:
        running: set[Future[Slab]] = set()
        try:
            for slab in slabs(part.output):
                if slab.index in part.done:
                    yield slab
                    continue
                running.add(pool.submit(work, slab))
                if len(running) >= 2 * threads:
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        yield future.result()
            for future in running:
                yield future.result()
        except BaseException:
            for future in running:
                future.cancel()
            raise


def _convert(slab: Slab, sources: Sequence[SourceFile], weights: Weights) -> NDArray[np.uint8]:
    """Read a slab and give it its type."""
    tensor, kind = slab.placed.source, slab.placed.decision.type
    k = tensor.shape[0]
    stride = row_bytes(tensor.type, k)
    source = sources[tensor.split]
    start = tensor.offset + slab.first * stride
    raw = source.read(start, slab.rows * stride, tensor.name)
    source.forget(start, raw.nbytes)
    if not tensor.type.name.startswith("I") or tensor.type.name.startswith("IQ"):
        values = to_float32(raw.reshape(slab.rows, stride), tensor.type)
        largest = check_finite(values, tensor, slab.first)
    if kind is tensor.type:
        return raw
    importance = weights(tensor)
    row = None
    if importance is not None:
        row = importance[slab.first // (tensor.shape[1] if len(tensor.shape) > 1 else slab.rows)]
    chosen = codec_of(kind)
    out = chosen.quantize(values, row)
    if largest > HALF_MAX and not np.isfinite(chosen.dequantize(out)).all():
        raise InvalidFileError(
            f"{tensor.name}: {largest:g} in rows {slab.first} to {slab.first + slab.rows - 1} overflows {kind.name}",
            "keep this tensor in BF16 or F32 with --tensor-type",
        )
    return out


def leftovers(target: Path) -> list[Path]:
    """Part files of an interrupted run towards `target`."""
    return sorted(target.parent.glob(f".{target.name.removesuffix('.gguf')}*.part"))

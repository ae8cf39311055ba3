"""The worker's ends of the two pipes: frames in from the host, frames out through a bounded queue and a thread."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from typing import BinaryIO

from edgellama.runtime.messages import FromWorker, Heartbeat, frame, frame_length

QUEUE_BYTES = 1 << 20
"""What may wait for a host that does not read before senders have to wait too."""


def take_over() -> tuple[int, int]:
    """Take stdin and stdout for frames; returns their new descriptors.

    Descriptor 1 becomes stderr and descriptor 0 the null device, so that native code that prints or reads can neither
    damage a frame nor swallow one.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    if sys.platform == "win32":
        import msvcrt

        for descriptor in (incoming, outgoing):
            msvcrt.setmode(descriptor, os.O_BINARY)
    return incoming, outgoing


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame, None when the pipe has ended. Raises ValueError for an impossible length."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    length = frame_length(header)
    body = stream.read(length)
    return body if len(body) == length else None


class Outbox:
    """Frames on their way to the host, in order, written by one thread.

    `send` waits while the queue is full, so a slow host slows the worker down and nothing is lost. A heartbeat only
    replaces the one before it: however long the host does not read, one is waiting.
    """

    def __init__(self, descriptor: int, limit_bytes: int = QUEUE_BYTES) -> None:
        self._descriptor = descriptor
        self._limit_bytes = limit_bytes
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._beat: Heartbeat | None = None
        self._broken = False
        self._writing = False
        self._started = False
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the thread. Until then `send` writes by itself."""
        self._started = True
        threading.Thread(target=self._write, name="writer", daemon=True).start()

    def send(self, message: FromWorker) -> None:
        """Queue a message; waits while the queue is full. Dropped when nobody is there to read it."""
        self._send(frame(message), wait=True)

    def send_last(self, message: FromWorker, timeout_seconds: float) -> None:
        """Queue a message although the queue be full, and give the host time to read it."""
        self._send(frame(message), wait=False)
        if self._started:
            self.drain(timeout_seconds)

    def _send(self, data: bytes, *, wait: bool) -> None:
        with self._changed:
            while wait and self._bytes > self._limit_bytes and not self._broken:
                self._changed.wait()
            if not self._started or self._goes_at_once(data):
                self._put(memoryview(data))
                return
            self._frames.append(data)
            self._bytes += len(data)
            self._changed.notify_all()

    def _goes_at_once(self, data: bytes) -> bool:
        """Whether writing now cannot block: it saves waking the writer while all cores compute the next step."""
        if sys.platform == "win32" or self._frames or self._writing or len(data) > select.PIPE_BUF:
            return False
        return bool(select.select([], [self._descriptor], [], 0)[1])

    def beat(self, message: Heartbeat) -> None:
        """Queue a heartbeat, in place of one that still waits; never waits itself."""
        with self._changed:
            self._beat = message
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until everything is written; False when that took too long or the host is gone."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._broken or not (self._frames or self._writing), timeout=timeout_seconds
            )
        return done and not self._broken

    def _write(self) -> None:
        while not self._broken:
            self._put(self._next())

    def _put(self, data: memoryview) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # the host closed its end; the reader sees that too and ends the process
            with self._changed:
                self._broken = True
                self._changed.notify_all()

    def _next(self) -> memoryview:
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._frames or self._beat)
            self._writing = True
            parts = list(self._frames)
            self._frames.clear()
            self._bytes = 0
            if self._beat is not None:
                parts.append(frame(self._beat))
                self._beat = None
            self._changed.notify_all()
        return memoryview(b"".join(parts))

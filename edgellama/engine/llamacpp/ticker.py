"""What llama.cpp calls before every node of a graph on the CPU: it counts progress and may stop the graph.

A Python function would do, but each call must take Python's lock: while another thread tokenizes or decodes JSON,
every one of some 500 calls a step may wait for it. On Linux the callback is therefore libc's `sem_trywait` on a
semaphore of our own: it counts down without Python, and fails (is "true") once we empty it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, Protocol

_FULL = 2**31 - 1  # SEM_VALUE_MAX of glibc and musl
_REFILL_BELOW = 2**30


class Ticker(Protocol):
    """Counts, and asks a running graph to stop. `begin` and `end` enclose a call; the rest is for any thread."""

    callback: Any
    """A `ggml_abort_callback`."""
    data: int | None

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def abort(self) -> None: ...
    def count(self) -> int: ...


class SemaphoreTicker:
    """The callback is `sem_trywait`."""

    def __init__(self, callback_type: Any) -> None:
        libc = ctypes.CDLL(None)
        self._init = libc.sem_init
        self._init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self._get = libc.sem_getvalue
        self._get.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        self._memory = (ctypes.c_uint64 * 16)()  # a sem_t has 32 bytes at most
        self.data: int | None = ctypes.addressof(self._memory)
        self.callback = callback_type(ctypes.cast(libc.sem_trywait, ctypes.c_void_p).value)
        self._lock = threading.Lock()
        self._value = ctypes.c_int()
        self._running = False
        self._base = 0
        self._full = 0
        self._fill(_FULL)

    def _fill(self, value: int) -> None:
        # Filling again while sem_trywait may run is outside POSIX; glibc and musl store one aligned word, as needed.
        self._base = self._counted()
        self._full = value
        self._init(self.data, 0, value)

    def _counted(self) -> int:
        self._get(self.data, ctypes.byref(self._value))
        return self._base + self._full - self._value.value

    def begin(self) -> None:
        with self._lock:
            self._running = True
            self._get(self.data, ctypes.byref(self._value))
            if self._value.value < _REFILL_BELOW:
                self._fill(_FULL)

    def end(self) -> None:
        self._running = False

    def abort(self) -> None:
        with self._lock:
            if self._running:
                self._fill(0)

    def count(self) -> int:
        with self._lock:
            return self._counted()


class PythonTicker:
    """The callback is a Python function, for systems without unnamed semaphores."""

    def __init__(self, callback_type: Any) -> None:
        self._count = 0
        self._running = False
        self._stop = False
        self.data: int | None = None
        self.callback = callback_type(self._tick)

    def _tick(self, _data: object) -> bool:
        self._count += 1
        return self._stop

    def begin(self) -> None:
        self._stop = False
        self._running = True

    def end(self) -> None:
        self._running = False

    def abort(self) -> None:
        if self._running:
            self._stop = True

    def count(self) -> int:
        return self._count


def new_ticker(callback_type: Any) -> Ticker:
    """The best ticker of this system."""
    if sys.platform == "linux":
        return SemaphoreTicker(callback_type)
    return PythonTicker(callback_type)

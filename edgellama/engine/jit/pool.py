"""Threads that run a program together with the caller."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from dataclasses import dataclass

from edgellama.engine.jit.kernels.compiled import interpreter


@dataclass(frozen=True, slots=True)
class Job:
    """Addresses of a program, of the step it computes, and of the control block."""

    program: int
    operations: int
    step: int
    control: int


@functools.cache
def _give_way() -> int:
    """Address of the system's `yield`, 0 where there is none."""
    try:
        if sys.platform == "win32":
            function = ctypes.WinDLL("kernel32").SwitchToThread
        else:
            function = ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError):
        return 0
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


class Pool:
    """Helpers sleep between programs, and wait in loops inside one."""

    def __init__(self) -> None:
        self._helpers: list[threading.Thread] = []
        self._starts: list[threading.Semaphore] = []
        self._done = threading.Semaphore(0)
        self._job: Job | None = None
        self._threads = 1

    def run(self, job: Job, threads: int) -> bool:
        """Run on `threads` threads, the caller among them. False when it was stopped."""
        while len(self._helpers) < threads - 1:
            self._start_helper()
        self._job, self._threads = job, threads
        for start in self._starts[: threads - 1]:
            start.release()
        whole = interpreter()(job.program, job.operations, job.step, job.control, 0, threads, _give_way())
        for _ in range(threads - 1):
            self._done.acquire()
        return bool(whole)

    def _start_helper(self) -> None:
        number = len(self._helpers) + 1
        start = threading.Semaphore(0)
        thread = threading.Thread(target=self._help, args=(number, start), name=f"jit-{number}", daemon=True)
        self._helpers.append(thread)
        self._starts.append(start)
        thread.start()

    def _help(self, number: int, start: threading.Semaphore) -> None:
        while True:
            start.acquire()
            job = self._job
            if job is None:
                return
            interpreter()(job.program, job.operations, job.step, job.control, number, self._threads, _give_way())
            self._done.release()

    def close(self) -> None:
        """End all helpers; no program may run."""
        self._job = None
        for start in self._starts:
            start.release()
        for thread in self._helpers:
            thread.join()
        self._helpers.clear()
        self._starts.clear()

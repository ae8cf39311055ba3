"""Ctrl-C and termination: the first asks for the end of the answer, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from edgellama.errors import EXIT_INTERRUPTED


class TerminatedError(KeyboardInterrupt):
    """The system or another program asked us to leave (SIGTERM, SIGHUP, Ctrl-Break)."""


def _termination_signals() -> list[signal.Signals]:
    names = ("SIGBREAK",) if sys.platform == "win32" else ("SIGTERM", "SIGHUP")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _leave_now() -> None:
    os._exit(EXIT_INTERRUPTED)  # no flush: it could block on the very pipe the user wants to leave


class _Handlers:
    """Signal handlers that hold while it is open; SIGHUP stays ignored under nohup."""

    def __init__(self, handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]]) -> None:
        self._handlers = handlers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Handlers:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                    self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise TerminatedError


def termination_raises() -> _Handlers:
    """While open, a request to leave raises `TerminatedError` in the main thread, so that cleaning up happens."""
    return _Handlers(dict.fromkeys(_termination_signals(), _terminate))


class StopKeys(_Handlers):
    """While an answer streams: the first Ctrl-C or request to leave calls `stop`, the second leaves at once.

    Nothing is raised meanwhile, so no event of the answer can be lost between two bytecodes.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(dict.fromkeys([signal.SIGINT, *_termination_signals()], self._press))
        self._stop = stop
        self.pressed = False
        self.pressed_at_seconds: float | None = None
        """On the monotonic clock."""
        self.terminated = False

    def _press(self, number: int, _frame: FrameType | None) -> None:
        if self.pressed:
            _leave_now()
        self.pressed = True
        self.pressed_at_seconds = time.monotonic()
        self.terminated = number != signal.SIGINT
        self._stop()

    def __enter__(self) -> StopKeys:
        super().__enter__()
        return self

"""Child processes of the set-up: output into the log, progress on the screen, and a clean end on Ctrl-C or a kill."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from bootstrap.progress import Activity

TICK_SECONDS = 0.25
STOP_SECONDS = 8.0
ORPHAN_SECONDS = 0.5
TAIL_LINES = 25


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C asked the script to end."""


@contextlib.contextmanager
def signals_end_children() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that children are ended and the terminal is left clean."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Terminated(number)

    names = ("SIGTERM", "SIGHUP")
    old = {name: signal.signal(getattr(signal, name), interrupt) for name in names if hasattr(signal, name)}
    try:
        yield
    finally:
        for name, handler in old.items():
            signal.signal(getattr(signal, name), handler)


def _pump(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def stop(child: subprocess.Popen[bytes]) -> None:
    """End a child and all that it started: politely, then by force. What ignores Ctrl-C is ended all the same."""
    if sys.platform == "win32":
        child.kill()
        child.wait()
        return
    for number, seconds in ((signal.SIGINT, STOP_SECONDS), (signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError, KeyboardInterrupt):
            os.killpg(child.pid, number)
            _wait_for_group(child, seconds)
    child.wait()


def _wait_for_group(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait while the child's process group has members; those that outlive the child get a moment, no more."""
    if sys.platform == "win32":
        return
    end, reaped = time.monotonic() + seconds, False
    while time.monotonic() < end:
        if not reaped and child.poll() is not None:  # its zombie would keep the group
            end, reaped = min(end, time.monotonic() + ORPHAN_SECONDS), True
        os.killpg(child.pid, 0)  # raises when there is no one left
        time.sleep(0.05)


class Runner:
    """Runs the set-up's commands. `lock_descriptor` is handed down, so that the lock lives as long as any child."""

    def __init__(self, log: Path, *, quiet: bool = False, verbose: bool = False, lock_descriptor: int = -1) -> None:
        self.log = log
        self.quiet = quiet
        self.verbose = verbose
        self._lock_descriptor = lock_descriptor

    def run(
        self,
        title: str,
        command: Sequence[str],
        *,
        environ: dict[str, str] | None = None,
        describe: Callable[[str], str] = str.strip,
    ) -> tuple[int, str]:
        """Run `command` and return its exit status and output. `describe` turns an output line into progress."""
        with Activity(title, quiet=self.quiet) as activity, self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode("utf-8", "replace"))
            log.flush()
            with self._start(command, environ) as child:
                try:
                    return self._follow(child, log, activity, describe)
                except BaseException:
                    stop(child)
                    raise

    def _start(self, command: Sequence[str], environ: dict[str, str] | None) -> subprocess.Popen[bytes]:
        inherited = (self._lock_descriptor,) if self._lock_descriptor >= 0 and sys.platform != "win32" else ()
        # A group of its own: Ctrl-C reaches the whole tree through stop(), compilers included.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            pass_fds=inherited,
            process_group=None if sys.platform == "win32" else 0,
        )

    def _follow(
        self, child: subprocess.Popen[bytes], log: IO[bytes], activity: Activity, describe: Callable[[str], str]
    ) -> tuple[int, str]:
        assert child.stdout is not None
        lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=_pump, args=(child.stdout, lines), daemon=True).start()
        output: list[str] = []
        while True:
            activity.tick()
            try:
                raw = lines.get(timeout=TICK_SECONDS)
            except queue.Empty:
                continue
            if raw is None:
                break
            log.write(raw)
            log.flush()
            line = raw.decode("utf-8", "replace").rstrip()
            output.append(line)
            if self.verbose:
                sys.stderr.write(line + "\n")
            detail = describe(line)
            if detail:
                activity.update(detail)
        return child.wait(), "\n".join(output)


def tail(output: str, lines: int = TAIL_LINES, width: int = 300) -> str:
    """The last lines of a child's output, each cut to `width`."""
    return "\n".join(f"    {line[:width]}" for line in output.splitlines()[-lines:])

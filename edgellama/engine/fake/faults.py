"""How the fake engine's faults strike: real signals, real hangs, real memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellama import files
from edgellama.engine.base import EngineOptions
from edgellama.engine.fake.script import Fault
from edgellama.errors import (
    ContextOverflowError,
    EngineError,
    EngineLoadError,
    MemoryShortageError,
    UnsupportedError,
)

_WINDOWS_EXCEPTIONS = {"SIGILL": 0xC000001D, "SIGSEGV": 0xC0000005, "SIGBUS": 0xC0000006, "SIGFPE": 0xC000008E}
_SLICE_SECONDS = 0.005


@dataclass(slots=True)
class Step:
    """What a fault may look at: one decode call. Per sequence: its id, its tokens and their text after the batch."""

    phase: str
    number: int
    """This call's number among those of its phase, from 1."""
    any_number: int
    """… among all decode calls."""
    positions: set[int] = field(default_factory=set)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, bytes] = field(default_factory=dict)


class Faults:
    """The faults of one loaded script that its options allow."""

    def __init__(self, path: Path, faults: tuple[Fault, ...], options: EngineOptions) -> None:
        self._armed = [
            (fault, path.with_name(f"{path.name}.fault-{i}"))
            for i, fault in enumerate(faults)
            if all(getattr(options, name) in allowed for name, allowed in fault.when.items())
            and not any(getattr(options, name) in refused for name, refused in fault.unless.items())
        ]
        for fault, counter in self._armed:
            if fault.times and not os.access(counter.parent, os.W_OK):
                raise EngineLoadError(
                    f"{counter}: not writable, and a fault of the script is counted there",
                    "put the script into a folder that this process may write to",
                )
        self._hoard: list[bytearray] = []

    def due(self, step: Step) -> list[tuple[Fault, list[int]]]:
        """The faults that strike at this step, each with the sequences it concerns; counts them."""
        found: list[tuple[Fault, list[int]]] = []
        for fault, counter in self._armed:
            sequences = _sequences(fault, step)
            if sequences is not None and _count(fault, counter):
                found.append((fault, sequences))
        return found

    def strike(self, fault: Fault, advance: Callable[[], None], aborted: Callable[[], bool]) -> None:
        """Let a fault happen that does not concern the logits."""
        match fault.kind:
            case "signal":
                die(fault.signal)
            case "exit":
                os._exit(fault.code)
            case "hang":
                _wait(fault.seconds, advance if fault.advancing else None, aborted if fault.heeds_abort else None)
            case "freeze":
                _freeze(fault.seconds)
            case "slow":
                _wait(fault.seconds or _SLICE_SECONDS, advance, aborted)
            case "memory":
                self._hoard.append(_take(fault.bytes))
            case "error":
                raise (EngineLoadError if fault.phase == "load" else EngineError)(fault.message)
            case "overflow":
                raise ContextOverflowError(0, 0, fault.message)
            case "nan" | "wrong":
                pass


def spoil(fault: Fault, rows: NDArray[np.float32]) -> None:
    """Apply a fault of the logits to rows, float32[n, n_vocab], in place."""
    if fault.kind == "nan":
        rows[:] = np.nan
    elif fault.kind == "wrong":
        rows += np.random.default_rng(0).standard_normal(rows.shape, np.float32) * np.float32(fault.scale)


def die(name: str) -> None:
    """End this process by the named signal, as a crash in native code would."""
    if sys.platform == "win32":
        if name in _WINDOWS_EXCEPTIONS:
            ctypes.windll.kernel32.SetErrorMode(0x8007)  # no dialogue
            ctypes.windll.kernel32.RaiseException(_WINDOWS_EXCEPTIONS[name], 1, 0, None)
        os._exit(3) if name == "SIGABRT" else os.kill(os.getpid(), signal.SIGTERM)
        return
    number = getattr(signal, name, None)
    if not isinstance(number, signal.Signals):
        raise UnsupportedError(f"the script raises {name}, which this system does not know")
    with contextlib.suppress(ValueError, OSError):  # off the main thread, or a signal that cannot be handled
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(1)  # delivery to another thread may take a moment


def _sequences(fault: Fault, step: Step) -> list[int] | None:
    """The sequences a fault concerns at this step, None when it does not strike."""
    if (fault.phase == "load") != (step.phase == "load"):
        return None
    if fault.phase not in ("any", step.phase):
        return None
    if fault.step and fault.step != (step.any_number if fault.phase == "any" else step.number):
        return None
    if fault.position >= 0 and fault.position not in step.positions:
        return None
    if step.phase == "load":
        return []
    wanted = fault.contains.encode()
    found = [
        sequence
        for sequence, tokens in step.tokens.items()
        if wanted in step.texts[sequence] and (fault.token < 0 or fault.token in tokens)
    ]
    return found or None


def _count(fault: Fault, counter: Path) -> bool:
    """Whether a counted fault has a strike left; notes the strike durably first, since the process may die of it."""
    if not fault.times:
        return True
    done = len(counter.read_bytes()) if counter.exists() else 0
    if done >= fault.times:
        return False
    files.write_bytes(counter, b"x" * (done + 1))
    return True


def _wait(seconds: float, advance: Callable[[], None] | None, aborted: Callable[[], bool] | None) -> None:
    end = time.monotonic() + seconds if seconds else float("inf")
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(_SLICE_SECONDS, left))
        if advance is not None:
            advance()
        if aborted is not None and aborted():
            return


def _freeze(seconds: float) -> None:
    whole = max(1, round(seconds)) if seconds else 2**30
    if sys.platform == "win32":
        ctypes.PyDLL("kernel32").Sleep(ctypes.c_uint32(min(whole * 1000, 2**31)))
    else:
        ctypes.PyDLL(None).sleep(ctypes.c_uint(whole))  # PyDLL keeps the GIL


def _take(wanted_bytes: int) -> bytearray:
    try:
        block = bytearray(wanted_bytes)
    except MemoryError as error:
        raise MemoryShortageError(f"{wanted_bytes:,} bytes more were refused by the system") from error
    block[::4096] = b"\x01" * len(block[::4096])  # touched, so that they really count
    return block

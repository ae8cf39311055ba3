"""When a worker stands still for too long. Pure bookkeeping: the supervisor feeds it time and signs of life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Finding = Literal["fine", "abort", "hang", "silent"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may stand still, in seconds. Only time in which this process itself ran is counted."""

    hello: float = 90.0
    """Until it says hello: a cold start of Python from an SD card is slow."""
    load: float = 180.0
    """Without progress while loading."""
    hang: float = 60.0
    """Without progress of the counter while it computes. A slow board advances the counter all the time."""
    silence: float = 60.0
    """Without any message at all."""
    call: float = 120.0
    """For tokenizing, which has no progress counter."""
    abort_grace: float = 2.0
    """Between the abort and the kill."""
    shutdown: float = 5.0
    """Between a polite request to end and the kill."""

    @property
    def tick(self) -> float:
        """How often to look."""
        return max(0.02, min(0.5, self.hello / 8, self.load / 8, self.hang / 8, self.silence / 8))


class Watchdog:
    """Adds up the time without progress and without any message."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._progress: int | None = None
        self._stalled = 0.0
        self._silent = 0.0
        self._aborted = False

    def message(self) -> None:
        """Something arrived that shows progress by itself, or new work was given."""
        self._silent = 0.0
        self._stalled = 0.0
        self._aborted = False

    def heartbeat(self, progress: int) -> None:
        """A heartbeat arrived; it shows progress when its counter moved."""
        self._silent = 0.0
        if progress != self._progress:
            self._progress = progress
            self.message()

    def look(self, passed: float, allowed: float | None, *, expects_beats: bool) -> Finding:
        """Judge after `passed` seconds. `allowed` is how long no progress is normal now, None when nothing is due.

        After a suspend, or when this process was stopped, `passed` is long although the worker had no time either; so
        no more than two ticks of it count.
        """
        passed = min(passed, 2 * self._limits.tick)
        self._stalled += passed
        self._silent += passed
        if expects_beats and self._silent > self._limits.silence:
            return "silent"
        if allowed is None or self._stalled <= allowed:
            return "fine"
        if self._aborted:
            return "hang"
        self._aborted = True
        self._stalled = allowed - self._limits.abort_grace
        return "abort"

"""The Reader seam: a sensor gives a `Reading`; what it does not know is None, and it never raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Unit = Literal["celsius", "bytes", "percent", "megahertz", "watts", "flag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One value at one time. `value` None means unknown, and then `note` says why."""

    name: str
    """What is measured, such as `temperature` or `memory available`."""
    value: float | None
    unit: Unit
    source: str
    """Where it was read: a sensor's name or a file."""
    limit: float | None = None
    """Value that should not be reached, as the source states it."""
    note: str = ""
    time_seconds: float = field(default_factory=time.time)
    """Seconds since the epoch."""


class Reader(Protocol):
    """One source. `read` returns within milliseconds and never raises."""

    def read(self) -> Reading: ...


@dataclass(slots=True)
class FakeReader:
    """Plays back values, the last one for ever; for tests and demonstrations. A value may be None: unknown."""

    values: Sequence[float | None]
    name: str = "temperature"
    unit: Unit = "celsius"
    limit: float | None = None
    clock: Callable[[], float] = time.time
    _next: int = 0

    def read(self) -> Reading:
        """The next value."""
        value = self.values[min(self._next, len(self.values) - 1)] if self.values else None
        self._next += 1
        note = "the script says unknown" if value is None else ""
        return Reading(
            name=self.name,
            value=value,
            unit=self.unit,
            source="fake",
            limit=self.limit,
            note=note,
            time_seconds=self.clock(),
        )

"""A worker that was started before the host was even imported."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellama.runtime.ladder import Start
from edgellama.runtime.supervisor import Worker


@dataclass(frozen=True, slots=True)
class EarlyStart(Start):
    """Hands out the worker in `first` once, then starts new ones."""

    first: list[Worker] = field(default_factory=list)

    async def spawn(self) -> Worker:
        """The early process, or a new one."""
        return self.first.pop() if self.first else await Start.spawn(self)

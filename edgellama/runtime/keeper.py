"""Keeps one model served by one worker: the first start, restarts, and what was learnt from deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from edgellama import paths
from edgellama.engine.verdicts import Verdicts
from edgellama.errors import EngineCrashError
from edgellama.runtime import plan
from edgellama.runtime.base import Notice
from edgellama.runtime.journal import Journal
from edgellama.runtime.ladder import Ladder, Start
from edgellama.runtime.model import ModelSpec
from edgellama.runtime.prompting import import_early
from edgellama.runtime.recovery import Recovery
from edgellama.runtime.supervisor import Death, Worker


class Keeper:
    """Owns the worker of one model. `start` first."""

    def __init__(self, start: Start, cache_folder: Path | None, available_bytes: Callable[[], int]) -> None:
        self._start = start
        self._cache_folder = cache_folder
        self._available_bytes = available_bytes
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None
        self._retiring = False
        self._closed = False
        self._told: Death | None = None
        self._notices: list[Notice] = []
        self.spec: ModelSpec
        self.plan: plan.Plan
        self.ladder: Ladder
        self.recovery: Recovery
        self._verdicts: Verdicts

    async def start(self, make_spec: Callable[[], ModelSpec], on_load_progress: Callable[[float], None] | None) -> None:
        """Start the process first, since that takes longest, and read the header meanwhile."""
        spawning = asyncio.create_task(self._start.spawn())
        try:
            await asyncio.to_thread(self._prepare, make_spec)
            self.ladder.on_load_progress = on_load_progress
            self._worker = await self.ladder.bring_up(await spawning)
        except BaseException:
            await _end(spawning)
            raise

    def _prepare(self, make_spec: Callable[[], ModelSpec]) -> None:
        self.spec = make_spec()
        self.plan = plan.choose(self.spec, self._available_bytes())
        folder = self._cache_folder if self._cache_folder is not None else paths.cache_dir()
        self._verdicts = Verdicts(folder)
        self.ladder = Ladder(self.spec, self.plan.options, self._verdicts, self._start)
        self.recovery = Recovery(self.ladder)
        self._notices += [Notice("model-file", text) for text in self.spec.notices]
        import_early()

    @property
    def present(self) -> Worker | None:
        """The worker, if it can be used as it is."""
        worker = self._worker
        return worker if worker is not None and worker.alive and not self._retiring else None

    async def worker(self) -> Worker:
        """A loaded worker: the present one, or a new one. Raises what keeps one from starting."""
        async with self._lock:
            if self._closed:
                raise EngineCrashError("the host was closed")
            worker = self._worker
            if worker is not None and worker.alive and not self._retiring:
                return worker
            self._worker = None
            self._retiring = False
            if worker is not None:
                self._tell_idle_death(worker)
                await worker.close()
            self._worker = await self.ladder.bring_up()
            return self._worker

    def _tell_idle_death(self, worker: Worker) -> None:
        death = worker.death.result() if worker.death.done() else None
        if death is not None and death is not self._told and (words := self.recovery.died_idle(death)):
            self._notices.append(Notice("worker-restarted", words))

    def died(self, journal: Journal, death: Death) -> Notice:
        """A worker died during a request; see `Recovery.died`."""
        self._told = death
        return Notice("worker-restarted", self.recovery.died(journal, death))

    def survived(self) -> None:
        """A request ended well."""
        if self.recovery.survived():
            self._retiring = True

    def retire(self) -> None:
        """Replace the worker before the next request: its state is not trusted any more."""
        self._retiring = True

    def take_notices(self) -> list[Notice]:
        """What the user should know, once."""
        told = [Notice("verdicts", text) for text in self._verdicts.notices]
        notices = [*self._notices, *self.ladder.notices, *told]
        self._notices.clear()
        self.ladder.notices.clear()
        self._verdicts.notices.clear()
        return notices

    async def close(self) -> None:
        """End the worker; none is started any more."""
        self._closed = True
        async with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()


async def _end(spawning: asyncio.Task[Worker]) -> None:
    """End a process that may still be starting."""
    try:
        worker = await asyncio.shield(spawning)
    except EngineCrashError:
        return
    worker.kill()
    await worker.close()

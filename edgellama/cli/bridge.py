"""A Runtime on an event loop of its own thread, for front ends that read and write in the main thread.

The main thread stays free to block on a terminal or a full pipe, while the loop goes on serving the worker.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from edgellama.runtime.base import Done, Event, Failed, GenerateRequest, Runtime

_T = TypeVar("_T")
_POLL_SECONDS = 0.1
"""Windows does not interrupt a wait without a limit."""
_CANCEL_AGAIN_SECONDS = 0.25
_CLOSE_SECONDS = 10.0


class Bridge:
    """Starts the loop and the runtime; every method is called from the main thread."""

    def __init__(self, make: Callable[[], Awaitable[Runtime]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="edgellama-runtime", daemon=True)
        self._thread.start()
        self._runtime: Runtime | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = asyncio.run_coroutine_threadsafe(self._start(make), self._loop)

    def __enter__(self) -> Bridge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self, make: Callable[[], Awaitable[Runtime]]) -> Runtime:
        self._starting = asyncio.current_task()
        self._runtime = await make()
        await self._runtime.start()
        return self._runtime

    def wait_started(self, on_wait: Callable[[], None] | None = None) -> Runtime:
        """Wait until the runtime serves; raises what kept it from that. `on_wait` is called a few times a second."""
        return _wait(self._started, on_wait)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine of the runtime and wait for it."""
        return _wait(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def generate(self, request: GenerateRequest, on_wait: Callable[[], None] | None = None) -> Iterator[Event]:
        """The events of a request, the last one being `Done` or `Failed`. An exception in between leaves it running."""
        events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        runtime = self.wait_started()

        async def pump() -> None:
            self._running.add(request.request_id)
            try:
                async for event in runtime.generate(request):
                    events.put(event)
                events.put(RuntimeError("the answer ended without an end"))
            except BaseException as error:
                events.put(error)
                raise
            finally:
                self._running.discard(request.request_id)

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        while True:
            try:
                event = events.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if on_wait is not None:
                    on_wait()
                continue
            if isinstance(event, BaseException):
                with contextlib.suppress(BaseException):
                    future.exception(timeout=0)
                raise event
            yield event
            if isinstance(event, Done | Failed):
                return

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request; its `Done` follows in `generate`. May be called by a signal handler."""
        self._loop.call_soon_threadsafe(lambda: self._keep(self._cancel(request_id)))

    async def _cancel(self, request_id: str) -> None:
        # The runtime ignores ids it has not seen yet, so ask until the request is over.
        while request_id in self._running and self._runtime is not None:
            await self._runtime.cancel(request_id)
            await asyncio.sleep(_CANCEL_AGAIN_SECONDS)

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End the runtime and the loop. A start that still goes on is given up."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        self._started.cancel()
        with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _shut(self) -> None:
        if self._starting is not None:
            await asyncio.wait([self._starting])  # a cancelled start still has a process to end
        if self._runtime is not None:
            await self._runtime.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


def _wait(future: concurrent.futures.Future[_T], on_wait: Callable[[], None] | None = None) -> _T:
    while True:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            if future.done():
                break
            concurrent.futures.wait([future], timeout=_POLL_SECONDS)
        if on_wait is not None and not future.done():
            on_wait()
    return future.result()

"""The in-process Runtime: a queue in front of one supervised worker, and answers that outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType

from edgellama.chat.messages import TextPart
from edgellama.errors import BusyError, EdgellamaError, EngineError, UnsupportedError, UsageError
from edgellama.monitor import memory
from edgellama.runtime.answer import Answer
from edgellama.runtime.base import (
    Done,
    Event,
    Failed,
    GenerateRequest,
    ModelStatus,
    Notice,
    RuntimeCapabilities,
    Status,
)
from edgellama.runtime.keeper import Keeper
from edgellama.runtime.ladder import Start
from edgellama.runtime.model import ModelSpec
from edgellama.runtime.prompting import POLICIES, Prompter
from edgellama.runtime.serving import Serving
from edgellama.runtime.supervisor import Worker

_RECOVERY_POLL_SECONDS = 0.02


class Host:
    """Serves one model to front ends of this process, one request after the other.

    Use it from one event loop, and `close` it in the end. `spec` may be a function: it then runs in a thread while the
    worker's process starts. Several hosts may live side by side; signals are left alone. `available_bytes` is the
    memory that model and cache may take, `read_temperature` the hottest sensor now.
    """

    def __init__(
        self,
        spec: ModelSpec | Callable[[], ModelSpec],
        *,
        start: Start | None = None,
        cache_folder: Path | None = None,
        queue_limit: int = 64,
        request_seconds: float | None = None,
        read_temperature: Callable[[], float | None] | None = None,
        available_bytes: Callable[[], int] = memory.available_bytes,
        on_load_progress: Callable[[float], None] | None = None,
    ) -> None:
        self._make_spec: Callable[[], ModelSpec] = (lambda: spec) if isinstance(spec, ModelSpec) else spec
        self._queue_limit = queue_limit
        self._request_seconds = request_seconds
        self._read_temperature = read_temperature
        self._on_load_progress = on_load_progress
        self._keeper = Keeper(start or Start(), cache_folder, available_bytes)
        self._waiting: deque[Answer] = deque()
        self._running: Answer | None = None
        self._known: dict[str, Answer] = {}
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._serving: Serving
        self._prompter: Prompter

    # ---- life

    async def __aenter__(self) -> Host:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Load and check the model.

        Raises `GGUFError` and its kin for the file, `MemoryShortageError` when it does not fit, `EngineError` when it
        runs on no rung of the safety ladder.
        """
        if self._runner is not None:
            return
        await self._keeper.start(self._make_spec, self._on_load_progress)
        self._prompter = Prompter(self._keeper.spec)
        self._serving = Serving(self._keeper, self._prompter, self._read_temperature)
        self._runner = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Cancel what waits and runs, and end the worker."""
        for answer in list(self._known.values()):
            self._cancel(answer)
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        await self._keeper.close()

    # ---- Runtime

    @property
    def capabilities(self) -> RuntimeCapabilities:
        """What this host can do."""
        worker = self._keeper.present
        embeddings = worker is not None and worker.loaded is not None and worker.loaded.capabilities.embeddings
        return RuntimeCapabilities(embeddings=embeddings, context_policies=POLICIES)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """See `Runtime.generate`."""
        answer = Answer(request)
        self._admit(answer)
        event: Event | None = None
        try:
            while not isinstance(event, Done | Failed):
                event = await answer.next()
                yield event
        finally:
            self._cancel(answer)

    async def cancel(self, request_id: str) -> None:
        """See `Runtime.cancel`."""
        answer = self._known.get(request_id)
        if answer is not None:
            self._cancel(answer)

    def position(self, request_id: str) -> int | None:
        """Requests ahead of a waiting one; 0 when it runs; None when it is unknown or over."""
        answer = self._known.get(request_id)
        if answer is None or answer is self._running:
            return None if answer is None else 0
        return self._waiting.index(answer) + (self._running is not None) if answer in self._waiting else None

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """See `Runtime.tokenize`."""
        worker = await self._usable()
        return list(await worker.tokenize([TextPart(text, special)]))

    async def count(self, request: GenerateRequest) -> int:
        """See `Runtime.count`."""
        worker = await self._usable()
        self._prompter.check(request)
        return len((await self._prompter.prompt(request, worker)).tokens)

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """See `Runtime.embed`."""
        worker = await self._usable()
        if worker.loaded is None or not worker.loaded.capabilities.embeddings:
            raise UnsupportedError("this model was not loaded for embeddings", "load it with embeddings on")
        if not texts:
            return []
        length = worker.loaded.info.embedding_length
        data = (await worker.embed(texts)).vectors
        if len(data) != 4 * length * len(texts):
            raise EngineError(f"{len(data)} bytes of embeddings for {len(texts)} texts of {length} numbers")
        return [list(struct.unpack_from(f"<{length}f", data, 4 * length * i)) for i in range(len(texts))]

    async def status(self) -> Status:
        """See `Runtime.status`."""
        if self._runner is None:
            return Status(host_pid=os.getpid(), models=())
        keeper, worker = self._keeper, self._keeper.present
        model = ModelStatus(
            name=keeper.spec.name,
            path=keeper.spec.path,
            engine=worker.loaded.info.engine if worker and worker.loaded else keeper.spec.engine,
            worker_pid=worker.pid if worker else None,
            bytes=worker.resident_bytes if worker else 0,
            requests=len(self._waiting) + (self._running is not None),
            context_tokens=keeper.ladder.options.context_tokens,
            restarts=keeper.recovery.restarts,
            settings=keeper.ladder.words,
        )
        return Status(host_pid=os.getpid(), models=(model,), queued=len(self._waiting))

    async def _usable(self) -> Worker:
        """A worker for a call beside the queue. While a request recovers from a death, restarting is its business."""
        if self._runner is None or self._runner.done():
            raise UsageError("the host is not running")
        while self._running is not None and self._keeper.present is None:
            await asyncio.sleep(_RECOVERY_POLL_SECONDS)
        return await self._keeper.worker()

    # ---- the queue

    def _admit(self, answer: Answer) -> None:
        try:
            self._check(answer.request)
        except EdgellamaError as error:
            answer.failed(error)
            return
        ahead = len(self._waiting) + (self._running is not None)
        self._known[answer.request.request_id] = answer
        self._waiting.append(answer)
        if ahead:
            answer.emit(Notice("queued", f"{ahead} request{'s are' if ahead > 1 else ' is'} ahead of this one"))
        if self._request_seconds is not None:
            answer.expiry = asyncio.get_running_loop().call_later(self._request_seconds, self._expire, answer)
        self._wake.set()

    def _check(self, request: GenerateRequest) -> None:
        if self._runner is None or self._runner.done():
            raise UsageError("the host is not running")
        self._prompter.check(request)
        if request.request_id in self._known:
            raise UsageError(f"the request id {request.request_id!r} is in use")
        if len(self._waiting) >= self._queue_limit:
            raise BusyError(f"{len(self._waiting)} requests are waiting already", "try again when some are done")

    def _expire(self, answer: Answer) -> None:
        answer.emit(Notice("deadline", f"the answer was ended after {self._request_seconds:g} s, its time limit"))
        self._cancel(answer)

    def _cancel(self, answer: Answer) -> None:
        """End a request for its consumer at once, and in the worker after the step it is in."""
        if self._known.get(answer.request.request_id) is not answer:
            return
        del self._known[answer.request.request_id]
        was_over = answer.ended
        answer.done("cancelled")
        with contextlib.suppress(ValueError):
            self._waiting.remove(answer)
        if answer is self._running and not was_over:
            self._serving.cancel(answer)

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            answer = self._running = self._waiting.popleft()
            try:
                await self._serving.serve(answer)
            except EdgellamaError as error:
                answer.failed(error)
            except Exception as error:  # noqa: BLE001 - the boundary of one request: the others go on
                answer.failed(EngineError(f"internal error: {error!r}", "please report this"))
                self._keeper.retire()
            finally:
                answer.failed(EngineError("the host was closed"))
                self._running = None
                if self._known.get(answer.request.request_id) is answer:
                    del self._known[answer.request.request_id]

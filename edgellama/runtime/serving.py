"""One request, from its prompt to its end, through as many workers as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgellama import errors
from edgellama.errors import EdgellamaError, NumericError
from edgellama.monitor import memory
from edgellama.runtime.answer import Answer
from edgellama.runtime.base import GenerateRequest
from edgellama.runtime.journal import Journal, complete
from edgellama.runtime.keeper import Keeper
from edgellama.runtime.messages import Cancel, Finished, Prefilled, RequestFailed, Step
from edgellama.runtime.prompting import Prompt, Prompter
from edgellama.runtime.supervisor import Death, Worker, WorkerDiedError

_STEP_BYTES = 1 << 20
"""Far more than a token's text, with what was held back, and a sampler's state ever have."""


class Serving:
    """Runs requests on the keeper's worker, one at a time."""

    def __init__(
        self, keeper: Keeper, prompter: Prompter, read_temperature: Callable[[], float | None] | None = None
    ) -> None:
        self._keeper = keeper
        self._prompter = prompter
        self._read_temperature = read_temperature

    async def serve(self, answer: Answer) -> None:
        """Answer a request. Raises what it fails of."""
        journal = Journal(answer.request.request_id)
        while not answer.ended:
            try:
                worker = await self._keeper.worker()
                answer.emit(*self._keeper.take_notices())
                if not journal.prompt:
                    await self._open(answer, journal, worker)
                await self._drive(answer, journal, worker)
            except WorkerDiedError as error:
                if answer.ended:
                    return
                answer.emit(self._keeper.died(journal, error.death))
                await asyncio.sleep(self._keeper.recovery.backoff_seconds())

    async def _open(self, answer: Answer, journal: Journal, worker: Worker) -> None:
        """Make the prompt and settle what the request left open."""
        request = answer.request
        prompt: Prompt = await self._prompter.prompt(request, worker)
        journal.prompt = prompt.tokens
        journal.sampling = complete((request.sampling, *self._keeper.spec.sampling))
        journal.max_tokens = _most_tokens(request, prompt, worker)
        journal.stop = request.stop
        journal.show = prompt.splitter.needs if prompt.splitter is not None else ()
        if prompt.splitter is not None:
            journal.show = prompt.splitter.needs
        answer.begin(prompt, journal)

    async def _drive(self, answer: Answer, journal: Journal, worker: Worker) -> None:
        """Let the worker run the request until it ends. Raises `WorkerDiedError`."""
        if answer.ended:
            return
        if journal.max_tokens == 0:
            answer.done("length")
            return
        messages = worker.open(journal.request_id)
        try:
            worker.send(journal.message())
            while True:
                message = await messages.get()
                match message:
                    case Death():
                        raise WorkerDiedError(message)
                    case Prefilled():
                        answer.prefilled(message)
                    case Step():
                        await self._step(answer, journal, worker, message)
                    case Finished():
                        await self._finish(answer, worker, message)
                        return
                    case RequestFailed():
                        if message.text:
                            answer.text(message.text)
                        self._fail(answer, errors.rebuild(message.kind, message.message, message.advice))
                        return
        finally:
            worker.forget(journal.request_id)

    async def _step(self, answer: Answer, journal: Journal, worker: Worker, step: Step) -> None:
        excess = None
        if len(journal.tokens) >= journal.max_tokens:
            excess = f"sent more than the {journal.max_tokens} tokens asked for"
        elif len(step.text) + len(step.state) > _STEP_BYTES:
            excess = "sent a token of impossible size"
        if excess is not None:
            worker.condemn("garbage", f"{excess} and was killed")
            raise WorkerDiedError(await worker.death)
        journal.add(step)
        answer.text(step.text)

    async def _finish(self, answer: Answer, worker: Worker, message: Finished) -> None:
        if message.text:
            answer.text(message.text)
        if answer.journal is not None:
            self._prompter.remember(tuple(answer.journal.tokens), answer.raw_text)
        celsius = await self._temperature()
        # A short answer may end before the first heartbeat.
        peak = worker.peak_bytes or memory.resident_bytes(worker.pid)
        answer.done(message.reason, message, peak_bytes=peak, celsius=celsius)
        self._keeper.survived()

    def _fail(self, answer: Answer, error: EdgellamaError) -> None:
        if isinstance(error, NumericError):
            # Numbers gone wrong may live on in the engine's buffers.
            self._keeper.retire()
        answer.failed(error)

    async def _temperature(self) -> float | None:
        return await asyncio.to_thread(self._read_temperature) if self._read_temperature is not None else None

    def cancel(self, answer: Answer) -> None:
        """Tell the worker to end a request that runs."""
        worker = self._keeper.present
        if worker is not None:
            worker.send(Cancel(answer.request.request_id))


def _most_tokens(request: GenerateRequest, prompt: Prompt, worker: Worker) -> int:
    context = worker.loaded.info.context_tokens if worker.loaded is not None else 0
    rest = max(0, context - len(prompt.tokens))
    return rest if request.max_tokens is None else min(request.max_tokens, rest)

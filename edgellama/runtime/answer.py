"""From a worker's messages about one request to typed events, with exactly one at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgellama.errors import EdgellamaError
from edgellama.runtime.base import (
    Done,
    Event,
    Failed,
    FinishReason,
    GenerateRequest,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    Usage,
)
from edgellama.runtime.messages import Finished, Prefilled

if TYPE_CHECKING:
    from edgellama.chat.reasoning import ReasoningSplitter
    from edgellama.runtime.journal import Journal
    from edgellama.runtime.prompting import Prompt


class Answer:
    """The events of one request. After the terminal one nothing is emitted any more."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.ended = False
        self.expiry: asyncio.TimerHandle | None = None
        """Ends it when its time is over."""
        self.journal: Journal | None = None
        self.dropped_messages = 0
        self._splitter: ReasoningSplitter | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._began = time.monotonic()
        self._first_token: float | None = None
        self._raw: list[str] = []

    async def next(self) -> Event:
        """The next event; after the terminal one there is none to wait for."""
        return await self._events.get()

    def emit(self, *events: Event) -> None:
        """Hand events to the consumer."""
        if not self.ended:
            for event in events:
                self._events.put_nowait(event)

    # ---- progress

    def begin(self, prompt: Prompt, journal: Journal) -> None:
        """The prompt is known."""
        self.journal = journal
        self.dropped_messages = prompt.dropped_messages
        self._splitter = prompt.splitter
        self.emit(*prompt.notices)

    def prefilled(self, message: Prefilled) -> None:
        """Prompt progress; a prompt computed again after a restart is not shown."""
        if self.journal is not None and not self.journal.tokens:
            total = max(0, message.total)
            self.emit(PromptProgress(min(max(0, message.done), total), total))

    def text(self, text: str) -> None:
        """A token arrived with the text it released."""
        if self._first_token is None:
            self._first_token = time.monotonic()
        if not text:
            return
        self._raw.append(text)
        if self._splitter is None:
            self.emit(TextDelta(text))
        else:
            self.emit(*_deltas(self._splitter.push(text)))

    @property
    def raw_text(self) -> str:
        """All text so far, reasoning and its tags included."""
        return "".join(self._raw)

    def flush(self) -> None:
        """Nothing more comes: let out what waits for more text."""
        if self._splitter is not None:
            self.emit(*_deltas(self._splitter.flush()))
            self._splitter = None

    # ---- the end

    def usage(self, cached_tokens: int = 0) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=len(self.journal.prompt) if self.journal else 0,
            completion_tokens=len(self.journal.tokens) if self.journal else 0,
            cached_tokens=max(0, cached_tokens),
            dropped_messages=self.dropped_messages,
        )

    def done(
        self,
        reason: FinishReason,
        finished: Finished | None = None,
        *,
        peak_bytes: int | None = None,
        celsius: float | None = None,
    ) -> None:
        """End well."""
        if self.ended:
            return
        self.flush()
        journal = self.journal
        event = Done(
            finish_reason=reason,
            usage=self.usage(finished.cached_tokens if finished else 0),
            timings=self._timings(finished, peak_bytes, celsius),
            tokens=tuple(journal.tokens) if journal else (),
            seed=journal.sampling.seed if journal else None,
        )
        self._end(event)

    def failed(self, error: EdgellamaError) -> None:
        """End badly; the text so far stays valid."""
        if self.ended:
            return
        self.flush()
        # Rooms have subclasses of their own; consumers know the tree in errors.py.
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == EdgellamaError.__module__)
        self._end(Failed(kind=kind, message=error.message, advice=error.advice, usage=self.usage()))

    def _end(self, event: Done | Failed) -> None:
        self.emit(event)
        self.ended = True
        if self.expiry is not None:
            self.expiry.cancel()

    def _timings(self, finished: Finished | None, peak_bytes: int | None, celsius: float | None) -> Timings:
        prompt_speed = generation_speed = None
        if finished is not None and self.journal is not None:
            resumed = self.journal.resumed
            computed = len(self.journal.prompt) + resumed - max(0, finished.cached_tokens)
            prompt_speed = _speed(computed, finished.prompt_seconds)
            generation_speed = _speed(len(self.journal.tokens) - resumed, finished.generation_seconds)
        first = self._first_token
        return Timings(
            prompt_tokens_per_second=prompt_speed,
            generation_tokens_per_second=generation_speed,
            time_to_first_token_seconds=None if first is None else first - self._began,
            total_seconds=time.monotonic() - self._began,
            peak_memory_bytes=peak_bytes or None,
            temperature_celsius=celsius,
        )


def _deltas(pieces: Iterable[tuple[str, str]]) -> list[Event]:
    return [ReasoningDelta(text) if kind == "reasoning" else TextDelta(text) for kind, text in pieces if text]


def _speed(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None

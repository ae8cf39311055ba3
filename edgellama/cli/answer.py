"""Follow one answer from its first event to its last, showing it as it comes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from edgellama.cli.bridge import Bridge
from edgellama.cli.common import ProgressLine
from edgellama.cli.interrupts import StopKeys
from edgellama.errors import EdgellamaError, rebuild
from edgellama.runtime.base import (
    Done,
    Failed,
    GenerateRequest,
    Notice,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    Usage,
)

_T = TypeVar("_T")


class Screen(Protocol):
    """Where the pieces of an answer are shown."""

    def text(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...

    def notice(self, notice: Notice) -> None: ...


@dataclass(slots=True)
class Answer:
    """What came of one request. Exactly one of `done` and `failed` is set."""

    text: str = ""
    reasoning: str = ""
    notices: list[Notice] = field(default_factory=list)
    done: Done | None = None
    failed: Failed | None = None
    stopped: bool = False
    """Ctrl-C was pressed, or we were asked to leave."""
    stopped_at_seconds: float | None = None
    """When, on the monotonic clock."""
    terminated: bool = False
    """We were asked to leave."""

    @property
    def usage(self) -> Usage:
        """Tokens, also of a failed answer."""
        end = self.done or self.failed
        return end.usage if end is not None else Usage()

    @property
    def timings(self) -> Timings:
        """Speed; unknown where it failed."""
        return self.done.timings if self.done is not None else Timings()

    def error(self) -> EdgellamaError | None:
        """What a failed answer raises."""
        return rebuild(self.failed.kind, self.failed.message, self.failed.advice) if self.failed is not None else None


def new_request_id() -> str:
    """An id that no other request has."""
    return secrets.token_hex(8)


def follow(bridge: Bridge, request: GenerateRequest, screen: Screen, progress: ProgressLine) -> Answer:
    """Run a request to its end. Ctrl-C ends it early with what it had produced; `OSError` when the screen is gone."""
    answer = Answer()
    texts: list[str] = []
    thoughts: list[str] = []
    latest = PromptProgress(0, 0)

    def waiting() -> None:
        if not texts and not thoughts:
            progress.update(latest.done, latest.total if latest.done else None, "reading the prompt")

    try:
        with StopKeys(lambda: bridge.cancel(request.request_id)) as keys, progress:
            for event in bridge.generate(request, waiting):
                match event:
                    case TextDelta(text):
                        texts.append(text)
                        _show(progress, screen.text, text)
                    case ReasoningDelta(text):
                        thoughts.append(text)
                        _show(progress, screen.reasoning, text)
                    case Notice():
                        answer.notices.append(event)
                        _show(progress, screen.notice, event)
                    case PromptProgress():
                        latest = event
                        waiting()
                    case Done():
                        answer.done = event
                    case Failed():
                        answer.failed = event
                    case _:
                        pass  # tool calls come only when tools were offered
        answer.stopped, answer.terminated = keys.pressed, keys.terminated
        answer.stopped_at_seconds = keys.pressed_at_seconds
    except OSError:
        bridge.cancel(request.request_id)
        raise
    answer.text, answer.reasoning = "".join(texts), "".join(thoughts)
    return answer


def _show(progress: ProgressLine, show: Callable[[_T], None], value: _T) -> None:
    progress.close()
    show(value)


def timing_line(answer: Answer) -> str:
    """Tokens and speeds of an answer in one line; what is unknown is left out."""
    usage, timings = answer.usage, answer.timings
    cached = f" ({usage.cached_tokens:,} from the cache)" if usage.cached_tokens else ""
    parts = [f"{usage.prompt_tokens:,} prompt tokens{cached}", f"{usage.completion_tokens:,} answer tokens"]
    if timings.prompt_tokens_per_second:
        parts.append(f"prompt {timings.prompt_tokens_per_second:,.0f} tokens/s")
    if timings.generation_tokens_per_second:
        parts.append(f"answer {timings.generation_tokens_per_second:,.1f} tokens/s")
    if timings.time_to_first_token_seconds is not None:
        parts.append(f"first token after {timings.time_to_first_token_seconds:.2f} s")
    if timings.temperature_celsius is not None:
        parts.append(f"{timings.temperature_celsius:.0f} °C")
    return ", ".join(parts)

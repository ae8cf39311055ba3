"""The Runtime seam: a request goes in, typed events come out. Chat, server and agents know only this."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from edgellama.chat.messages import Message, ToolCall
from edgellama.sampling.options import SamplingOptions

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
ContextPolicy = Literal["refuse", "drop-oldest", "shift", "summarize"]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One answer wanted. Exactly one of `messages`, `prompt` and `tokens` is given."""

    request_id: str
    messages: tuple[Message, ...] = ()
    """A conversation, rendered through the model's chat template."""
    prompt: str | None = None
    """Raw text, without a template."""
    tokens: tuple[int, ...] | None = None
    sampling: SamplingOptions = SamplingOptions()
    max_tokens: int | None = None
    """None: up to the end of the context."""
    stop: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    template_arguments: dict[str, Any] = {}
    context_policy: ContextPolicy = "refuse"
    client: str = ""
    """Who asks: the unit of fairness."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request. `cached_tokens` of the prompt needed no computation; `dropped_messages` were left out."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    dropped_messages: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Speed and cost of one answer. Unknown values are None."""

    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    time_to_first_token_seconds: float | None = None
    total_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    """Largest resident size of the worker so far."""
    temperature_celsius: float | None = None
    """Hottest sensor at the end of the answer."""


class PromptProgress(msgspec.Struct, frozen=True, tag="prompt"):
    """Prefill advanced: `done` of `total` prompt tokens are in the cache."""

    done: int
    total: int


class TextDelta(msgspec.Struct, frozen=True, tag="text"):
    """More of the answer. Never splits a character or a stop string."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """More of the model's thinking, apart from the answer."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool"):
    """A piece of a tool call: `call` is complete only in the last delta of its `index`."""

    index: int
    name: str = ""
    arguments: str = ""
    call: ToolCall | None = None


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Something the user should know that did not end the answer. `kind` is stable, `text` is for people."""

    kind: str
    text: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The answer ended. `tokens` are its ids, for splicing into later prompts."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    tokens: tuple[int, ...] = ()
    seed: int | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The answer could not go on; the text already streamed stays valid. `kind` names a class of `errors.py`."""

    kind: str
    message: str
    advice: str = ""
    usage: Usage = Usage()


Event = PromptProgress | TextDelta | ReasoningDelta | ToolCallDelta | Notice | Done | Failed
"""Every request ends in exactly one `Done` or `Failed`."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One loaded model as `edgellama ps` shows it."""

    name: str
    path: str
    engine: str
    worker_pid: int | None
    bytes: int
    requests: int
    context_tokens: int
    restarts: int = 0
    settings: str = ""
    """What the safety ladder changed, in words; empty when nothing."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime now."""

    host_pid: int
    models: tuple[ModelStatus, ...]
    queued: int = 0


class RuntimeCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime can do; what it cannot raises `UnsupportedError`."""

    logits: bool = False
    embeddings: bool = False
    tokenize: bool = True
    tools: bool = False
    context_policies: tuple[ContextPolicy, ...] = ("refuse",)


class Runtime(Protocol):
    """Implemented by the in-process `Host`, its clients, and remote servers."""

    @property
    def capabilities(self) -> RuntimeCapabilities: ...

    async def start(self) -> None:
        """Be ready for requests; raises the error that keeps it from being so."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Run one request. Closing the iterator cancels it within one step."""

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector per text, L2-normalized."""

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...

    async def count(self, request: GenerateRequest) -> int:
        """Prompt tokens the request would have."""

    async def cancel(self, request_id: str) -> None:
        """End a request with `Done(finish_reason="cancelled")`; unknown ids are ignored."""

    async def status(self) -> Status: ...

    async def close(self) -> None:
        """Cancel what runs and free everything."""

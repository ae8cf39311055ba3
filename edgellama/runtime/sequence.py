"""One request on its way through the scheduler: its tokens, what the engine holds of them, and its text."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from typing import Literal

from edgellama.chat.detokenize import Utf8Decoder
from edgellama.chat.stops import StopStrings
from edgellama.engine.base import Tokenizer
from edgellama.errors import UsageError
from edgellama.runtime.messages import Finished, Generate
from edgellama.sampling.chain import Sampler

Reason = Literal["stop", "length", "cancelled"]


class Slot:
    """A sequence id of the engine, and the tokens it still holds from its last request."""

    __slots__ = ("id", "taken", "tokens", "used_at")

    def __init__(self, number: int) -> None:
        self.id = number
        self.tokens: list[int] = []
        self.taken = False
        self.used_at = 0.0

    def shared(self, tokens: Sequence[int]) -> int:
        """Length of the common beginning of its tokens and `tokens`."""
        pairs = zip(self.tokens, tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(tokens)))


class Text:
    """Bytes of tokens to text that may be shown: whole characters, never a part of a stop string."""

    def __init__(self, stop: Iterable[str]) -> None:
        self._utf8 = Utf8Decoder()
        self._stops = StopStrings(tuple(stop))

    def push(self, piece: bytes) -> tuple[str, bool]:
        """The text released by a token's bytes, and whether a stop string ended the answer."""
        return self._stops.push(self._utf8.push(piece))

    def flush(self) -> str:
        """What was still held back, at the end of an answer."""
        text, stopped = self._stops.push(self._utf8.flush())
        return text if stopped else text + self._stops.flush()


def shown_piece(tokenizer: Tokenizer, token: int, shown: Container[str]) -> bytes:
    """The bytes of a token in an answer; those of a control token only where `shown` has its text."""
    piece = tokenizer.piece(token)
    if piece or not shown:
        return piece
    text = tokenizer.text_of(token)
    return text.encode() if text in shown else b""


class Running:
    """An admitted request. `tokens` are prompt and answer, the first `computed` of them are in the engine."""

    def __init__(self, request: Generate, sampler: Sampler, tokenizer: Tokenizer, slot: Slot) -> None:
        """Replays the tokens of `resume` through sampler and text, whose text was already shown."""
        self.request = request
        self.sampler = sampler
        self.slot = slot
        self.tokens = [*request.prompt, *request.resume]
        self.computed = 0
        self.cached = 0
        self.stopped = False
        self._tokenizer = tokenizer
        self._text = Text(request.stop)
        self._started = time.perf_counter()
        self._first_token: float | None = None
        sampler.observe(request.prompt)
        for token in request.resume:
            sampler.accept(token)
            self.stopped = self.stopped or self._text.push(shown_piece(tokenizer, token, request.show))[1]
        if request.state:
            sampler.restore(request.state)

    @property
    def pending(self) -> int:
        """Tokens the engine has yet to compute before the next can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether no token was sampled yet."""
        return self._first_token is None

    @property
    def answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def complete(self) -> bool:
        """Whether the answer has as many tokens as it may."""
        return self.answered >= self.request.max_tokens

    def mark_first(self) -> None:
        """The logits of the whole prompt are there."""
        if self._first_token is None:
            self._first_token = time.perf_counter()

    def take(self, token: int) -> str:
        """Add a sampled token; returns the text it releases and sets `stopped` at a stop string."""
        self.tokens.append(token)
        self.sampler.accept(token)
        text, self.stopped = self._text.push(shown_piece(self._tokenizer, token, self.request.show))
        return text

    def held_back(self) -> str:
        """Text that was kept in case more of a character or a stop string came; nothing after a stop string."""
        return "" if self.stopped else self._text.flush()

    def finished(self, reason: Reason) -> Finished:
        """The last message of this request."""
        now = time.perf_counter()
        first = now if self._first_token is None else self._first_token
        return Finished(
            request_id=self.request.request_id,
            reason=reason,
            text=self.held_back(),
            prompt_tokens=len(self.request.prompt),
            cached_tokens=min(self.cached, len(self.request.prompt)),
            completion_tokens=self.answered,
            prompt_seconds=first - self._started,
            generation_seconds=now - first,
            seed=self.sampler.seed,
        )


def check(request: Generate, vocabulary_tokens: int) -> None:
    """Refuse what would crash native code or can mean nothing. Raises `UsageError`."""
    if not request.prompt:
        raise UsageError("an empty prompt has no next token")
    for tokens in (request.prompt, request.resume):
        for extreme in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= extreme < vocabulary_tokens:
                raise UsageError(f"token {extreme} is outside the vocabulary of {vocabulary_tokens:,}")


def unstarted(request: Generate, tokenizer: Tokenizer) -> Finished:
    """The end of a request that was cancelled before it was admitted (here: a restart may have resumed it)."""
    text = Text(request.stop)
    stopped = any(text.push(shown_piece(tokenizer, token, request.show))[1] for token in request.resume)
    return Finished(
        request_id=request.request_id,
        reason="cancelled",
        text="" if stopped else text.flush(),
        prompt_tokens=len(request.prompt),
        cached_tokens=0,
        completion_tokens=len(request.resume),
        prompt_seconds=0.0,
        generation_seconds=0.0,
        seed=request.sampling.seed or 0,
    )

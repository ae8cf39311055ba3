"""From a request to the token ids of its prompt: template, tokenizer, and what to do when it does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellama.chat.messages import Message, PromptPart, TextPart
from edgellama.errors import ContextOverflowError, UnsupportedError, UsageError
from edgellama.runtime.base import ContextPolicy, GenerateRequest, Notice

if TYPE_CHECKING:
    from edgellama.chat.templates import ChatTemplate
    from edgellama.runtime.messages import Loaded
    from edgellama.runtime.model import ModelSpec
    from edgellama.runtime.supervisor import Worker

POLICIES: tuple[ContextPolicy, ...] = ("refuse", "drop-oldest")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that fits. `tail` is the end of its text: it tells whether the answer begins inside the reasoning."""

    tokens: tuple[int, ...]
    tail: str = ""
    dropped_messages: int = 0
    notices: tuple[Notice, ...] = ()


class Prompter:
    """Makes prompts for one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._template: ChatTemplate | None = None
        self._template_notice: str | None = None

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that cannot be meant. Raises `UsageError`."""
        given = sum((bool(request.messages), request.prompt is not None, request.tokens is not None))
        if given != 1:
            raise UsageError(f"a request needs messages, a prompt or tokens, and only one of them; {given} were given")
        if request.context_policy not in POLICIES:
            raise UnsupportedError(
                f"the context policy {request.context_policy!r} is not part of this version",
                f"use {' or '.join(POLICIES)}",
            )
        if request.max_tokens is not None and request.max_tokens < 0:
            raise UsageError(f"max_tokens is {request.max_tokens}, allowed is 0 and more")

    async def prompt(self, request: GenerateRequest, worker: Worker) -> Prompt:
        """The prompt of a request. Raises `ContextOverflowError`, `TemplateError`, or that the worker died."""
        loaded = worker.loaded
        if loaded is None:
            raise UsageError("the model is not loaded")
        if not request.messages:
            tokens = await self._plain(request, worker, loaded)
            self._refuse_overflow(len(tokens), loaded, request)
            return Prompt(tokens)
        await self._load_template(loaded)
        notices = [Notice("template", self._template_notice)] if self._template_notice else []
        tokens, tail = await self._render(request, request.messages, worker, loaded)
        if len(tokens) < loaded.info.context_tokens or request.context_policy == "refuse":
            self._refuse_overflow(len(tokens), loaded, request)
            return Prompt(tokens, tail, 0, tuple(notices))
        fitted = await self._drop_oldest(request, worker, loaded, len(tokens))
        return Prompt(fitted.tokens, fitted.tail, fitted.dropped_messages, (*notices, *fitted.notices))

    async def _plain(self, request: GenerateRequest, worker: Worker, loaded: Loaded) -> tuple[int, ...]:
        if request.tokens is not None:
            wrong = [token for token in request.tokens if not 0 <= token < loaded.info.vocabulary_tokens]
            if wrong or not request.tokens:
                found = f"token {wrong[0]} is outside the vocabulary" if wrong else "an empty prompt has no next token"
                raise UsageError(found)
            return request.tokens
        tokens = await worker.tokenize([TextPart(request.prompt or "")], add_bos=True)
        if not tokens:
            raise UsageError("an empty prompt has no next token", "give some text")
        return tokens

    async def _render(
        self, request: GenerateRequest, messages: Sequence[Message], worker: Worker, loaded: Loaded
    ) -> tuple[tuple[int, ...], str]:
        from edgellama.chat import prompt

        template = self._template
        if template is None:
            raise UsageError("the chat template is not loaded")
        parts: tuple[PromptPart, ...] = await asyncio.to_thread(
            prompt.build,
            template,
            messages,
            control_texts=loaded.control_texts,
            tools=request.tools,
            arguments=request.template_arguments,
        )
        tokens = await worker.tokenize(parts, add_bos=not _begins_with(parts, loaded.bos_text))
        last = parts[-1] if parts else None
        return tokens, last.text[-256:] if isinstance(last, TextPart) else ""

    async def _load_template(self, loaded: Loaded) -> None:
        if self._template is not None:
            return

        def load() -> tuple[ChatTemplate, str | None]:
            from edgellama.chat import templates

            return templates.choose(
                self._spec.template_name or self._spec.template,
                self._spec.architecture,
                self._spec.name,
                control_texts=loaded.control_texts,
                bos_text=loaded.bos_text,
                eos_text=loaded.eos_text,
            )

        self._template, self._template_notice = await asyncio.to_thread(load)

    def _refuse_overflow(self, prompt_tokens: int, loaded: Loaded, request: GenerateRequest) -> None:
        limit = loaded.info.context_tokens
        if prompt_tokens < limit:
            return
        ways = []
        trained = self._spec.trained_context_tokens
        if trained > limit:
            ways.append(f"start with a longer context (--ctx, up to {trained} for this model)")
        if request.messages and request.context_policy == "refuse":
            ways.append("leave out the oldest turns (--context-policy drop-oldest)")
        ways.append("shorten the prompt")
        raise ContextOverflowError(prompt_tokens, limit, " or ".join(ways))

    async def _drop_oldest(self, request: GenerateRequest, worker: Worker, loaded: Loaded, full: int) -> Prompt:
        """Drop whole turns from the oldest on until there is room for an answer."""
        limit = loaded.info.context_tokens
        room = min(request.max_tokens or limit // 4, limit // 2)
        head, turns = split_turns(request.messages)
        fewest, most = 1, len(turns) - 1
        best: tuple[tuple[int, ...], str, int] | None = None
        while fewest <= most:
            drop = (fewest + most) // 2
            kept = (*head, *(message for turn in turns[drop:] for message in turn))
            tokens, tail = await self._render(request, kept, worker, loaded)
            fits = len(tokens) + room <= limit or (drop == len(turns) - 1 and len(tokens) < limit)
            if fits:
                best, most = (tokens, tail, drop), drop - 1
            else:
                fewest = drop + 1
        if best is None:
            self._refuse_overflow(full, loaded, request)
            raise ContextOverflowError(full, limit, "shorten the last message")
        tokens, tail, drop = best
        dropped = sum(len(turn) for turn in turns[:drop])
        text = (
            f"the conversation has {full} tokens, the context holds {limit}: the {dropped} oldest messages are left out"
        )
        return Prompt(tokens, tail, dropped, (Notice("messages-dropped", text),))


def split_turns(messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[tuple[Message, ...]]]:
    """Leading system messages, and turns: a user message with everything up to the next one."""
    begin = next((i for i, m in enumerate(messages) if m.role not in {"system", "developer"}), len(messages))
    turns: list[list[Message]] = []
    for message in messages[begin:]:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return tuple(messages[:begin]), [tuple(turn) for turn in turns]


def _begins_with(parts: Sequence[PromptPart], bos_text: str) -> bool:
    first = parts[0] if parts else None
    return bool(bos_text) and isinstance(first, TextPart) and first.special and first.text.startswith(bos_text)

"""From a request to the token ids of its prompt: template, tokenizer, and what to do when it does not fit."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellama.chat.messages import Message, PromptPart, TextPart
from edgellama.errors import ContextOverflowError, UnsupportedError, UsageError
from edgellama.runtime.base import ContextPolicy, GenerateRequest, Notice

if TYPE_CHECKING:
    from edgellama.chat.reasoning import ReasoningSplitter
    from edgellama.chat.templates import ChatTemplate
    from edgellama.runtime.messages import Loaded
    from edgellama.runtime.model import ModelSpec
    from edgellama.runtime.supervisor import Worker

POLICIES: tuple[ContextPolicy, ...] = ("refuse", "drop-oldest")
_REMEMBERED_ANSWERS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that fits. `splitter` takes the answer's text apart; None where it has no reasoning."""

    tokens: tuple[int, ...]
    splitter: ReasoningSplitter | None = None
    dropped_messages: int = 0
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation as tokens, and the text of its end."""

    tokens: tuple[int, ...]
    tail: str
    notices: tuple[Notice, ...]


class Prompter:
    """Makes prompts for one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._template: ChatTemplate | None = None
        self._template_notice: str | None = None
        self._answers: OrderedDict[tuple[int, ...], str] = OrderedDict()

    def remember(self, tokens: tuple[int, ...], text: str) -> None:
        """Keep what an answer's tokens stand for, so that they can be spliced into the next prompt."""
        if tokens:
            self._answers[tokens] = text
            while len(self._answers) > _REMEMBERED_ANSWERS:
                self._answers.popitem(last=False)

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
        if request.messages:
            return await self._conversation(request, worker, loaded)
        tokens = await self._plain(request, worker, loaded)
        if len(tokens) >= loaded.info.context_tokens:
            raise self._overflow(len(tokens), loaded, request)
        return Prompt(tokens)

    async def _plain(self, request: GenerateRequest, worker: Worker, loaded: Loaded) -> tuple[int, ...]:
        tokens = request.tokens
        if tokens is None:
            tokens = await worker.tokenize([TextPart(request.prompt or "")], add_bos=True)
        wrong = next((token for token in tokens if not 0 <= token < loaded.info.vocabulary_tokens), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} is outside the vocabulary of {loaded.info.vocabulary_tokens:,}")
        if not tokens:
            raise UsageError("an empty prompt has no next token", "give some text")
        return tokens

    async def _conversation(self, request: GenerateRequest, worker: Worker, loaded: Loaded) -> Prompt:
        template = await self._load_template(loaded)
        limit = loaded.info.context_tokens
        drop = request.context_policy == "drop-oldest"
        room = min(request.max_tokens or limit // 4, limit // 2) if drop else 1
        try:
            rendered, dropped, whole = await self._fit(request, template, worker, loaded, max(1, room))
        except ContextOverflowError as error:
            if not drop or error.prompt_tokens >= limit:
                raise self._overflow(error.prompt_tokens, loaded, request) from error
            rendered, dropped, whole = await self._fit(request, template, worker, loaded, 1)
        notices = list(rendered.notices)
        if self._template_notice:
            notices.insert(0, Notice("template", self._template_notice))
        if dropped:
            text = f"the conversation has {whole} tokens, the context holds {limit}: {dropped} messages were left out"
            notices.append(Notice("messages-dropped", text))
        return Prompt(rendered.tokens, _splitter(template, rendered.tail), dropped, tuple(notices))

    async def _fit(
        self, request: GenerateRequest, template: ChatTemplate, worker: Worker, loaded: Loaded, room: int
    ) -> tuple[_Rendered, int, int]:
        """Render as many turns as leave `room` tokens for the answer; also messages dropped and tokens of the whole."""
        from edgellama.chat import fit

        policy: fit.Policy = "drop-oldest" if request.context_policy == "drop-oldest" else "refuse"
        tried: dict[tuple[Message, ...], _Rendered] = {}
        search = fit.steps(request.messages, loaded.info.context_tokens - room, policy)
        try:
            wanted = next(search)
            while True:
                tried[wanted] = await self._render(request, wanted, template, worker, loaded)
                wanted = search.send(len(tried[wanted].tokens))
        except StopIteration as end:
            fitted: fit.Fitted = end.value
        return tried[fitted.messages], fitted.dropped_messages, len(tried[tuple(request.messages)].tokens)

    async def _render(
        self,
        request: GenerateRequest,
        messages: Sequence[Message],
        template: ChatTemplate,
        worker: Worker,
        loaded: Loaded,
    ) -> _Rendered:
        notices: list[Notice] = []
        spliced = self._texts(messages)

        def build() -> tuple[PromptPart, ...]:
            from edgellama.chat import prompt

            return prompt.build(
                template,
                messages,
                control_texts=loaded.control_texts,
                tools=request.tools,
                arguments=request.template_arguments,
                adds_bos=loaded.adds_bos,
                decode=lambda tokens: spliced.get(tokens, ""),
                on_notice=lambda kind, text: notices.append(Notice(kind, text)),
            )

        parts = await asyncio.to_thread(build)
        tokens = await worker.tokenize(parts, add_bos=loaded.adds_bos)
        if not tokens:
            raise UsageError("the conversation renders to an empty prompt", "check the chat template")
        tail = "".join(part.text for part in parts if isinstance(part, TextPart))
        return _Rendered(tokens, tail, tuple(notices))

    def _texts(self, messages: Sequence[Message]) -> Mapping[tuple[int, ...], str]:
        """What tokens of earlier answers stand for; those with thinking only if this host made them."""
        own = self._answers
        return {m.tokens: own.get(m.tokens, "" if m.reasoning else m.content) for m in messages if m.tokens}

    async def _load_template(self, loaded: Loaded) -> ChatTemplate:
        if self._template is not None:
            return self._template

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

        template, self._template_notice = await asyncio.to_thread(load)
        self._template = template
        return template

    def _overflow(self, prompt_tokens: int, loaded: Loaded, request: GenerateRequest) -> ContextOverflowError:
        limit, trained = loaded.info.context_tokens, self._spec.trained_context_tokens
        longer = f"take a longer context (--ctx, up to {trained:,} for this model), " if trained > limit else ""
        turns = sum(message.role != "system" for message in request.messages)
        drop = ", or leave out the oldest turns (--context-policy drop-oldest)"
        may_drop = turns > 1 and request.context_policy != "drop-oldest"
        advice = f"{longer}{'' if may_drop or not longer else 'or '}shorten the prompt{drop if may_drop else ''}"
        return ContextOverflowError(prompt_tokens, limit, advice)


def import_early() -> None:
    """Import what the first prompt needs, while the model loads: the template engine takes a while."""
    from edgellama.chat import fit, prompt, reasoning, templates  # noqa: F401


def _splitter(template: ChatTemplate, rendered: str) -> ReasoningSplitter | None:
    from edgellama.chat import reasoning

    form = reasoning.choose(template.source)
    return None if form is None else reasoning.ReasoningSplitter(form, inside=reasoning.opens(form, rendered))

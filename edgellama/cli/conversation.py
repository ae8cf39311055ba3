"""A conversation in memory: its messages, its options, and the request they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from edgellama.chat.messages import Message
from edgellama.cli.engine_options import to_sampling
from edgellama.errors import UsageError
from edgellama.runtime.base import ContextPolicy, GenerateRequest
from edgellama.settings import SAMPLING_NAMES

if TYPE_CHECKING:
    from edgellama.cli.answer import Answer


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number") from None


def _policy(text: str) -> str:
    if text not in {"refuse", "drop-oldest"}:
        raise UsageError(f"the context policy is {text!r}, allowed is refuse or drop-oldest")
    return text


_SAMPLING: dict[str, Callable[[str], Any]] = dict.fromkeys((*SAMPLING_NAMES, "seed"), _number)
_INTEGERS = {"top_k", "repeat_last_n", "seed", "max_tokens"}
SETTABLE = (*_SAMPLING, "max_tokens", "context_policy")


@dataclass(slots=True)
class Conversation:
    """The turns so far. A turn the model did not answer is kept apart, so that roles always alternate."""

    system: str | None = None
    max_tokens: int | None = None
    context_policy: ContextPolicy = "refuse"
    template_arguments: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    unanswered: str | None = None

    def clear(self) -> None:
        """Forget the turns, keep the options."""
        self.messages.clear()
        self.unanswered = None

    def request(self, text: str, request_id: str) -> GenerateRequest:
        """The request that sends `text` after the turns so far."""
        first = () if self.system is None else (Message(role="system", content=self.system),)
        return GenerateRequest(
            request_id=request_id,
            messages=(*first, *self.messages, Message(role="user", content=text)),
            sampling=to_sampling(self.sampling),
            max_tokens=self.max_tokens,
            template_arguments=self.template_arguments,
            context_policy=self.context_policy,
            client="chat",
        )

    def record(self, text: str, answer: Answer) -> bool:
        """Keep a turn and what came of it; False when there was no answer, and the turn waits for `/retry`."""
        if not answer.text and not answer.reasoning:
            self.unanswered = text
            return False
        tokens = answer.done.tokens if answer.done is not None else ()
        self.messages += [
            Message(role="user", content=text),
            Message(role="assistant", content=answer.text, reasoning=answer.reasoning, tokens=tokens),
        ]
        self.unanswered = None
        return True

    def take_back(self) -> str | None:
        """The last turn's text, its answer removed; None when there is none."""
        if self.unanswered is not None:
            text, self.unanswered = self.unanswered, None
            return text
        if len(self.messages) < 2:
            return None
        self.messages.pop()
        return self.messages.pop().content

    def forget_tokens(self) -> None:
        """Drop token ids, which mean nothing to another model."""
        self.messages = [msgspec.structs.replace(message, tokens=()) for message in self.messages]

    def set(self, name: str, value: str) -> str:
        """Change an option by name, checked; an empty value resets it. Returns what holds now, in words."""
        name = name.removeprefix("--").replace("-", "_")
        if name.startswith("template."):
            return self._set_template(name.removeprefix("template."), value)
        if name not in SETTABLE:
            raise UsageError(f"there is no option {name!r}", f"choose from {', '.join(SETTABLE)}, template.NAME")
        if name == "context_policy":
            self.context_policy = _policy(value or "refuse")  # type: ignore[assignment]  # checked just here
            return f"context_policy is {self.context_policy}"
        number = _number(value) if value else None
        if name in _INTEGERS and isinstance(number, float):
            raise UsageError(f"{name} is {value}, allowed are whole numbers")
        if name == "max_tokens":
            if number is not None and number < 1:
                raise UsageError(f"max_tokens is {value}, allowed is 1 or more")
            self.max_tokens = None if number is None else int(number)
        else:
            changed = {key: old for key, old in self.sampling.items() if key != name}
            if number is not None:
                changed[name] = number
            to_sampling(changed)
            self.sampling = changed
        return f"{name} is {number}" if number is not None else f"{name} is the model's own"

    def _set_template(self, name: str, value: str) -> str:
        from edgellama.cli.run import parse_template_arguments

        self.template_arguments = {key: old for key, old in self.template_arguments.items() if key != name}
        if not value:
            return f"template.{name} is the template's own"
        self.template_arguments |= parse_template_arguments((f"{name}={value}",))
        return f"template.{name} is {self.template_arguments[name]!r}"

    def options(self) -> list[str]:
        """The options that differ from the model's own, one a line."""
        lines = [f"{name} = {value}" for name, value in self.sampling.items()]
        if self.max_tokens is not None:
            lines.append(f"max_tokens = {self.max_tokens}")
        lines.append(f"context_policy = {self.context_policy}")
        return lines + [f"template.{name} = {value!r}" for name, value in self.template_arguments.items()]

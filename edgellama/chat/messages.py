"""Messages of a conversation, and the prompt they become."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool", "developer"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call the model made; `arguments` is a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn. `tokens` are the ids an assistant message was generated as, empty when unknown."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    tokens: tuple[int, ...] = ()


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of prompt text. `special` lets the tokenizer turn control-token texts in it into control tokens."""

    text: str
    special: bool = True


class TokenPart(msgspec.Struct, frozen=True, tag="tokens"):
    """A piece of prompt that is already tokens: an earlier answer, spliced in as it was generated.

    `text` is what they stand for. A tokenizer to which they stand for anything else (another model's answer, an edited
    one) takes the text instead.
    """

    tokens: tuple[int, ...]
    text: str = ""


PromptPart = TextPart | TokenPart

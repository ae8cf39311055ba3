"""Messages as chat templates expect them, and the rewrites that make a conversation fit a strict template.

Rewrites never lose text, are tried only when the template refuses or drops something, and are told to the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from edgellama.chat.marks import strings
from edgellama.chat.messages import Message

BLANK_LINE = "\n\n"


class ChatNotice(NamedTuple):
    """Something the user should know about the prompt. `kind` is stable, `text` is for people."""

    kind: str
    text: str


SYSTEM_JOINED = ChatNotice(
    "system-joined", "the template takes one system message at the front: they were joined there"
)
SYSTEM_MOVED = ChatNotice(
    "system-moved", "the template has no system role: that text now begins the first user message"
)
TURNS_JOINED = ChatNotice(
    "turns-joined", "the template wants alternating roles: messages in a row of one role were joined"
)
SYSTEM_IGNORED = ChatNotice("system-ignored", "the template ignores the system message")
TOOL_TURNS_IGNORED = ChatNotice(
    "tool-messages-ignored", "the template leaves out calls of tools, or what they answered"
)
USER_IGNORED = ChatNotice("user-ignored", "the template leaves out or changes a user message")
TOOLS_IGNORED = ChatNotice("tools-ignored", "the template has no place for tools: the model does not see them")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as a template sees it. `source` is the message it was made from, None when made from several."""

    fields: dict[str, Any]
    source: Message | None = None

    @property
    def role(self) -> str:
        role: str = self.fields["role"]
        return role

    @property
    def content(self) -> str:
        return self.fields["content"] or ""


@dataclass(frozen=True, slots=True)
class Form:
    """What a template wants: found in its source."""

    null_content: bool = False
    """It asks whether `content` is none: an answer that is only tool calls then has None instead of ""."""
    developer: bool = False
    """It knows the role `developer`; others get it as `system`."""
    text_arguments: bool = False
    """It wants the arguments of tool calls as JSON text instead of an object."""
    reasoning_field: str = "reasoning_content"
    """The name it reads thinking under."""


def turns(messages: Sequence[Message], form: Form) -> tuple[Turn, ...]:
    """Each message as the dictionary that callers of Hugging Face's templates give; unset fields are left out."""
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    return tuple(Turn(_fields(message, form, called), message) for message in messages)


def _fields(message: Message, form: Form, called: dict[str, str]) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not form.developer else message.role
    only_calls = form.null_content and message.tool_calls and not message.content
    fields: dict[str, Any] = {"role": role, "content": None if only_calls else message.content}
    if message.reasoning:
        fields[form.reasoning_field] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": as_json(call.arguments) if form.text_arguments else call.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if name := message.name or called.get(message.tool_call_id, ""):
        fields["name"] = name
    return fields


def as_json(value: Any) -> str:
    """JSON as the template filter `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)


def variants(given: tuple[Turn, ...]) -> Iterator[tuple[tuple[Turn, ...], tuple[ChatNotice, ...]]]:
    """The conversation, then its rewrites from the mildest on, each with what to say about it."""
    yield given, ()
    systems = [turn for turn in given if turn.role == "system"]
    rest = tuple(turn for turn in given if turn.role != "system")
    joined = _join_rows(given)
    if len(systems) > 1 or (systems and given[0].role != "system"):
        front = (_joined(systems), *rest)
        yield front, (SYSTEM_JOINED,)
        joined = _join_rows(front)
    if len(joined) < len(given):
        yield joined, (TURNS_JOINED,)
    moved = _system_into_user(systems, rest)
    if moved is not None:
        yield moved, (SYSTEM_MOVED,)
        alternating = _join_rows(moved)
        if len(alternating) < len(moved):
            yield alternating, (SYSTEM_MOVED, TURNS_JOINED)


def _joined(row: Sequence[Turn]) -> Turn:
    if len(row) == 1:
        return row[0]
    content = BLANK_LINE.join(turn.content for turn in row if turn.content)
    return Turn({**row[0].fields, "content": content}, None)


def _join_rows(given: Sequence[Turn]) -> tuple[Turn, ...]:
    """Neighbours of one role as one turn, where both are plain text."""
    rows: list[list[Turn]] = []
    for turn in given:
        plain = turn.fields.keys() == {"role", "content"}
        if rows and plain and rows[-1][-1].role == turn.role and rows[-1][-1].fields.keys() == {"role", "content"}:
            rows[-1].append(turn)
        else:
            rows.append([turn])
    return tuple(map(_joined, rows))


def _system_into_user(systems: Sequence[Turn], rest: tuple[Turn, ...]) -> tuple[Turn, ...] | None:
    text = BLANK_LINE.join(turn.content for turn in systems if turn.content.strip())
    for index, turn in enumerate(rest):
        if turn.role == "user" and systems:
            content = text + BLANK_LINE + turn.content if text else turn.content
            merged = replace(turn, fields={**turn.fields, "content": content})
            return (*rest[:index], merged, *rest[index + 1 :])
    return None


def shows(text: str, rendered: str) -> bool:
    """Whether `rendered` still has all words of `text`, as they were or as JSON writes them."""
    text = text.strip()
    if text in rendered or as_json(text)[1:-1] in rendered:
        return True
    return all(line.strip() in rendered for line in text.splitlines())


def ignored(messages: Sequence[Message], rendered: str) -> tuple[ChatNotice, ...]:
    """What to say about messages whose text is not in the prompt."""
    by_role = {"system": SYSTEM_IGNORED, "developer": SYSTEM_IGNORED, "tool": TOOL_TURNS_IGNORED, "user": USER_IGNORED}
    found: dict[ChatNotice, None] = {}
    for message in messages:
        notice = by_role.get(message.role)
        if notice and not shows(message.content, rendered):
            found[notice] = None
        for call in message.tool_calls:
            if not all(shows(word, rendered) for word in (call.name, *strings(call.arguments))):
                found[TOOL_TURNS_IGNORED] = None
    return tuple(found)


def leaks_objects(given: Sequence[Turn], rendered: str) -> bool:
    """Whether arguments of a tool call came out as Python writes them: the template wanted JSON text."""
    for turn in given:
        for call in turn.fields.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if arguments and repr(arguments) != as_json(arguments) and repr(arguments) in rendered:
                return True
    return False

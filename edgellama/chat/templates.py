"""Chat templates: a model file's Jinja source, sandboxed, applied to a conversation; or its family's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jinja2 import nodes

from edgellama.chat import adapt, fallback, sandbox
from edgellama.chat.adapt import ChatNotice, Form, Turn
from edgellama.chat.limits import ADVICE, SCALARS, Budget, Limits
from edgellama.chat.messages import Message
from edgellama.errors import TemplateError, UsageError

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation in the form the template accepted, and the text it became."""

    turns: tuple[Turn, ...]
    text: str
    notices: tuple[ChatNotice, ...]
    tools: Tools | None = None


class ChatTemplate:
    """A compiled template. Thread-safe; one rendering may take up to `limits.seconds`, so call it off an event loop."""

    def __init__(
        self,
        source: str,
        *,
        bos_text: str = "",
        eos_text: str = "",
        architecture: str = "",
        limits: Limits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `now` is the clock of `strftime_now`. Raises `TemplateError`."""
        self.source = source
        self.bos_text = bos_text
        self.eos_text = eos_text
        self.architecture = architecture
        self._limits = limits or Limits()
        self._now = now
        tree = sandbox.parse(source, self._limits)
        self.literals = frozenset(_literals(tree))
        """The texts the template itself writes or looks for."""
        self.reads_tools = any(node.name == "tools" for node in tree.find_all(nodes.Name))
        self._form = _form(tree, self.literals)
        self._code = sandbox.compile_tree(tree, self._limits)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = (),
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        on_notice: Callable[[str, str], None] | None = None,
    ) -> str:
        """The prompt as text. `on_notice(kind, text)` hears what had to be changed. Raises `TemplateError`."""
        prepared = self.prepare(messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt)
        for notice in prepared.notices if on_notice else ():
            on_notice(*notice)  # type: ignore[misc]
        return prepared.text

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = (),
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Prepared:
        """Find the form of the conversation that the template accepts, from the given one on. Raises `TemplateError`.

        A refused or dropped system message moves into the first user message, several become one, and rows of one role
        are joined; arguments of tool calls become JSON text where the template cannot take objects. What the template
        leaves out all the same is told. All attempts share one time limit.
        """
        deadline = time.thread_time() + self._limits.seconds
        failure: TemplateError | None = None
        found: Prepared | None = None
        for form, given_tools in self._ways(messages, tools):

            def attempt(given: tuple[Turn, ...], given_tools: Tools | None = given_tools) -> str:
                left = replace(self._limits, seconds=max(deadline - time.thread_time(), 0.01))
                fields = [turn.fields for turn in given]
                return self._run(fields, given_tools, arguments, add_generation_prompt, left)

            try:
                prepared, complete = _accepted(adapt.turns(messages, form), attempt)
            except TemplateError as error:
                failure = failure or error
                continue
            if complete or found is None:
                found = replace(prepared, tools=given_tools)
            if complete:
                break
        if found is None:
            raise failure or TemplateError("the chat template printed nothing", ADVICE)
        ignored = adapt.ignored(messages, found.text)
        if tools and not self.reads_tools:
            ignored = (*ignored, adapt.TOOLS_IGNORED)
        return replace(found, notices=(*found.notices, *ignored))

    def _ways(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[Form, Tools | None]]:
        """What a conversation may be put into, from what callers of transformers would give on."""
        form = self._form
        yield form, tools or None
        if not tools:
            yield form, ()  # some go through the list without asking whether there is one
        if any(message.tool_calls for message in messages):
            yield replace(form, text_arguments=True), tools or None
            if form.null_content:
                yield replace(form, null_content=False), tools or None
        if form.developer and any(message.role == "developer" for message in messages):
            yield replace(form, developer=False), tools or None

    def render_dicts(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages that are already in the template's form, as Hugging Face's `render_jinja_template` does."""
        return self._run(messages, tools, arguments, add_generation_prompt, self._limits)

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        arguments: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        limits: Limits,
    ) -> str:
        arguments = arguments or {}
        if reserved := sorted(_RESERVED & arguments.keys()):
            raise UsageError(
                f"a template argument cannot be named {', '.join(reserved)}", "use a name that the template reads"
            )
        copy = _Copy(limits)
        variables = {
            "bos_token": self.bos_text,
            "eos_token": self.eos_text,
            "documents": None,
            **copy.plain(arguments),
            "messages": [_with_reasoning(message) for message in copy.plain(list(messages))],
            "tools": None if tools is None else copy.plain(list(tools)),
            "add_generation_prompt": add_generation_prompt,
        }
        budget = Budget(limits, input_chars=copy.chars, input_nodes=copy.nodes)
        return sandbox.run(self._code, variables, budget, self._now)


def _accepted(given: tuple[Turn, ...], attempt: Callable[[tuple[Turn, ...]], str]) -> tuple[Prepared, bool]:
    """The mildest rewrite that the template takes whole, or the mildest that it takes, and which of both it is."""
    systems = [turn.content for turn in given if turn.role in {"system", "developer"}]
    refusal: TemplateError | None = None
    incomplete: Prepared | None = None
    for variant, notices in adapt.variants(given):
        try:
            text = attempt(variant)
        except sandbox.RefusedError as error:
            refusal = refusal or error
            continue
        prepared = Prepared(variant, text, notices)
        if all(adapt.shows(system, text) for system in systems):
            return prepared, not adapt.leaks_objects(variant, text)
        incomplete = incomplete or prepared
    if incomplete is not None:
        return incomplete, False
    reason = refusal.message if refusal else "it printed nothing"
    raise sandbox.RefusedError(
        f"the chat template refused the conversation: {reason}", _advice(reason, given)
    ) from refusal


def _advice(reason: str, given: tuple[Turn, ...]) -> str:
    if any(turn.role == "tool" for turn in given) and "tool" not in reason.lower():
        return "this template may know no tool results: leave the tools out, or use a model that was trained with them"
    said = reason.lower()
    if "alternat" in said or "first user message" in said:
        return "begin with a user message and let user and assistant messages take turns"
    if "system" in said:
        return "put one system message at the front, or its text into the first user message"
    if "tool" in said:
        return "check that every tool result follows the answer that called it, with the ids this model wants"
    return "change the conversation as the message says, or use another chat template"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under each name that templates read, as transformers fills them."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Copy:
    """Copies what a template will see into plain JSON types and measures it."""

    def __init__(self, limits: Limits) -> None:
        self.chars = 0
        self.nodes = 0
        self._depth = limits.depth - 2

    def plain(self, value: Any, depth: int = 0) -> Any:
        self.nodes += 1
        if depth > self._depth:
            raise TemplateError(
                f"the conversation or a tool is nested more than {self._depth} levels deep", "flatten it"
            )
        if isinstance(value, str):
            self.chars += len(value)
            return str.__str__(value)
        if type(value) in SCALARS:
            return value
        if isinstance(value, Mapping):
            return {self.plain(k, depth + 1): self.plain(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item, depth + 1) for item in value]
        raise TemplateError(f"a template cannot be given a {type(value).__name__}", "pass JSON values only")


def _literals(tree: nodes.Template) -> Iterable[str]:
    for data in tree.find_all(nodes.TemplateData):
        yield data.data
    for const in tree.find_all(nodes.Const):
        if isinstance(const.value, str):
            yield const.value


def _form(tree: nodes.Template, literals: frozenset[str]) -> Form:
    fields = literals | {node.attr for node in tree.find_all(nodes.Getattr)}
    other_name = "reasoning" in fields and not fields & {"reasoning_content", "thinking"}
    return Form(
        null_content=_asks_for_null_content(tree),
        developer="developer" in literals,
        reasoning_field="reasoning" if other_name else "reasoning_content",
    )


def _asks_for_null_content(tree: nodes.Template) -> bool:
    for test in tree.find_all(nodes.Test):
        node = test.node
        if test.name == "none" and (
            (isinstance(node, nodes.Getattr) and node.attr == "content")
            or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content")
        ):
            return True
    return False


def choose(
    source: str | None,
    architecture: str = "",
    name: str = "",
    *,
    control_texts: Sequence[str] = (),
    bos_text: str = "",
    eos_text: str = "",
    limits: Limits | None = None,
) -> tuple[ChatTemplate, str | None]:
    """The file's own template, or the one of its family and a notice that says so.

    `source` may also be the name of a family. `control_texts` are those of the vocabulary, empty when not known yet.
    """

    def compiled(text: str) -> ChatTemplate:
        return ChatTemplate(text, bos_text=bos_text, eos_text=eos_text, architecture=architecture, limits=limits)

    source = (source or "").strip("\0")
    if source.strip() in fallback.FAMILIES:
        return compiled(fallback.FAMILIES[source.strip()]), None
    problem = "the model file has no chat template"
    if source.strip():
        try:
            return compiled(source), None
        except TemplateError as error:
            problem = f"the model file's chat template cannot be used ({error.message})"
    family, why = fallback.family(architecture, name, control_texts)
    return compiled(fallback.FAMILIES[family]), f"{problem}: using the {family} template, chosen by {why}"

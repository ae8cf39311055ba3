"""A conversation as prompt parts: only the template writes control tokens, and earlier answers keep their token ids."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edgellama.chat import marks
from edgellama.chat.messages import Message, PromptPart, TextPart, TokenPart
from edgellama.chat.reasoning import PLAIN_TAGS
from edgellama.chat.stops import END_OF_TURN_TEXTS
from edgellama.chat.templates import ChatTemplate, Prepared, Tools
from edgellama.errors import TemplateError

Span = tuple[int, int]
Decode = Callable[[tuple[int, ...]], str]


@dataclass(frozen=True, slots=True)
class _Answer:
    """An earlier answer in the prompt's text, [start, stop), and its ids."""

    start: int
    stop: int
    tokens: tuple[int, ...]


def build(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    control_texts: Sequence[str] = (),
    tools: Tools = (),
    arguments: Mapping[str, Any] | None = None,
    adds_bos: bool = False,
    add_generation_prompt: bool = True,
    decode: Decode | None = None,
    on_notice: Callable[[str, str], None] | None = None,
) -> tuple[PromptPart, ...]:
    """Render `messages` into parts to be tokenized one by one and joined.

    `control_texts`: what the vocabulary turns into control tokens. In messages and tools they stay plain text: such a
    stretch, up to the template's own control tokens on both sides, is a part with `special=False`. A prompt without
    them is one part.
    `adds_bos`: the tokenizer will put its BOS in front of the first part; the template's own is then left out. Else
    several become one.
    A message's `tokens` take the place of its text where the template shows it unchanged. `decode` gives their text; by
    default it is the message's content, so give it when they hold thinking, too. They hold no end-of-turn token.
    Raises `TemplateError`, `UsageError`.
    """
    prepared = template.prepare(messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt)
    for notice in prepared.notices if on_notice else ():
        on_notice(*notice)  # type: ignore[misc]
    known = frozenset(control_texts) - {""}
    structural = frozenset(text for text in END_OF_TURN_TEXTS if text in template.source)
    scan = _Scan(template, prepared, known | structural, arguments or {}, add_generation_prompt)
    marked = scan.result()
    text = marked.text
    fakes, genuine = scan.finder.spans(text, marked.cuts)
    # A text that the tokenizer reads even as plain text is cut in two: half of it is none.
    halves = frozenset(begin + 1 for begin, end in fakes if text[begin:end] not in known)
    start = _bos(text, template.bos_text, fakes, adds_bos=adds_bos)
    parts: list[PromptPart] = []
    for answer in (*_answers(prepared, marked, decode), None):
        stop = answer.start if answer else len(text)
        parts += _text_parts(text, (start, stop), fakes, genuine, halves)
        if answer:
            parts.append(TokenPart(answer.tokens, text[answer.start : answer.stop]))
            start = answer.stop
    return tuple(parts)


class _Scan:
    """Renders a prepared conversation again, with marks."""

    def __init__(
        self,
        template: ChatTemplate,
        prepared: Prepared,
        protected: frozenset[str],
        arguments: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> None:
        self._template = template
        self._prepared = prepared
        self._protected = protected
        self._tools = None if prepared.tools is None else list(prepared.tools)
        self._arguments = dict(arguments)
        self._add_generation_prompt = add_generation_prompt
        self.finder = marks.Finder(protected)

    def result(self) -> marks.Unmarked:
        """The rendering with what the marks told; the first rendering as it is where there is nothing to tell."""
        plain = marks.Unmarked(self._prepared.text, frozenset(), ())
        firsts = {text[0] for text in self._protected}
        texts = [*marks.strings([turn.fields for turn in self._prepared.turns])]
        texts += [*marks.strings(self._tools), *marks.strings(self._arguments)]
        spliced = any(turn.source is not None and turn.source.tokens for turn in self._prepared.turns)
        if not spliced and not any(first in text for text in texts for first in firsts):
            return plain
        chosen = marks.choose([*texts, self._template.source, self._prepared.text])
        if spliced:
            try:
                marked = self._render(chosen, answers=True)
            except TemplateError:  # it looks at the edges of an answer: then there is no splicing
                marked = None
            if marked is not None and marked.text == plain.text:
                return marked
        try:
            marked = self._render(chosen, answers=False)
        except TemplateError as error:
            raise TemplateError(
                "the chat template cannot be kept from reading text of the conversation as control tokens",
                "remove texts like <|im_end|> from the messages",
            ) from error
        if marked.text == plain.text:
            return marked
        # The template looked at a marked text. Without a control text of the conversation nothing depends on it.
        fakes, genuine = self.finder.spans(marked.text, marked.cuts)
        harmless = not fakes and len(genuine) == len(self.finder.spans(plain.text, frozenset())[1])
        return plain if harmless else marked

    def _render(self, chosen: marks.Marks, *, answers: bool) -> marks.Unmarked:
        literals = self._template.literals
        cut = marks.cutter(self._protected, literals, chosen.cut)
        # An answer's own thinking tags stay what they are, so that the template can take the thinking out.
        of_model = marks.cutter(self._protected - PLAIN_TAGS, literals | PLAIN_TAGS, chosen.cut)
        messages = []
        for number, turn in enumerate(self._prepared.turns):
            change = of_model if turn.role == "assistant" else cut
            fields = {
                key: marks.mapped(value, change) if key != "role" else value for key, value in turn.fields.items()
            }
            core = turn.content.strip()
            if answers and core and turn.role == "assistant" and turn.source is not None and turn.source.tokens:
                before, _, after = turn.content.partition(core)
                around = chosen.begin + chosen.number(number) + of_model(core) + chosen.end
                fields["content"] = before + around + after
            messages.append(fields)
        rendered = self._template.render_dicts(
            messages,
            tools=marks.mapped(self._tools, cut),
            arguments=marks.mapped(self._arguments, cut),
            add_generation_prompt=self._add_generation_prompt,
        )
        return marks.unmark(rendered, chosen)


def _answers(prepared: Prepared, marked: marks.Unmarked, decode: Decode | None) -> list[_Answer]:
    """Where the answers stand whose tokens can be used: the text around the found core must be the tokens' own."""
    found: list[_Answer] = []
    text = marked.text
    for number, start, stop in marked.answers:
        turn = prepared.turns[number]
        message = turn.source
        core = turn.content.strip()
        if message is None or text[start:stop] != core or (found and start < found[-1].stop):
            continue
        whole = decode(message.tokens) if decode else message.content
        if message.tool_calls or core not in whole:
            continue
        begin = start - whole.rfind(core)
        end = begin + len(whole)
        if begin >= (found[-1].stop if found else 0) and text[begin:end] == whole:
            found.append(_Answer(begin, end, message.tokens))
    return found


def _bos(text: str, bos: str, fakes: Sequence[Span], *, adds_bos: bool) -> int:
    """Where the prompt begins, so that it has exactly one BOS."""
    count = 0
    while bos and text.startswith(bos, count * len(bos)) and (count * len(bos), (count + 1) * len(bos)) not in fakes:
        count += 1
    return len(bos) * (count if adds_bos else max(count - 1, 0))


def _text_parts(
    text: str, whole: Span, fakes: Sequence[Span], genuine: Sequence[Span], halves: frozenset[int]
) -> Iterator[TextPart]:
    """`whole` as parts: control tokens are read in all but the stretches that have someone else's in them."""
    start, stop = whole
    position = last = start
    borders = [span for span in genuine if start <= span[0] and span[1] <= stop]
    starts = [fake[0] for fake in fakes]
    for begin, end in (*borders, (stop, stop)):
        if bisect_left(starts, last) < bisect_left(starts, begin):
            if last > position:
                yield TextPart(text[position:last])
            cuts = [last, *sorted(cut for cut in halves if last < cut < begin), begin]
            for left, right in pairwise(cuts):
                yield TextPart(text[left:right], special=False)
            position = begin
        last = end
    if stop > position:
        yield TextPart(text[position:stop])

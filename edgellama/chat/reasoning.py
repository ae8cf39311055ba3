"""Splits a model's thinking from its answer while both stream in. The format is found in the chat template's source.

Rules for tagged formats: one block at the very start counts (whitespace may stand in front); tag-like text later in the
answer stays text. Line breaks around the thinking, and between its end and the answer, belong to neither. A block that
never ends is all thinking. Text that never has a block comes out unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["text", "reasoning"]
Delta = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Format:
    """How a model family marks its thinking: `open` … `close`; `noise` after `open` is dropped (a channel's name)."""

    name: str
    open: str
    close: str
    noise: str = ""
    mark: str = ""
    """What the template's source has; `open` when empty."""


HARMONY = Format("harmony", "<|channel|>analysis<|message|>", "<|end|>", mark="<|channel|>analysis")

FORMATS: tuple[Format, ...] = (
    HARMONY,
    Format("gemma", "<|channel>", "<channel|>", noise="thought"),
    Format("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    Format("mistral", "[THINK]", "[/THINK]"),
    Format("seed", "<seed:think>", "</seed:think>"),
    Format("minimax", "<mm:think>", "</mm:think>"),
    Format("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    Format("longcat", "<longcat_think>", "</longcat_think>"),
    Format("hunyuan", "<think:opensource>", "</think:opensource>"),
    Format("solar", "<|think|>", "<|end|><|begin|>assistant<|content|>", mark="<|begin|>assistant<|think|>"),
    Format("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", mark="[BEGIN FINAL RESPONSE]"),
    Format("kimi-vl", "◁think▷", "◁/think▷"),
    Format("thinking", "<thinking>", "</thinking>"),
    Format("reasoning", "<reasoning>", "</reasoning>"),
    Format("thought", "<thought>", "</thought>"),
    Format("think", "<think>", "</think>"),
)
"""In the order they are looked for."""

CONTROL_TEXTS = frozenset(
    {text for form in FORMATS for text in (form.open, form.close)}
    | {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|begin|>", "<|content|>"}
)
"""Texts that must reach the splitter although a vocabulary may have them as control tokens, whose pieces are empty."""

PLAIN_TAGS = frozenset(text for form in FORMATS if not form.mark for text in (form.open, form.close))
"""Tags that templates look for in earlier answers."""


def choose(source: str) -> Format | None:
    """The format a chat template's source speaks of, None when it has no thinking."""
    found = [form for form in FORMATS if (form.mark or form.open) in source or (form.close in source and not form.mark)]
    if not found:
        return None
    first = found[0]
    if first.name in {"thinking", "reasoning", "thought"} and len(found) > 1:
        # Several of the plain tags: the one the template handles in earlier answers, by its closing tag.
        return max(found, key=lambda form: source.count(form.close))
    return first


def opens(form: Format, prompt: str) -> bool:
    """Whether `prompt`, rendered up to the answer, has begun the thinking that the answer goes on with."""
    begun = prompt.rfind(form.open)
    if begun < 0:
        return False
    after = prompt[begun + len(form.open) :]
    return form.close not in after and not after.removeprefix(form.noise).strip()


class _Parser(Protocol):
    def push(self, text: str) -> list[Delta]: ...

    def flush(self) -> list[Delta]: ...


class ReasoningSplitter:
    """Takes the answer's text piece by piece and gives it back as ("text" | "reasoning", piece), in order.

    `inside`: the prompt has opened the block already (`opens`). Without a format everything is text.
    """

    def __init__(self, form: Format | None, *, inside: bool = False) -> None:
        self._parser: _Parser = (
            _Plain() if form is None else _Harmony(inside=inside) if form is HARMONY else _Tagged(form, inside=inside)
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """Texts of control tokens that must reach `push`; none without a format."""
        return () if isinstance(self._parser, _Plain) else tuple(sorted(CONTROL_TEXTS))

    def push(self, text: str) -> list[Delta]:
        """What is certain with `text`; neighbours of one kind come as one piece."""
        return _joined(self._parser.push(text))

    def flush(self) -> list[Delta]:
        """What was held back: the answer has ended."""
        return _joined(self._parser.flush())


def _joined(deltas: list[Delta]) -> list[Delta]:
    result: list[Delta] = []
    for kind, text in deltas:
        if not text:
            continue
        if result and result[-1][0] == kind:
            result[-1] = (kind, result[-1][1] + text)
        else:
            result.append((kind, text))
    return result


class _Plain:
    def push(self, text: str) -> list[Delta]:
        return [("text", text)]

    def flush(self) -> list[Delta]:
        return []


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`, the whole tag excluded."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class _Tagged:
    """States: `before` (only whitespace seen), `opened` (line breaks after the tag), `inside`, `after`, `answer`."""

    def __init__(self, form: Format, *, inside: bool) -> None:
        self._form = form
        self._state = "opened" if inside else "before"
        self._again = inside
        """A model may repeat the tag that the prompt has opened."""
        self._held = ""

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        state = ""
        while state != self._state:
            state = self._state
            deltas += getattr(self, f"_{state}")()
        return deltas

    def flush(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._state == "opened":
            return [("reasoning", self._without_noise(held).strip())]
        if self._state == "inside":
            return [("reasoning", held.rstrip())]
        return [("text", held)] if self._state in {"before", "answer"} else []

    def _before(self) -> list[Delta]:
        text = self._held.lstrip()
        if text.startswith(self._form.open):
            self._held = text[len(self._form.open) :]
            self._state = "opened"
        elif not self._form.open.startswith(text):
            self._state = "answer"
        return []

    def _opened(self) -> list[Delta]:
        text = self._held.lstrip()
        if self._again and self._form.open.startswith(text[: len(self._form.open)]):
            if len(text) < len(self._form.open):
                return []
            text = text[len(self._form.open) :].lstrip()
            self._again = False
        noise = self._form.noise
        if not text or (noise and len(text) <= len(noise) and noise.startswith(text)):
            self._held = text if not self._again else self._held
            return []
        self._held = self._without_noise(text)
        self._state = "inside" if self._held else self._state
        return []

    def _without_noise(self, text: str) -> str:
        return text.lstrip().removeprefix(self._form.noise).lstrip() if self._form.noise else text

    def _inside(self) -> list[Delta]:
        at = self._held.find(self._form.close)
        if at >= 0:
            thought = self._held[:at].rstrip()
            self._held = self._held[at + len(self._form.close) :]
            self._state = "after"
            return [("reasoning", thought)]
        sure = self._held[: len(self._held) - _overlap(self._held, self._form.close)].rstrip()
        self._held = self._held[len(sure) :]
        return [("reasoning", sure)]

    def _after(self) -> list[Delta]:
        text = self._held.lstrip()
        if not text:
            return []
        gap = self._held[: len(self._held) - len(text)]
        # Indentation of the answer's first line is kept, the empty lines in front of it are not.
        self._held = gap[gap.rfind("\n") + 1 :] + text if "\n" in gap else text
        self._state = "answer"
        return []

    def _answer(self) -> list[Delta]:
        text, self._held = self._held, ""
        return [("text", text)]


class _Harmony:
    """gpt-oss: `<|channel|>NAME<|message|>…` ended by `<|end|>` or the like; only `analysis` is thinking.

    A header with a recipient (`to=`) is a tool call and passes as text with its tags, for the parser of tool calls.
    """

    _ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")

    def __init__(self, *, inside: bool) -> None:
        self._held = ""
        self._header = False
        self._kind: Kind = "reasoning" if inside else "text"
        self._call = False

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        before = None
        while before != (self._held, self._header):
            before = (self._held, self._header)
            deltas += self._read_header() if self._header else self._read_body()
        return deltas

    def flush(self) -> list[Delta]:
        held, self._held = self._held, ""
        return [] if self._header else [(self._kind, held)]

    def _read_header(self) -> list[Delta]:
        """`assistant<|channel|>NAME to=… <|constrain|>…<|message|>`, held until it is whole."""
        at = self._held.find("<|message|>")
        if at < 0:
            return []
        header = self._held[:at]
        self._held = self._held[at + len("<|message|>") :]
        self._header = False
        channel = header.rpartition("<|channel|>")[2].strip()
        self._call = "to=" in header
        self._kind = "reasoning" if channel.split(" ")[0] == "analysis" and not self._call else "text"
        return [("text", f"<|channel|>{channel}<|message|>")] if self._call else []

    def _read_body(self) -> list[Delta]:
        found = [(self._held.find(tag), tag) for tag in (*self._ENDS, "<|channel|>") if tag in self._held]
        if found:
            at, tag = min(found)
            body = self._held[:at] + (tag if self._call and tag not in {"<|start|>", "<|channel|>"} else "")
            self._held = self._held[at + len(tag) :] if tag != "<|channel|>" else self._held[at:]
            self._header = tag in {"<|start|>", "<|channel|>"}
            deltas: list[Delta] = [(self._kind, body)]
            self._kind, self._call = "text", False
            return deltas
        keep = max(_overlap(self._held, tag) for tag in (*self._ENDS, "<|channel|>"))
        sure = self._held[: len(self._held) - keep]
        self._held = self._held[len(sure) :]
        return [(self._kind, sure)]

"""The line chat: labels instead of drawing, so that it works in any terminal, over a pipe and with a screen reader."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgellama.cli.answer import Answer, follow, new_request_id, timing_line
from edgellama.cli.common import Output
from edgellama.cli.conversation import Conversation
from edgellama.cli.interrupts import TerminatedError
from edgellama.cli.line_input import LineInput
from edgellama.cli.process import write_error
from edgellama.errors import EXIT_INTERRUPTED, EdgellamaError, UsageError
from edgellama.runtime.base import Notice

if TYPE_CHECKING:
    from edgellama.cli.wiring import ModelSession

YOU, ASSISTANT, THINKING = "You: ", "Assistant: ", "Thinking: "

HELP = """\
/help             this list
/exit             leave (also /quit, Ctrl-D)
/system [TEXT]    show or set the system prompt; it starts the conversation anew
/set [NAME VALUE] show or set an option, such as temperature 0.7; no value resets it
/clear            forget the conversation
/retry            ask the last message again
/drop             ask again, leaving out the oldest messages if the context is full
/model [NAME]     show or change the model
/stats            speed, tokens and memory
A backslash at the end of a line, or triple quotes around lines, make one message. //text sends /text."""


_TOLD_ONCE = {"template", "model-file", "verdicts"}
"""Notices about the model rather than about this answer."""
_TWICE_SECONDS = 2.0
"""A second Ctrl-C this soon after the one that stopped an answer leaves."""


class _Screen:
    """Shows an answer behind its label. `told` remembers what was said in this chat.

    With `only_answers` nothing else goes to stdout: somebody reads it who did not type the questions.
    """

    def __init__(self, out: Output, told: set[str], *, only_answers: bool = False) -> None:
        self._out = out
        self._told = told
        self._only_answers = only_answers
        self._wrote = False
        self._label = ""

    def _begin(self, label: str) -> bool:
        if self._label == label:
            return False
        if self._label == THINKING:
            self._out.aside("\n")
        self._label = label
        return True

    def text(self, text: str) -> None:
        """Part of the answer."""
        begins = self._begin(ASSISTANT)
        if begins and not self._only_answers:
            text = f"{ASSISTANT}{text}"
        elif begins and sys.stdout.isatty() and not self._out.quiet:
            self._out.aside(ASSISTANT)
        self._out.result(text)
        self._wrote = True

    def reasoning(self, text: str) -> None:
        """Part of the thinking."""
        if not self._out.quiet:
            self._out.aside(f"{THINKING}{text}" if self._begin(THINKING) else text)

    def notice(self, notice: Notice) -> None:
        """One line, between the lines of the answer."""
        if notice.kind in _TOLD_ONCE:
            if notice.text in self._told:
                return
            self._told.add(notice.text)
        if self._label:
            if self._label != ASSISTANT or (self._only_answers and sys.stdout.isatty()):
                self._out.aside("\n")
            elif not self._only_answers:
                self._out.result("\n")
            self._label = ""
        self._out.warn(notice.text)

    def finish(self, answer: Answer) -> None:
        """End the answer's last line, marked when it was cut."""
        mark = " (stopped)" if answer.stopped else ""
        if answer.done is not None and answer.done.finish_reason == "length" and not answer.stopped:
            mark = " (cut at the limit of tokens)"
        if self._only_answers:
            if self._label == THINKING:
                self._out.aside("\n")
            if self._wrote:
                self._out.result("\n")
            if mark:
                self._out.notice(mark.strip())
        elif self._label == ASSISTANT:
            self._out.result(f"{mark}\n")
        elif self._label or mark:
            self._out.aside(f"{mark}\n")


class PlainChat:
    """Reads messages and commands, asks the model, and keeps the conversation going whatever happens to one answer."""

    def __init__(self, out: Output, session: ModelSession, conversation: Conversation, lines: LineInput) -> None:
        self._out = out
        self._session = session
        self._conversation = conversation
        self._lines = lines
        self._last: Answer | None = None
        self._told: set[str] = set()
        self._exit_code = 0
        self._stopped_at_seconds: float | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._reply(HELP),
            "system": self._system,
            "set": self._set,
            "clear": lambda _: self._clear(),
            "retry": lambda _: self._retry(),
            "drop": lambda _: self._drop(),
            "model": self._model,
            "stats": lambda _: self._stats(),
        }

    def talk(self) -> int:
        """Talk until the end of the input; returns the exit code: of the first failed answer where nobody watches."""
        self._out.notice(f"Chatting with {self._session.describe()}. /help lists the commands, Ctrl-D leaves.")
        pressed = False
        while True:
            try:
                message = self._lines.read(YOU)
            except TerminatedError:
                return EXIT_INTERRUPTED
            except KeyboardInterrupt:
                if pressed or not self._lines.interactive or self._just_stopped():
                    self._out.aside("\n")
                    return EXIT_INTERRUPTED
                pressed = True
                self._out.aside("\n(Ctrl-C again or Ctrl-D leaves)\n")
                continue
            except UsageError as error:
                self._fail(error)
                continue
            pressed, self._stopped_at_seconds = False, None
            if message is None or message.strip() in {"/exit", "/quit", "/bye"}:
                return 0 if self._lines.interactive else self._exit_code
            if message.strip():
                self._take(message)
            if self._last is not None and self._last.terminated:
                return EXIT_INTERRUPTED

    def _just_stopped(self) -> bool:
        stopped = self._stopped_at_seconds
        return stopped is not None and time.monotonic() - stopped < _TWICE_SECONDS

    def _reply(self, text: str) -> None:
        """Answer a command: beside the answers where only they are wanted."""
        if self._lines.interactive:
            self._out.line(text)
        else:
            self._out.aside(f"{text}\n")

    def _take(self, message: str) -> None:
        try:
            if message.startswith("/") and not message.startswith("//"):
                self._obey(message)
            else:
                self._ask(message.removeprefix("/") if message.startswith("//") else message)
        except EdgellamaError as error:
            self._fail(error)

    def _obey(self, message: str) -> None:
        word, _, argument = message[1:].partition(" ")
        command = self._commands.get(word.strip().lower())
        if command is None:
            raise UsageError(
                f"there is no command /{word.strip()}", "/help lists them; //text sends a text with a slash"
            )
        command(argument.strip())

    def _fail(self, error: EdgellamaError) -> None:
        self._exit_code = self._exit_code or error.exit_code
        write_error(error, as_json=False)

    # ---- asking

    def _ask(self, text: str) -> None:
        request = self._conversation.request(text, new_request_id())
        screen = _Screen(self._out, self._told, only_answers=not self._lines.interactive)
        progress = self._out.progress("reading the prompt", plain=True)
        try:
            answer = follow(self._session.bridge, request, screen, progress)
        except EdgellamaError as error:
            self._conversation.unanswered = text
            self._explain(error)
            return
        screen.finish(answer)
        self._last, self._stopped_at_seconds = answer, answer.stopped_at_seconds
        kept = self._conversation.record(text, answer)
        if answer.usage.dropped_messages:
            self._out.warn(f"the {answer.usage.dropped_messages} oldest messages were left out to fit the context")
        if (failure := answer.error()) is not None:
            self._explain(failure)
        elif not kept:
            self._out.notice("The model said nothing; /retry asks again.")
        else:
            self._out.detail(f"[{timing_line(answer)}]")

    def _explain(self, error: EdgellamaError) -> None:
        self._fail(error)
        if type(error).__name__ == "ContextOverflowError" and self._conversation.messages:
            self._out.notice("  /drop asks again without the oldest messages, /clear starts anew.")

    def _retry(self) -> None:
        text = self._conversation.take_back()
        if text is None:
            raise UsageError("there is nothing to ask again")
        self._ask(text)

    def _drop(self) -> None:
        self._conversation.context_policy = "drop-oldest"
        self._retry()

    # ---- commands

    def _clear(self) -> None:
        self._conversation.clear()
        self._out.notice("The conversation is forgotten.")

    def _system(self, text: str) -> None:
        if not text:
            system = self._conversation.system
            self._reply("The system prompt is the template's own." if system is None else system)
            return
        self._conversation.system = text
        self._conversation.clear()
        self._out.notice("The conversation starts anew with this system prompt.")

    def _set(self, argument: str) -> None:
        name, _, value = argument.replace("=", " ", 1).partition(" ")
        if not name:
            for line in self._conversation.options():
                self._reply(line)
            return
        self._out.notice(self._conversation.set(name, value.strip()))

    def _model(self, name: str) -> None:
        if name:
            self._session.change(name)
            self._conversation.forget_tokens()
        self._reply(self._session.describe())

    def _stats(self) -> None:
        if self._last is not None:
            self._reply(f"last answer: {timing_line(self._last)}")
        for line in self._session.status_lines():
            self._reply(line)

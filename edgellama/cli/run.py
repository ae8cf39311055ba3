"""`edgellama run`: one prompt in, one answer out."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from edgellama.cli.common import Output, command, later_option
from edgellama.cli.engine_options import EngineChoice, engine_options, load_settings, sampling_options, to_sampling
from edgellama.errors import EXIT_INTERRUPTED, UsageError

if TYPE_CHECKING:
    from edgellama.cli.answer import Answer
    from edgellama.runtime.base import GenerateRequest, Notice
    from edgellama.settings import Settings


@command(example='edgellama run smollm2-135m --prompt "Which city is the capital of France?" --temperature 0')
@click.argument("model", required=False)
@click.option("--prompt", "-p", metavar="TEXT", help="The prompt; piped text follows it after an empty line.")
@click.option("--system", metavar="TEXT", help="System prompt; '' for none.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option("--max-tokens", "-n", type=int, metavar="N", help="Longest answer; unset: to the end of the context.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; repeatable.")
@click.option("--template-arg", multiple=True, metavar="K=V", help="Argument of the chat template; V may be JSON.")
@sampling_options
@engine_options
@later_option("--schema", metavar="FILE")
@later_option("--pace", metavar="reading")
def run(
    out: Output,
    *,
    model: str | None,
    prompt: str | None,
    system: str | None,
    raw: bool,
    max_tokens: int | None,
    stop: tuple[str, ...],
    template_arg: tuple[str, ...],
    sampling: dict[str, Any],
    engine: EngineChoice,
) -> int:
    """Answer one prompt on standard output; without MODEL by the one of the settings, else by the default model.

    The prompt is --prompt, or standard input, or both: then the piped text follows the prompt after an empty line. One
    newline at the end of piped text is dropped. Ctrl-C ends the answer and keeps what is there.
    """
    from edgellama.cli.interrupts import termination_raises

    with termination_raises():
        return _run(out, model, Wishes(prompt, system, raw, max_tokens, stop, template_arg, sampling), engine)


command = run


@dataclass(frozen=True, slots=True)
class Wishes:
    """The command's own options."""

    prompt: str | None
    system: str | None
    raw: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    template_arg: tuple[str, ...]
    sampling: dict[str, Any]


def _run(out: Output, model: str | None, wishes: Wishes, engine: EngineChoice) -> int:
    from edgellama.cli import wiring
    from edgellama.cli.answer import follow
    from edgellama.cli.prompt_input import read_prompt

    settings = load_settings(engine)
    build_request(wishes, settings, "")  # wrong options are told before a model is loaded
    with wiring.ModelSession(model, settings, engine, out) as session:
        session.begin()
        prompt = read_prompt(wishes.prompt, out.notice)
        session.ready()
        request = build_request(wishes, settings, prompt)
        screen = _Screen(out)
        answer = follow(session.bridge, request, screen, out.progress("reading the prompt"))
        screen.finish(answer)
        if out.json:
            out.object(as_object(answer, session.name))
        else:
            _tell_end(out, answer, request)
    if (error := answer.error()) is not None:
        raise error
    return EXIT_INTERRUPTED if answer.stopped else 0


def build_request(wishes: Wishes, settings: Settings, prompt: str) -> GenerateRequest:
    """The request for `prompt`; raises `UsageError` for options that contradict each other or are out of range."""
    from edgellama.chat.messages import Message
    from edgellama.cli.answer import new_request_id
    from edgellama.runtime.base import GenerateRequest

    if wishes.raw and (wishes.system is not None or wishes.template_arg):
        raise UsageError("--raw uses no chat template, so --system and --template-arg have no place")
    if "" in wishes.stop:
        raise UsageError("--stop is empty: it would end every answer at once")
    system = wishes.system if wishes.system is not None else settings.system
    turns = () if system is None else (Message(role="system", content=system),)
    return GenerateRequest(
        request_id=new_request_id(),
        messages=() if wishes.raw else (*turns, Message(role="user", content=prompt)),
        prompt=prompt if wishes.raw else None,
        sampling=to_sampling(wishes.sampling),
        max_tokens=parse_max_tokens(wishes.max_tokens, settings),
        stop=wishes.stop,
        template_arguments=parse_template_arguments(wishes.template_arg),
        context_policy=settings.context_policy,
        client="run",
    )


def parse_max_tokens(option: int | None, settings: Settings) -> int | None:
    """Tokens of the longest answer; -1 is llama.cpp's way to say no limit."""
    if option is None:
        return settings.max_tokens
    if option == -1:
        return None
    if option < 1:
        raise UsageError(f"--max-tokens is {option}, allowed is 1 or more, or -1 for no limit")
    return option


def parse_template_arguments(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`K=V` pairs; V is JSON where it parses as such (true, 3, "text", [...]), else text."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"--template-arg is {pair!r}, expected NAME=VALUE, such as enable_thinking=false")
        try:
            arguments[name] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments


class _Screen:
    """Answer to stdout as it comes; the thinking to stderr where someone looks at it."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._shows_reasoning = not out.json and (out.verbose or (sys.stderr.isatty() and not out.quiet))
        self._open_line = False
        self._thinking = False

    def text(self, text: str) -> None:
        """Part of the answer."""
        if self._out.json:
            return
        self._end_thinking()
        self._out.result(text)
        self._open_line = not text.endswith("\n")

    def reasoning(self, text: str) -> None:
        """Part of the thinking."""
        if self._shows_reasoning:
            self._thinking = True
            self._out.aside(text)

    def notice(self, notice: Notice) -> None:
        """Something to know, on a line of its own where text and notices share a terminal."""
        if self._open_line and sys.stdout.isatty():
            self._out.warn(f"\n{notice.text}")
        else:
            self._out.warn(notice.text)

    def _end_thinking(self) -> None:
        if self._thinking:
            self._out.aside("\n")
            self._thinking = False

    def finish(self, _answer: Answer) -> None:
        """End the last line."""
        self._end_thinking()
        if self._open_line:
            self._out.result("\n")


def as_object(answer: Answer, model: str) -> dict[str, Any]:
    """The `--json` object. A failed answer keeps its text, with `finish_reason` "error"."""
    import msgspec

    done = answer.done
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": done.finish_reason if done is not None else "error",
        "model": model,
        "seed": done.seed if done is not None else None,
        "usage": msgspec.to_builtins(answer.usage),
        "timings": msgspec.to_builtins(answer.timings),
        "notices": [{"kind": notice.kind, "text": notice.text} for notice in answer.notices],
    }


def _tell_end(out: Output, answer: Answer, request: GenerateRequest) -> None:
    from edgellama.cli.answer import timing_line

    if answer.done is not None and answer.done.finish_reason == "length":
        limit = f"--max-tokens {request.max_tokens}" if _hit_limit(answer, request) else "the end of the context"
        out.notice(f"the answer was cut at {limit}")
    if answer.stopped:
        out.notice("stopped")
    if answer.usage.completion_tokens:
        out.notice(f"[{timing_line(answer)}]")


def _hit_limit(answer: Answer, request: GenerateRequest) -> bool:
    return request.max_tokens is not None and answer.usage.completion_tokens >= request.max_tokens

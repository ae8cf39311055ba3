"""`edgellama chat`: a conversation in the terminal; what plain `edgellama` opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgellama.cli.common import Output, command, later_option
from edgellama.cli.engine_options import EngineChoice, engine_options, load_settings, sampling_options, to_sampling

if TYPE_CHECKING:
    from edgellama.settings import Settings


@command(example="edgellama chat qwen3-1.7b --plain", json=False)
@click.argument("model", required=False)
@click.option("--plain", is_flag=True, help="Line by line, without drawing on the screen (always so in this version).")
@click.option("--system", metavar="TEXT", help="System prompt; '' for none.")
@click.option("--max-tokens", "-n", type=int, metavar="N", help="Longest answer; unset: to the end of the context.")
@click.option("--template-arg", multiple=True, metavar="K=V", help="Argument of the chat template; V may be JSON.")
@sampling_options
@engine_options
@later_option("--connect", metavar="URL")
@later_option("--web", is_flag=True)
@later_option("--pace", metavar="reading")
def chat(
    out: Output,
    *,
    model: str | None,
    plain: bool,  # noqa: ARG001 - the line chat is the only one yet
    system: str | None,
    max_tokens: int | None,
    template_arg: tuple[str, ...],
    sampling: dict[str, Any],
    engine: EngineChoice,
) -> int:
    """Chat with MODEL, or with the default model.

    A message is a line; a backslash at its end or triple quotes around it continue it. /help lists the commands. Ctrl-C
    stops an answer and keeps its text; Ctrl-C twice or Ctrl-D leaves. Also reads a pipe, one message a line.
    """
    from edgellama.cli.interrupts import termination_raises
    from edgellama.cli.run import parse_max_tokens, parse_template_arguments

    settings = load_settings(engine)
    to_sampling(sampling)
    choices = {
        "system": system if system is not None else settings.system,
        "max_tokens": parse_max_tokens(max_tokens, settings),
        "context_policy": settings.context_policy,
        "template_arguments": parse_template_arguments(template_arg),
        "sampling": dict(sampling),
    }
    with termination_raises():
        return _chat(out, model, settings, engine, choices)


command = chat


def _chat(out: Output, model: str | None, settings: Settings, engine: EngineChoice, choices: dict[str, Any]) -> int:
    import sys

    from edgellama.cli import wiring
    from edgellama.cli.conversation import Conversation
    from edgellama.cli.first_chat import tell_once
    from edgellama.cli.line_input import LineInput
    from edgellama.cli.plain_chat import PlainChat

    with wiring.ModelSession(model, settings, engine, out, plain=True) as session:
        session.begin()
        session.ready()
        if session.is_proving_model:
            tell_once(out, session.name, settings.language)
        return PlainChat(out, session, Conversation(**choices), LineInput(sys.stdin, sys.stdout)).talk()

"""The `edgellama` command: finds the file of the command asked for and turns what goes wrong into an exit code.

A command is one file here whose `command` is a click command; it is imported only when called, so `--help` stays light.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from edgellama import __version__
from edgellama.cli import process
from edgellama.errors import EdgellamaError, UnsupportedError, UsageError


class Entry(NamedTuple):
    """A command that exists: its file under `edgellama.cli` and the line `--help` shows."""

    module: str
    summary: str


COMMANDS: dict[str, Entry] = {
    "chat": Entry("chat", "Chat with a model; what `edgellama` alone opens."),
    "run": Entry("run", "Answer one prompt on standard output."),
    "pull": Entry("pull", "Fetch a model into the store."),
    "list": Entry("list", "List the models of this machine."),
    "show": Entry("show", "Show what a model file contains."),
    "remove": Entry("remove", "Remove a model from the store."),
    "import": Entry("import_", "Add a model file that is already here."),
    "recommend": Entry("recommend", "Name the catalogue models that fit this machine."),
    "licences": Entry("licences", "Show the licences of models and packages."),
    "quantize": Entry("quantize", "Quantize a GGUF model into a smaller one."),
    "eval": Entry("eval", "Measure perplexity and KL divergence."),
    "imatrix": Entry("imatrix", "Collect an importance matrix for quantizing."),
    "diff": Entry("diff", "Compare two GGUF files."),
    "plan": Entry("plan", "Say whether a model fits into memory, and how."),
    "doctor": Entry("doctor", "Check this machine and say what to change."),
    "config": Entry("config", "Show and change the settings."),
}

LATER: dict[str, str] = {
    "embed": "embeddings",
    "check": "the numeric check of a model",
    "warm": "compiling kernels ahead",
    "convert": "converting checkpoints",
    "merge-lora": "merging LoRA adapters",
    "set-rope": "changing a file's RoPE rule",
    "purge": "deleting kept conversations",
    "ps": "the shared host's list of models",
    "stop": "stopping the shared host",
    "monitor": "the sensor monitor",
    "simulate-heat": "the heat simulation",
    "serve": "the HTTP server",
    "mcp": "the MCP server",
}
"""Commands of the contract that this version does not have yet."""

DEFAULT_COMMAND = "chat"
_OWN_OPTIONS = {"--help", "-h", "--version"}
_SOURCES = ("hf:", "ms:", "pypi:", "file:", "http:", "https:")


def _looks_like_model(word: str) -> bool:
    return word.startswith(_SOURCES) or word.lower().endswith((".gguf", ".fake.json")) or Path(word).is_file()


class LazyGroup(click.Group):
    """Commands by name, imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"edgellama.cli.{entry.module}")
        command: click.Command = module.command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Plain `edgellama`, `edgellama --plain` and `edgellama FILE.gguf` open the chat."""
        if not args or (args[0] not in _OWN_OPTIONS and (args[0].startswith("-") or self._is_chat_model(args[0]))):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    @staticmethod
    def _is_chat_model(word: str) -> bool:
        return word not in COMMANDS and word not in LATER and _looks_like_model(word)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in LATER:
            raise UnsupportedError(f"`edgellama {name}` ({LATER[name]}) comes in a later version", _commands_advice())
        if name not in COMMANDS:
            from difflib import get_close_matches  # only a mistyped command pays for it

            close = get_close_matches(name, COMMANDS, n=2)
            hint = f"did you mean {' or '.join(f'`edgellama {c}`' for c in close)}?" if close else _commands_advice()
            raise UsageError(f"there is no command `{name}`", hint)
        return name, self.get_command(ctx, name), args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list from the table, without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


def _commands_advice() -> str:
    return "`edgellama --help` lists the commands"


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Example: edgellama run smollm2-135m --prompt "Which city is the capital of France?"',
)
@click.version_option(__version__, prog_name="edgellama", message="%(prog)s %(version)s")
def edgellama() -> None:
    """An offline LLM runtime for the machine you already have.

    Without a command it opens a chat with the default model. Results go to standard output, everything else to
    standard error.

    Exit codes: 0 done, 1 failed for a reason told, 2 wrong usage, 3 not found, 4 invalid file, 5 does not fit,
    6 engine failed, 7 offline, 8 licence not accepted, 9 answer incomplete, 130 interrupted.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises, `SystemExit` included."""
    process.prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    with process.Boundary(as_json=process.wants_json(words), verbose=process.wants_verbose(words)) as boundary:
        try:
            process.refuse_undecodable(words)
            # Not `edgellama.main`, which has opinions of its own on closed pipes and interrupts.
            with edgellama.make_context("edgellama", words) as context:
                result = edgellama.invoke(context)
            boundary.exit_code = result if isinstance(result, int) else 0
        except click.exceptions.Exit as error:
            boundary.exit_code = error.exit_code
        except click.Abort as error:
            raise KeyboardInterrupt from error
        except click.ClickException as error:
            raise _translate(error) from error
    if arguments is None:
        process.ignore_late_interrupts()
    return boundary.exit_code


def _translate(error: click.ClickException) -> EdgellamaError:
    context = error.ctx if isinstance(error, click.UsageError) else None
    advice = f"`{context.command_path} --help` explains the options" if context is not None else ""
    return UsageError(error.format_message().removesuffix("."), advice)

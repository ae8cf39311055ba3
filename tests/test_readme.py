"""Every command in the documentation's `console` blocks works.

- `edgellama` commands that need neither model nor network are run for real, in empty folders.
- All others, and what `scripts/chat` would pass on, are parsed by the command line itself: options, values, names of
  catalogue models. Nothing is run.
- The scripts' own options are parsed by the scripts.
- A few commands of the system are allowed, their files not looked at.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from bootstrap import chat, options

from edgellama.cli import main as cli
from edgellama.errors import EdgellamaError
from edgellama.store import catalogue

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/install.md", "docs/platforms.md")
RUN_FOR_REAL = {
    ("--version",), ("--help",), ("doctor",), ("recommend", "--lang"), ("list", "--found"), ("config", "path"),
    ("config", "show"),
}  # fmt: skip
OF_THE_SYSTEM = {"source", "cat", "git"}
MODEL_COMMANDS = {"chat", "run", "pull", "show", "plan"}
SOURCES = ("hf:", "ms:", "https:", "file:", "pypi:", "/", "~")


def commands() -> list[str]:
    found = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text("utf-8")
        for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    return list(dict.fromkeys(found))


def parts(command: str) -> list[list[str]]:
    """The commands of a pipe, as words."""
    words: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word == "|":
            words.append([])
        else:
            words[-1].append(word)
    return words


def parse(words: list[str]) -> None:
    """Let the command line parse `edgellama WORDS`; raises what a user would see."""
    with click.Context(cli.edgellama, info_name="edgellama") as context:
        name, command, arguments = cli.edgellama.resolve_command(context, list(words))
        while isinstance(command, click.Group):
            name, command, arguments = command.resolve_command(context, arguments)
        assert command is not None
        parsed = command.make_context(name, list(arguments), parent=context)
    given = parsed.params.get("model")
    for model in (given,) if isinstance(given, str) else given or ():
        if words[0] in MODEL_COMMANDS and not model.startswith(SOURCES):
            assert model in catalogue.load(), f"{model} is not in the catalogue"


def check_script(path: str, words: list[str]) -> None:
    assert (ROOT / path).is_file()
    found = options.parse(words)
    if path.endswith("chat"):
        parse(chat.command(found.rest, stdin_is_terminal=True))
    if path.endswith("device_check"):
        from devicecheck.main import _parser

        _parser().parse_args(found.rest)


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 25


@pytest.mark.parametrize("command", commands())
def test_the_command_is_understood(command: str) -> None:
    for words in parts(command):
        if words[0].startswith("./scripts/"):
            check_script(words[0], words[1:])
        elif words[0] == "edgellama":
            if not words[1].startswith("-"):
                parse(words[1:])
        else:
            assert words[0] in OF_THE_SYSTEM


@pytest.mark.parametrize("wrong", ["run smollm2-135m-instruct --promt x", "frobnicate", "run no-such-model --prompt x"])
def test_a_wrong_command_would_be_noticed(wrong: str) -> None:
    with pytest.raises((click.UsageError, EdgellamaError, AssertionError)):
        parse(shlex.split(wrong))


@pytest.mark.parametrize("command", [c for c in commands() if tuple(shlex.split(c)[1:3]) in RUN_FOR_REAL])
def test_the_command_runs(command: str, tmp_path: Path) -> None:
    folders = {f"EDGELLAMA_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "CACHE", "STATE", "MODELS")}
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        env={**os.environ, **folders, "EDGELLAMA_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in ({0, 1} if "doctor" in command else {0}), done.stderr
    assert done.stdout.strip() or "list" in command
    assert "Traceback" not in done.stderr


def test_the_list_of_real_runs_is_not_empty() -> None:
    assert len([c for c in commands() if tuple(shlex.split(c)[1:3]) in RUN_FOR_REAL]) == len(RUN_FOR_REAL)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text("utf-8")):
        assert target.startswith("https://") or ((ROOT / name).parent / target).exists()

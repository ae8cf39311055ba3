"""The command group: lazy, helpful when mistyped, and an exit code for everything."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellama import errors
from edgellama.cli import main as main_module
from edgellama.cli.main import COMMANDS, LATER, edgellama

HEAVY = ("numpy", "numba", "llama_cpp", "textual", "fastapi", "httpx", "rich", "jinja2", "asyncio", "msgspec", "psutil")


def loaded_modules(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return {name.split(".")[0] for name in done.stderr.split()}


def test_help_loads_nothing_heavy() -> None:
    modules = loaded_modules("from edgellama.cli.main import main; assert main(['--help']) == 0")
    assert not modules & set(HEAVY)


def test_help_lists_the_commands_that_are_there(call: Callable[..., Any]) -> None:
    result = call("--help")
    assert result.code == 0
    listed = result.out.partition("Commands:")[2]
    for name in COMMANDS:
        assert f"  {name} " in listed
    for name in LATER:
        assert f"  {name} " not in listed


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(name: str, call: Callable[..., Any]) -> None:
    result = call(name, "--help")
    assert result.code == 0
    assert "Example: edgellama" in " ".join(result.out.split())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_can_be_quiet_and_verbose(name: str) -> None:
    import click

    context = click.Context(edgellama)
    command = edgellama.get_command(context, name)
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    for one in commands:
        assert one is not None
        options = {option for parameter in one.params for option in parameter.opts}
        assert {"--quiet", "--verbose"} <= options, one.name


@pytest.mark.parametrize("name", sorted(LATER))
def test_commands_of_later_versions_say_so(name: str, call: Callable[..., Any]) -> None:
    result = call(name, "whatever", "--option")
    assert result.code == 2
    assert result.out == ""
    assert "later version" in result.err


def test_a_mistyped_command(call: Callable[..., Any]) -> None:
    result = call("docter")
    assert result.code == 2
    assert "did you mean `edgellama doctor`" in result.err


def test_version(call: Callable[..., Any]) -> None:
    from edgellama import __version__

    assert call("--version").out == f"edgellama {__version__}\n"


def test_wrong_usage_in_json(call: Callable[..., Any]) -> None:
    result = call("run", "--json", "--no-such-option")
    assert result.code == 2
    assert result.out == ""
    error = json.loads(result.err)["error"]
    assert error["kind"] == "UsageError"
    assert error["exit_code"] == 2
    assert "--no-such-option" in error["message"]


def _raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(main_module.edgellama, "invoke", fail)


TREE = [
    (errors.EdgellamaError("x"), 1),
    (errors.UnsupportedError("x"), 2),
    (errors.NotFoundError("x"), 3),
    (errors.GGUFError("f", 4, "magic", "0", "GGUF"), 4),
    (errors.ContextOverflowError(9, 5), 5),
    (errors.EngineCrashError("x"), 6),
    (errors.OfflineError("x"), 7),
    (errors.LicenceError("x"), 8),
    (errors.IncompleteError("x"), 9),
    (KeyboardInterrupt(), 130),
    (FileNotFoundError(2, "No such file", "/a/b"), 3),
    (PermissionError(13, "Permission denied", "/a/b"), 1),
    (OSError(28, "No space left on device", "/a/b"), 5),
    (MemoryError(), 5),
    (ZeroDivisionError("x"), 1),
]


@pytest.mark.parametrize(("error", "code"), TREE, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_codes(
    error: BaseException, code: int, as_json: bool, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    _raising(monkeypatch, error)
    result = call("doctor", *(["--json"] if as_json else []))
    assert result.code == code
    assert result.out == ""
    assert "Traceback" not in result.err
    if code != 130:
        assert (json.loads(result.err)["error"]["exit_code"] == code) if as_json else result.err.startswith("error: ")


def test_a_file_name_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    _raising(monkeypatch, errors.NotFoundError("evil\x1b]0;title\x07\x1b[2Jname", "ad\x9bvice"))
    result = call("doctor")
    assert not {"\x1b", "\x07", "\x9b"} & set(result.err)
    assert "evil" in result.err


@pytest.mark.parametrize("words", [["m.gguf"], ["--plain"], ["hf:a/b/c.gguf"], []])
def test_without_a_command_the_chat_opens(words: list[str], scripted: Any, call: Callable[..., Any]) -> None:
    scripted.say("Good day.")
    result = call(*words, stdin="hello\n")
    assert result.code == 0
    assert result.out == "Good day.\n"


def test_an_argument_that_is_no_text(call: Callable[..., Any]) -> None:
    result = call("run", "m", "--prompt", "caf\udce9")
    assert result.code == 2
    assert "not valid text at character 4" in result.err


def test_no_advice_names_a_command_that_does_not_exist() -> None:
    """Docstrings may speak of what is to come; what a user may read must not."""
    named = re.compile(r"\bedgellama (" + "|".join(map(re.escape, LATER)) + r")\b")
    wrong = []
    for path in sorted(Path(main_module.__file__).parents[1].rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
                wrong += [f"{path.name}:{node.lineno}: {found[0]}" for found in named.finditer(node.value)]
    assert not wrong

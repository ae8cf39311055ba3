"""`scripts/chat`: set up once, then chat, or answer once with --prompt or a pipe."""

from __future__ import annotations

import os
import sys

from bootstrap import stamp

HELP = """\
Set up edgellama in a private environment (once), then chat with a model.

  ./scripts/chat                                chat with the default model
  ./scripts/chat MODEL                          chat with another one (a file, a name, hf:…)
  ./scripts/chat --prompt "Which city …?"       answer once on standard output
  cat letter.txt | ./scripts/chat               the same, with the prompt from a pipe

Options of the set-up:
  --backend auto|cpu|cuda|metal|vulkan|rocm     what llama.cpp is built for (auto)
  --wheelhouse DIR                              install from carried files, without a network
  --make-wheelhouse DIR                         write these files
  --rebuild                                     compile llama.cpp again

All other options go to `edgellama chat` or `edgellama run` (`--prompt`, or a pipe):
  ./scripts/chat --ctx 4096 --temperature 0 --prompt Hello

EDGELLAMA_VENV moves the private environment (default: .venv in this folder). pip's own settings, CMAKE_ARGS, CXX and
CUDAHOSTCXX are heeded.
"""
_CHAT_ONLY = ("--plain", "--web", "--connect")


def command(arguments: list[str], *, stdin_is_terminal: bool) -> list[str]:
    """edgellama's words: `run` with a prompt or a pipe, else `chat`. A first word that is no option is the model."""
    named = bool(arguments) and not arguments[0].startswith("-")
    model, rest = arguments[: int(named)], arguments[int(named) :]
    names = {word.partition("=")[0] for word in (rest[: rest.index("--")] if "--" in rest else rest)}
    asks_once = bool(names & {"--prompt", "-p"}) or (not stdin_is_terminal and not names & set(_CHAT_ONLY))
    return ["run" if asks_once else "chat", *model, *rest]


def start(python: str, arguments: list[str]) -> int:
    """Become edgellama. Does not return on POSIX."""
    os.environ["PYTHONSAFEPATH"] = "1"  # a file named like one of our modules in the user's folder is not ours
    line = [python, "-m", "edgellama", *arguments]
    if sys.platform != "win32":
        os.execv(python, line)
    import subprocess

    child = subprocess.Popen(line)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the console sends Ctrl-C to both: edgellama decides what it means
            continue


def _ready_fields(arguments: list[str]) -> dict[str, str]:
    """The stamp's fields if the common second start has nothing to do. Imports nothing more."""
    own = ("--backend", "--wheelhouse", "--make-wheelhouse", "--rebuild", "--help", "-h", "--engine")
    if any(word.startswith(own) for word in arguments):
        return {}
    venv = stamp.venv_folder()
    fields = stamp.read(venv)
    return fields if fields.get("model") and stamp.is_ready(venv, fields, extras={"llamacpp"}) else {}


def _stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def main(arguments: list[str]) -> int:
    """Returns the exit code, unless it becomes edgellama."""
    fields = _ready_fields(arguments)
    rest = arguments
    if not fields:
        from bootstrap import options as own
        from bootstrap.setup import Setup, told

        with told() as codes:
            options = own.parse(arguments)
            rest = options.rest
            if options.help:
                sys.stdout.write(HELP)
                return 0
            extras = set() if _chose_engine(rest) not in {"", "auto", "llamacpp"} else {"llamacpp"}
            setup = Setup(options, extras, with_model=True)
            fields = stamp.read(str(setup.folder)) if setup.is_ready() else setup.make()
            if options.make_wheelhouse:
                return 0
        if codes:
            return codes[0]
    python = stamp.venv_python(stamp.venv_folder())
    words = command(rest, stdin_is_terminal=_stdin_is_terminal())
    return start(python, words)


def _chose_engine(rest: list[str]) -> str:
    for number, word in enumerate(rest):
        if word.startswith("--engine="):
            return word.partition("=")[2]
        if word == "--engine" and number + 1 < len(rest):
            return rest[number + 1]
    return ""

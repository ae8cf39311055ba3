"""`scripts/test`: set up once, then formatter, linter, type checker for three platforms, import rules and the tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bootstrap import options as own
from bootstrap import stamp
from bootstrap.children import signals_end_children
from bootstrap.errors import INTERRUPTED, SetupError
from bootstrap.progress import Activity, say
from bootstrap.setup import Setup, told

HELP = """\
Set up edgellama with its development tools in a private environment (once), then run every check and test.

  ./scripts/test                    everything: what continuous integration runs
  ./scripts/test -k store -x        the same checks; arguments go to pytest (paths are relative to the checkout)

Options of the set-up: --backend, --wheelhouse DIR, --rebuild, as in ./scripts/chat --help.
Exit code: pytest's, or 1 where only a check failed.
"""
PLATFORMS = ("linux", "darwin", "win32")
EXTRAS = {"dev", "llamacpp"}
AT_ONCE = 2


@dataclass(frozen=True)
class Result:
    """How one check ended."""

    name: str
    status: int
    seconds: float
    output: str = ""

    def line(self) -> str:
        """Its line in the summary."""
        return f"  {'ok    ' if self.status == 0 else 'FAILED'}  {self.name:<16} {self.seconds:6.1f} s"


def checks(venv: str) -> list[tuple[str, list[str]]]:
    """Name and command of every check but the tests, the slow ones first."""
    python = stamp.venv_python(venv)
    tool = Path(python).parent
    mypy = [python, "-m", "mypy"]
    return [
        *((f"mypy {name}", [*mypy, "--platform", name, "--cache-dir", f".mypy_cache/{name}"]) for name in PLATFORMS),
        ("import rules", [str(tool / "lint-imports"), "--no-cache"]),
        ("ruff check", [python, "-m", "ruff", "check"]),
        ("ruff format", [python, "-m", "ruff", "format", "--check"]),
    ]


def _check(name: str, command: Sequence[str]) -> Result:
    start = time.monotonic()
    done = subprocess.run(
        command,
        cwd=stamp.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return Result(name, done.returncode, time.monotonic() - start, done.stdout)


def run_checks(commands: list[tuple[str, list[str]]]) -> list[Result]:
    """Run the checks, two at a time; a failed one's output goes to stdout."""
    results: list[Result] = []
    with Activity("checking the code") as activity, ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = {pool.submit(_check, name, command): name for name, command in commands}
        while waiting:
            activity.update(", ".join(waiting.values()))
            for future in [f for f in waiting if f.done()]:
                del waiting[future]
                results.append(future.result())
            time.sleep(0.1)
    for result in results:
        if result.status != 0:
            sys.stdout.write(f"--- {result.name}\n{result.output}\n")
    sys.stdout.flush()
    return results


def run_tests(venv: str, arguments: list[str]) -> Result:
    """Run pytest on the terminal it would have of its own."""
    start = time.monotonic()
    child = subprocess.Popen([stamp.venv_python(venv), "-P", "-m", "pytest", *arguments], cwd=stamp.ROOT)
    while True:
        try:
            return Result("pytest", child.wait(), time.monotonic() - start)
        except KeyboardInterrupt:  # pytest has it too: let it write its report
            if not sys.stdin or not sys.stdin.isatty():
                child.terminate()


def fetch_model(setup: Setup) -> None:
    """Fetch the default model; without a network the tests that need it are skipped, each saying so."""
    try:
        setup.fetch_model()
    except SetupError as error:
        say(f"warning: {error.what}: tests that need it will be skipped")


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    with told() as codes:
        options = own.parse(arguments)
        if options.help:
            sys.stdout.write(HELP)
            return 0
        setup = Setup(options, set(EXTRAS), with_model=False)
        if not setup.is_ready():
            setup.make()
        fetch_model(setup)
    if codes:
        return codes[0]
    venv = str(setup.folder)
    try:
        with signals_end_children():
            results = run_checks(checks(venv))
            results.append(run_tests(venv, options.rest))
    except KeyboardInterrupt:
        return INTERRUPTED
    sys.stdout.write("\n" + "\n".join(result.line() for result in results) + "\n")
    sys.stdout.flush()
    failed = [result for result in results if result.status != 0]
    return 0 if not failed else max(results[-1].status, 1)  # a test run killed by a signal has a negative status

"""What every command shares: its declaration, its output, and the options that several commands take."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click

from edgellama.cli.process import STDOUT_NAME, printable, say, wrapped
from edgellama.errors import UnsupportedError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from edgellama.settings import Settings

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PROGRESS_AFTER_SECONDS = 1.0
_PLAIN_PROGRESS_EVERY_SECONDS = 5.0


def command(
    *, example: str, name: str | None = None, uses_settings: bool = True, json: bool = True
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command: adds `--json`, `--quiet`, `--verbose` and the example, and passes an `Output` first.

    `uses_settings` lets the folders and network settings hold before it starts; False where the settings may be broken.
    `json` False is for what has no result to print.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        @functools.wraps(function)
        def with_output(*, as_json: bool = False, quiet: bool, verbose: bool, **values: Any) -> Any:
            out = Output(json=as_json, quiet=quiet, verbose=verbose)
            _warn_of_unknown_variables(out)
            if uses_settings:
                export_settings()
            return function(out, **values)

        option: Any = with_output
        option = click.option("-v", "--verbose", is_flag=True, help="Say more on standard error.")(option)
        option = click.option("-q", "--quiet", is_flag=True, help="Only results, warnings and errors.")(option)
        if json:
            option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(option)
        return click.command(name, epilog=f"\b\nExample: {example}", context_settings=dict(_CONTEXT))(option)

    return decorate


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _warn_of_unknown_variables(out: Output) -> None:
    from edgellama import settings

    for text in settings.unknown_variables(os.environ):
        out.warn(text)


def export_settings() -> Settings:
    """Load the settings, and let those that other rooms read from the environment hold here and in children."""
    from edgellama import settings

    loaded = settings.load()
    if loaded.models_dir is not None:
        os.environ[settings.variable("models_dir")] = loaded.models_dir
    if loaded.offline:
        os.environ[settings.variable("offline")] = "1"
    if loaded.hf_endpoint is not None:
        os.environ["HF_ENDPOINT"] = loaded.hf_endpoint
    return loaded


def later_option(*names: str, allow: tuple[str, ...] = (), **attributes: Any) -> Decorator:
    """An option this version does not have yet: parsed, and refused aloud unless its value is in `allow`."""

    def refuse(_context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value in (None, False, ()) or value in allow:
            return
        raise UnsupportedError(f"{names[0]} comes in a later version of edgellama", "leave the option out")

    return click.option(*names, expose_value=False, callback=refuse, hidden=True, **attributes)


def has_colour(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: a terminal that is not dumb, and no NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@dataclass(slots=True)
class Output:
    """Where a command writes: results to stdout and nothing else there, all the rest to stderr."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def result(self, text: str) -> None:
        """Write a piece of the result now; a terminal is protected from control characters in it."""
        try:
            sys.stdout.write(printable(text.replace("\r\n", "\n")) if sys.stdout.isatty() else text)
            sys.stdout.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, STDOUT_NAME) from error

    def line(self, text: str = "") -> None:
        """Write a line of the result."""
        self.result(text + "\n")

    def object(self, value: Any) -> None:
        """Write one JSON object on one line. `value` is plain data."""
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
        self.line(text.encode("utf-8", "replace").decode())

    def notice(self, text: str) -> None:
        """Tell something that `--quiet` silences."""
        if not self.quiet:
            self._say(text)

    def warn(self, text: str) -> None:
        """Tell something that must not go unseen."""
        self._say(f"warning: {text}")

    def detail(self, text: str) -> None:
        """Tell something only `--verbose` wants."""
        if self.verbose:
            self._say(text)

    def aside(self, text: str) -> None:
        """Write a piece to stderr as it is, dimmed on a terminal: what belongs beside the result, such as thinking."""
        shown = printable(text)
        if has_colour(sys.stderr):
            shown = "\n".join(f"\x1b[2m{line}\x1b[22m" if line else "" for line in shown.split("\n"))
        say(shown)

    def progress(self, description: str, unit: str = "", *, plain: bool = False) -> ProgressLine:
        """Progress of a wait, shown once it lasted over a second. `unit` "bytes": a transfer, `plain`: no drawing."""
        return ProgressLine(description, unit=unit, plain=plain, silent=self.quiet)

    @staticmethod
    def _say(text: str) -> None:
        say(wrapped(printable(text)) + "\n")


class ProgressLine:
    """Progress of one wait on stderr: a bar on a terminal, a line now and then elsewhere, nothing when it was short."""

    def __init__(self, description: str, *, unit: str = "", plain: bool = False, silent: bool = False) -> None:
        self.description = description
        self._plain = plain or os.environ.get("TERM") == "dumb"
        self._unit = unit
        self._silent = silent
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._told = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, done: float, total: float | None = None, description: str | None = None) -> None:
        """`done` of `total`; no total means it is unknown."""
        if description is not None:
            self.description = description
        now = time.monotonic()
        if self._silent or (self._bar is None and now - self._started < PROGRESS_AFTER_SECONDS):
            return
        if sys.stderr.isatty() and not self._plain:
            self._update_bar(done, total)
        elif now - self._last_line >= _PLAIN_PROGRESS_EVERY_SECONDS:
            self._last_line = now
            text = f"{self.description} {done / total:.0%}" if total else self.description
            if text != self._told:
                self._told = text
                Output._say(text)

    def _update_bar(self, done: float, total: float | None) -> None:
        if self._bar is None:
            self._bar = _make_bar(self._unit)
            self._bar.start()
            self._task = self._bar.add_task(printable(self.description), total=total)
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, description=printable(self.description))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._silent = True


def _make_bar(unit: str) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()]
    if unit == "bytes":
        columns += [DownloadColumn(), TransferSpeedColumn()]
    columns.append(TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)

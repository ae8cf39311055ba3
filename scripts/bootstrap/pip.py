"""pip in the private environment: its settings, what it is doing, and what a failure means."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from bootstrap import faults
from bootstrap.children import Runner, tail

# Settings that would send packages somewhere else than into the environment.
HOSTILE = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIREMENT", "PIP_EDITABLE", "PIP_REQUIRE_HASHES",
           "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__")  # fmt: skip
RAW_PROGRESS_SINCE = (24, 1)

_LINES = (
    (re.compile(r"\s*\[(\d+)/(\d+)\] "), "compiling file {0} of {1}"),
    (re.compile(r"\s*\[ *(\d+)%\] "), "compiling, {0} %"),
    (re.compile(r"\s*Downloading (?:\S*/)?([^/\s]+?)(?:-py\S*|-cp\S*|\.tar\.gz)?(?:\.metadata)? (\([\d.]+ .B\))"),
     "downloading {0} {1}"),
    (re.compile(r"\s*Using cached (?:\S*/)?([^/\s]+?)(?:-py\S*|-cp\S*|\.tar\.gz) "), "{0} from pip's cache"),
    (re.compile(r"Collecting ([\w.\-]+)"), "looking up {0}"),
    (re.compile(r"\s*Building (?:wheel|editable) for (\S+)"), "building {0}"),
    (re.compile(r"\s*Installing build dependencies"), "fetching build tools"),
    (re.compile(r"\s*Preparing (?:editable )?metadata"), "reading package descriptions"),
    (re.compile(r"Installing collected packages"), "installing packages"),
    (re.compile(r"\s*\*\*\* Configuring CMake"), "configuring the build"),
)  # fmt: skip


def describe(line: str) -> str:
    """A pip output line as progress, an empty text if it tells nothing new."""
    for pattern, form in _LINES:
        found = pattern.match(line)
        if found:
            return form.format(*found.groups())
    transfer = re.match(r"Progress (\d+) of (\d+)", line)
    if transfer and int(transfer[2]):
        return f"downloading, {int(transfer[1]) / 1e6:.0f} of {int(transfer[2]) / 1e6:.0f} MB"
    return ""


class Pip:
    """Runs pip for one environment; `wheelhouse` replaces the network."""

    def __init__(self, python: str, runner: Runner, wheelhouse: Path | None = None) -> None:
        self.python = python
        self._runner = runner
        self._environ = environment(wheelhouse)
        self._has_raw_progress: bool | None = None

    def try_install(
        self, title: str, arguments: Sequence[str], environ: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """`pip install`, returning its status and output."""
        return self.run(title, ["install", *self._progress_options(), *arguments], environ)

    def install(self, title: str, arguments: Sequence[str], environ: dict[str, str] | None = None) -> None:
        """`pip install`; raises with the cause in words if it fails."""
        self.checked(title, ["install", *self._progress_options(), *arguments], environ)

    def checked(self, title: str, arguments: Sequence[str], environ: dict[str, str] | None = None) -> str:
        """Run pip and return its output; raises if it fails."""
        status, output = self.run(title, arguments, environ)
        if status != 0:
            raise faults.explain(title, output, str(self._runner.log), tail(output), shutil.which)
        return output

    def run(self, title: str, arguments: Sequence[str], environ: dict[str, str] | None = None) -> tuple[int, str]:
        """Run pip. Verbose, since only then it passes on what a build writes."""
        command = [self.python, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
        return self._runner.run(title, command, environ={**self._environ, **(environ or {})}, describe=describe)

    def cache_folder(self) -> Path:
        """pip's cache, or a folder of the environment where caching is off."""
        status, output = self.run("asking pip for its cache", ["cache", "dir"])
        path = Path(output.strip().splitlines()[-1]) if status == 0 and output.strip() else None
        return path if path and path.is_absolute() else Path(self.python).parents[1] / "pip-cache"

    def has_built(self, distribution: str, version: str) -> bool:
        """Whether pip's cache holds a wheel built before, so that nothing need be compiled."""
        status, output = self.run("looking into pip's cache", ["cache", "list", distribution])
        return status == 0 and f"{distribution}-{version}-" in output

    def _progress_options(self) -> list[str]:
        if self._has_raw_progress is None:
            _, output = self.run("asking pip for its version", ["--version"])
            found = re.match(r"pip (\d+)\.(\d+)", output)
            self._has_raw_progress = (
                bool(found) and (int(found[1]), int(found[2])) >= RAW_PROGRESS_SINCE if found else False
            )
        return ["--verbose", "--progress-bar", "raw" if self._has_raw_progress else "off"]


def environment(wheelhouse: Path | None) -> dict[str, str]:
    """The environment for pip and for `edgellama pull`."""
    environ = {name: value for name, value in os.environ.items() if name not in HOSTILE}
    environ["PYTHONUNBUFFERED"] = "1"
    environ["PYTHONIOENCODING"] = "utf-8"
    if wheelhouse:
        # As an address: pip splits this variable at spaces.
        environ.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=wheelhouse.resolve().as_uri())
        environ.pop("PIP_EXTRA_INDEX_URL", None)
    return environ

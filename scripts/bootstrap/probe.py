"""What the backend detection sees of this machine, behind one seam so that recorded machines can be replayed."""

from __future__ import annotations

import os
import platform as platform_module
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

TIMEOUT_SECONDS = 20
_USUAL_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/opt/homebrew/bin"


@dataclass(frozen=True)
class Transcript:
    """What a command did: its exit status (None: it does not exist or did not end) and what it wrote."""

    status: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


class Probe(Protocol):
    """A machine to look at."""

    @property
    def platform(self) -> str: ...

    @property
    def machine(self) -> str: ...

    @property
    def environ(self) -> Mapping[str, str]: ...

    def run(self, command: Sequence[str]) -> Transcript: ...

    def which(self, name: str) -> str | None: ...

    def exists(self, path: str) -> bool: ...


class ThisMachine:
    """The machine the script runs on."""

    platform = sys.platform
    machine = platform_module.machine()
    environ: Mapping[str, str] = os.environ

    def run(self, command: Sequence[str]) -> Transcript:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_SECONDS,
                env={**os.environ, "LC_ALL": "C"},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return Transcript(None)
        return Transcript(
            done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        )

    def which(self, name: str) -> str | None:
        return shutil.which(name)

    def exists(self, path: str) -> bool:
        return Path(path).exists()


@dataclass
class RecordedMachine:
    """A machine written down in a text file (see `read`)."""

    platform: str = "linux"
    machine: str = "x86_64"
    environ: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    commands: dict[str, Transcript] = field(default_factory=dict)

    def run(self, command: Sequence[str]) -> Transcript:
        return self.commands.get(" ".join(command), Transcript(None))

    def which(self, name: str) -> str | None:
        if name in self.paths:
            return name
        folders = self.environ.get("PATH", _USUAL_PATH).split(":" if self.platform != "win32" else ";")
        names = [f"{folder}/{name}{ending}" for folder in folders for ending in ("", ".exe")]
        return next((path for path in names if path in self.paths), None)

    def exists(self, path: str) -> bool:
        return path in self.paths

    @classmethod
    def read(cls, path: Path) -> RecordedMachine:
        """Parse a transcript: `platform:`, `machine:`, `env:` and `path:` lines, then `$ command` with its output.

        A line `[exit N]` ends an output; what follows `[stderr]` inside it went to standard error. `#` lines before the
        first command are remarks.
        """
        machine = cls()
        head, *blocks = re.split(r"^\$ ", path.read_text("utf-8"), flags=re.MULTILINE)
        for line in head.splitlines():
            key, _, value = line.partition(": ")
            if key in {"platform", "machine"}:
                setattr(machine, key, value)
            elif key == "path":
                machine.paths.add(value)
            elif key == "env":
                name, _, content = value.partition("=")
                machine.environ[name] = content
            elif line and not line.startswith("#"):
                raise ValueError(f"{path}: cannot read {line!r}")
        for block in blocks:
            command, _, rest = block.partition("\n")
            output, mark, status = rest.rpartition("[exit ")
            if not mark:
                raise ValueError(f"{path}: `{command}` has no [exit N] line")
            stdout, _, stderr = output.partition("[stderr]\n")
            machine.commands[command] = Transcript(int(status.strip().rstrip("]")), stdout, stderr)
        return machine

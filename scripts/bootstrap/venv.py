"""The private environment itself: make it, take it over, or say why not."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import sys
from pathlib import Path

from bootstrap import advice, lock, stamp
from bootstrap.children import Runner, tail
from bootstrap.errors import FAILED, NO_SPACE, SetupError
from bootstrap.probe import Probe

LOG_NAME = "edgellama-setup.log"
MARKER = ".edgellama-environment"
GIB = 1 << 30
NEEDED_BYTES = 3 * GIB // 2
"""An environment with all packages takes 0.6 GB, pip's cache and the build the rest."""


def check_interpreter(probe: Probe) -> None:
    """Refuse a Python that cannot hold the environment, with the command that brings a better one."""
    if struct.calcsize("P") < 8:
        raise SetupError(
            "this is a 32-bit Python; edgellama needs a 64-bit one",
            ["On a Raspberry Pi install the 64-bit system; on Windows the 64-bit installer of Python."],
        )
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise SetupError(
            "this Python cannot make environments: its venv or ensurepip module is missing",
            [f"    {advice.install('venv', probe.which, probe.platform)}", "Then run the same command again."],
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else, or a disk without room."""
    if folder.exists():
        if not folder.is_dir():
            raise SetupError(f"{folder} is not a folder", ["Set EDGELLAMA_VENV to a folder to be made."])
        names = {p.name for p in folder.iterdir()} - {lock.NAME, LOG_NAME}
        if names and not names & {"pyvenv.cfg", MARKER}:
            raise SetupError(
                f"{folder} holds other files and is no Python environment", ["Set EDGELLAMA_VENV to another folder."]
            )
    if (folder / "bin").exists() or (folder / "Scripts").exists():
        return
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{place} has {free / 1e9:.1f} GB free; the environment and its build need {NEEDED_BYTES / 1e9:.1f} GB",
            ["Free some space, or set EDGELLAMA_VENV to a folder on a larger disk."],
            code=NO_SPACE,
        )


def works(folder: Path, runner: Runner) -> bool:
    """Whether the environment has an interpreter and pip that run. An interrupted making leaves one that does not."""
    python = stamp.venv_python(str(folder))
    if not Path(python).exists():
        return False
    code = "import sys, pip; sys.exit(sys.prefix == sys.base_prefix or sys.version_info < (3, 11))"
    try:
        status, _ = runner.run("checking the environment", [python, "-I", "-c", code])
    except OSError:  # copied from another machine, or its interpreter is gone
        return False
    return status == 0


def make(folder: Path, runner: Runner) -> None:
    """Make the environment, replacing the remains of one that we made ourselves."""
    if works(folder, runner):
        return
    if (folder / "pyvenv.cfg").exists() and not (folder / MARKER).exists():
        raise SetupError(
            f"{folder} is an environment that does not work and was not made by this script",
            ["Remove it, or set EDGELLAMA_VENV to another folder."],
        )
    _clear(folder)
    (folder / MARKER).touch()
    status, output = runner.run("making a private Python environment", [sys.executable, "-m", "venv", str(folder)])
    if status != 0:
        full = "No space left" in output
        raise SetupError(
            f"making the environment {folder} failed" + (": the disk is full" if full else ""),
            [f"The whole log: {runner.log}"],
            code=NO_SPACE if full else FAILED,
            tail=tail(output),
        )


def _clear(folder: Path) -> None:
    kept = {lock.NAME, LOG_NAME}
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def ascii_path_file(text: str) -> str:
    """An editable install's path file, with paths that are not ASCII as code that any locale reads alike.

    Before 3.13 `site` reads path files in the locale's encoding: UTF-8 paths stop Python under LC_ALL=C or on Windows.
    """
    lines = []
    for line in text.splitlines():
        is_path = bool(line.strip()) and not line.startswith(("import ", "#"))
        if is_path and not line.isascii():
            line = f"import os, sys; sys.path.append(os.fsdecode({line.encode()!r}))"  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines) + "\n"


def verify_import(folder: Path, runner: Runner) -> None:
    """Make sure that the environment's Python imports edgellama from this checkout."""
    python = stamp.venv_python(str(folder))
    code = "import edgellama, os, sys; sys.stdout.write(os.path.realpath(edgellama.__file__))"
    command = [python, "-I", "-X", "utf8", "-c", code]
    _make_path_files_ascii(folder)
    status, output = runner.run("checking the installation", command)
    if status != 0 or not (Path(stamp.ROOT) / "edgellama" / "__init__.py").samefile(output.strip().splitlines()[-1]):
        raise SetupError(
            f"the environment does not import edgellama from {stamp.ROOT}",
            ["Move the checkout to a path of plain ASCII letters and run the same command again.",
             f"The whole log: {runner.log}"],
            tail=tail(output),
        )  # fmt: skip


def _make_path_files_ascii(folder: Path) -> None:
    packages = ("Lib/site-packages", "lib/python*/site-packages")
    for path in (p for place in packages for p in folder.glob(f"{place}/*edgellama*.pth")):
        text = path.read_text("utf-8")
        if not text.isascii():
            path.write_text(ascii_path_file(text), "ascii")

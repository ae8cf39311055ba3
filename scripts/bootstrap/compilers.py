"""Host compilers: which one there is, and which nvcc accepts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bootstrap.probe import Probe

VSWHERE = r"C:\Program Files (x86)\Microsoft Visual Studio\Installer\vswhere.exe"
VSWHERE_QUERY = (
    VSWHERE, "-latest", "-products", "*",
    "-requires", "Microsoft.VisualStudio.Component.VC.Tools.x86.x64", "-property", "installationPath",
)  # fmt: skip

# Newest GCC each CUDA release accepts (NVIDIA's installation guide, table of host compilers).
NEWEST_GCC = (((13, 0), 15), ((12, 8), 14), ((12, 4), 13), ((12, 0), 12), ((11, 5), 11), ((11, 1), 10), ((11, 0), 9))


OLDEST_CMAKE = (3, 21)
"""llama-cpp-python's own bound; its build takes CMake from PyPI where the system's is older or absent."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, its kind (`gcc`, `clang`, `msvc`) and major version (0: not known)."""

    command: str
    kind: str
    major: int


def _ask(probe: Probe, command: str) -> Compiler | None:
    answer = probe.run([command, "--version"])
    if not answer.ok:
        return None
    first = answer.stdout.split("\n", 1)[0]
    clang = re.search(r"clang version (\d+)", first)
    if clang:
        return Compiler(command, "clang", int(clang[1]))
    gcc = re.search(r"(\d+)\.\d+\.\d+", first.rpartition(")")[2] or first)
    return Compiler(command, "gcc", int(gcc[1]) if gcc else 0)


def find(probe: Probe) -> Compiler | None:
    """The C++ compiler that CMake will take here, None if there is none."""
    if probe.platform == "win32":
        answer = probe.run(VSWHERE_QUERY)
        return Compiler(answer.stdout.strip(), "msvc", 0) if answer.ok and answer.stdout.strip() else None
    if probe.platform == "darwin" and not probe.run(["xcode-select", "-p"]).ok:
        return None  # /usr/bin/clang is there without the tools, and opens a dialog when called
    wanted = probe.environ.get("CXX")
    for command in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if probe.which(command) or probe.exists(command):
            compiler = _ask(probe, command)
            if compiler:
                return compiler
    return None


def newest_gcc(release: tuple[int, int]) -> int:
    """The newest GCC that this CUDA release accepts."""
    return next((major for since, major in NEWEST_GCC if release >= since), 8)


def for_cuda(probe: Probe, release: tuple[int, int]) -> tuple[Compiler | None, int]:
    """A host compiler for nvcc of `release` and the newest GCC it accepts; None if none here fits."""
    limit = newest_gcc(release)
    chosen = probe.environ.get("CUDAHOSTCXX")
    compiler = _ask(probe, chosen) if chosen else find(probe)
    if compiler and (compiler.kind != "gcc" or compiler.major <= limit):
        return compiler, limit
    for major in range(limit, 8, -1):
        if probe.which(f"g++-{major}"):
            return Compiler(f"g++-{major}", "gcc", major), limit
    return None, limit


def cmake(probe: Probe) -> str:
    """Which CMake the build will take, in words."""
    answer = probe.run(["cmake", "--version"])
    found = re.search(r"cmake version (\d+)\.(\d+)\.(\d+)", answer.stdout) if answer.ok else None
    if not found:
        return "CMake from PyPI"
    version = ".".join(found.groups())
    if (int(found[1]), int(found[2])) < OLDEST_CMAKE:
        return f"CMake from PyPI (the system's {version} is too old)"
    return f"CMake {version}"

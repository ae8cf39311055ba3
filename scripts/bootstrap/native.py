"""llama-cpp-python in the private environment: is it there, does it load, has it the device, build it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from bootstrap import advice, compilers, faults
from bootstrap.backends import DEVICE_PREFIXES, Build
from bootstrap.children import Runner, tail
from bootstrap.errors import ENGINE, FAILED, NO_SPACE, OFFLINE, SetupError
from bootstrap.pip import Pip
from bootstrap.probe import Probe
from bootstrap.progress import say

CHILD = Path(__file__).with_name("device_child.py")
GIB = 1 << 30
JOB_BYTES = {"cuda": 3 * GIB, "rocm": 3 * GIB}


@dataclass(frozen=True)
class Loaded:
    """What happened when the library was loaded in a process of its own. `version` is empty when it is not there."""

    version: str = ""
    devices: tuple[str, ...] = ()
    crash: str = ""

    def has(self, backend: str) -> bool:
        """Whether it has a device of that backend (the CPU is always one)."""
        prefixes = DEVICE_PREFIXES.get(backend)
        return not prefixes or any(device.startswith(prefixes) for device in self.devices)


def look(python: str, runner: Runner) -> Loaded:
    """Load the library in a child and ask for its devices."""
    status, output = runner.run("loading llama.cpp", [python, "-I", str(CHILD)])
    if status == 0:
        found = json.loads(output.splitlines()[-1])
        return Loaded(found["version"], tuple(device["name"] for device in found["devices"]))
    if "No module named 'llama_cpp'" in output:
        return Loaded()
    return Loaded(crash=_ending(status, output))


def _ending(status: int, output: str) -> str:
    if status < 0:
        names = {s.value: s.name for s in signal.Signals}
        return f"it ended with {names.get(-status, f'signal {-status}')}"
    if sys.platform == "win32" and status & 0xC0000000 == 0xC0000000:
        return f"it ended with exception {status:#010x}"
    return (output.splitlines() or ["no output"])[-1][:300]


def jobs(backend: str, processors: int, memory_bytes: int) -> int:
    """Compilers to run at the same time: one per processor, fewer where memory is short."""
    by_memory = memory_bytes // JOB_BYTES.get(backend, GIB) if memory_bytes else processors
    return max(1, min(processors, by_memory))


def _memory_bytes() -> int:
    if sys.platform == "win32":
        return 0
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _processors() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Native:
    """Brings llama-cpp-python into the environment for one build."""

    def __init__(self, pip: Pip, runner: Runner, probe: Probe, requirement: str) -> None:
        self._pip = pip
        self._runner = runner
        self._probe = probe
        self.requirement = requirement
        self.version = requirement.partition("==")[2]
        self.avoid_wheel = False
        """Compile from source even where a built wheel is at hand."""

    def bring(self, build: Build, *, rebuild: bool) -> Loaded:
        """Install or build it, unless the one here is right. Returns what the library says about itself."""
        loaded = look(self._pip.python, self._runner)
        if loaded.version == self.version and loaded.has(build.backend) and not rebuild:
            return loaded
        root = self._toolkit(build)
        arguments = self._arguments(build, root)
        shown = " ".join([*arguments, os.environ.get("CMAKE_ARGS", "")]).strip() or "(none)"
        say(f"llama.cpp for {build.backend}, {compilers.cmake(self._probe)}, CMAKE_ARGS: {shown}")
        fresh = rebuild or self.avoid_wheel
        replace = bool(loaded.version or loaded.crash) or rebuild
        if self._must_find_wheel(must_build=fresh or bool(arguments)):
            self._install_wheel(replace=replace)
        else:
            self._install(build, arguments, replace=replace, fresh=fresh)
        loaded = look(self._pip.python, self._runner)
        if loaded.crash and not rebuild and self._can_build():
            say(f"the library that pip had does not run here ({loaded.crash}); building it anew")
            self._install(build, arguments, replace=True, fresh=True)
            loaded = look(self._pip.python, self._runner)
        if loaded.version != self.version:
            raise SetupError(
                f"llama.cpp was installed, but does not load: {loaded.crash or f'version {loaded.version}'}",
                [
                    "Build it again for this machine:",
                    "    ./scripts/chat --rebuild",
                    f"The whole log: {self._runner.log}",
                ],
                code=ENGINE,
            )
        return loaded

    def _toolkit(self, build: Build) -> Path | None:
        if not build.toolkit:
            return None
        from bootstrap import cuda_wheels

        self._pip.install("fetching NVIDIA's compiler and cuBLAS from PyPI", [build.toolkit])
        return cuda_wheels.prepare(self._pip.python, self._runner)

    def _arguments(self, build: Build, root: Path | None) -> list[str]:
        arguments = list(build.cmake_args)
        if root:
            arguments += [f"-DCUDAToolkit_ROOT={root}", f"-DCMAKE_CUDA_COMPILER={root / 'bin' / 'nvcc'}"]
        return arguments

    def _can_build(self) -> bool:
        return compilers.find(self._probe) is not None

    def _must_find_wheel(self, *, must_build: bool) -> bool:
        """Whether there is no compiler: then only a wheel that is built already can help."""
        if self._can_build():
            return False
        if must_build:
            raise self._no_compiler()
        return not self._pip.has_built("llama_cpp_python", self.version)

    def _install_wheel(self, *, replace: bool) -> None:
        """Take a prebuilt wheel from wherever pip looks; without one say what to install, before 77 MB are fetched."""
        options = ["--only-binary", "llama-cpp-python", *(["--force-reinstall", "--no-deps"] if replace else [])]
        status, output = self._pip.try_install("looking for a built llama.cpp", [*options, self.requirement])
        if status == 0:
            return
        fault = faults.diagnose(output)
        if fault and fault.code in {OFFLINE, NO_SPACE}:
            raise faults.explain(
                "looking for a built llama.cpp", output, str(self._runner.log), tail(output), shutil.which
            )
        raise self._no_compiler()

    def _no_compiler(self) -> SetupError:
        return SetupError(
            "llama.cpp is compiled for this machine, and there is no C++ compiler",
            [
                f"    {advice.install('compiler', self._probe.which, self._probe.platform)}",
                "Then run the same command again. CMake and ninja come by themselves.",
                *without_native(),
            ],
            code=FAILED,
        )

    def _install(self, build: Build, arguments: list[str], *, replace: bool, fresh: bool) -> None:
        environ = dict(build.environ)
        users = os.environ.get("CMAKE_ARGS", "")
        environ["CMAKE_ARGS"] = " ".join([*map(_quoted, arguments), users]).strip()
        level = str(jobs(build.backend, _processors(), _memory_bytes()))
        environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", level))
        options = ["--force-reinstall", "--no-deps"] if replace else []
        if environ["CMAKE_ARGS"]:
            # pip keeps built wheels by version alone: one built with other arguments must not be taken for this one.
            options += ["--cache-dir", str(self._cache(build, environ["CMAKE_ARGS"]))]
        if fresh:
            options += ["--no-cache-dir", "--no-binary", "llama-cpp-python"]
        status, output = self._pip.try_install("installing llama.cpp", [*options, self.requirement], environ)
        if status != 0:
            error = faults.explain("building llama.cpp", output, str(self._runner.log), tail(output), shutil.which)
            error.advice += without_native()
            raise error

    def _cache(self, build: Build, arguments: str) -> Path:
        key = hashlib.sha256(f"{arguments}\0{build.toolkit}".encode()).hexdigest()[:12]
        return self._pip.cache_folder() / f"edgellama-{build.backend}-{key}"


def _quoted(argument: str) -> str:
    return f'"{argument}"' if any(c in argument for c in ' \t"') else argument


def without_native() -> list[str]:
    """The way on without llama.cpp, where this checkout has one."""
    jit = Path(__file__).resolve().parents[2] / "edgellama" / "engine" / "jit"
    if not (jit.is_dir() or jit.with_suffix(".py").is_file()):
        return []
    return ["Or go on without it, on the slower engine that needs no compiler:", "    ./scripts/chat --engine jit"]

"""What pip and compilers write is turned into a cause and a command. The samples are their own words."""

from __future__ import annotations

import pytest
from bootstrap import advice, faults
from bootstrap.errors import FAILED, NO_SPACE, OFFLINE
from bootstrap.pip import describe

DEBIAN = {"apt-get": "/usr/bin/apt-get"}.get
FEDORA = {"dnf": "/usr/bin/dnf"}.get
BARE = {"nothing": ""}.get


@pytest.mark.parametrize(
    ("output", "words", "code"),
    [
        ("OSError: [Errno 28] No space left on device\nerror: Failed building wheel for x", "disk is full", NO_SPACE),
        ("c++: fatal error: Killed signal terminated program cc1plus\nninja: build stopped", "out of memory", NO_SPACE),
        ("CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage", "no working C++ compiler", FAILED),
        (
            "CMake Error at CMakeLists.txt:3 (project):\n  No CMAKE_CXX_COMPILER could be found.",
            "no working C++ compiler",
            FAILED,
        ),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(\"Failed to establish a "
            "new connection: [Errno -3] Temporary failure in name resolution\")': /simple/click/\n"
            "ERROR: Could not find a version that satisfies the requirement click\n",
            "cannot be reached",
            OFFLINE,
        ),
        (
            "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed'))",
            "certificate is not trusted",
            OFFLINE,
        ),
        ("OSError('Tunnel connection failed: 407 Proxy Authentication Required')", "proxy refused", OFFLINE),
        ("ERROR: HTTP error 403 while getting https://x/y.whl", "refused access", FAILED),
        ("#error -- unsupported GNU version! gcc versions later than 13 are not supported!", "host compiler", FAILED),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120a'", "does not know this GPU", FAILED),
        ("Could NOT find Vulkan (missing: glslc) (found version \"1.3.239\")", "Vulkan development files", FAILED),
        ("Cannot install on Python version 3.16.0; only versions >=3.10,<3.15 work", "version of Python", FAILED),
        ("PermissionError: [Errno 13] Permission denied: '/opt/x'", "cannot be written", FAILED),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "arrived damaged", FAILED),
        ("error: ggml.c:1: expected ';'\nninja: build stopped: subcommand failed.", "did not build", FAILED),
    ],
)  # fmt: skip
def test_the_cause_is_named(output: str, words: str, code: int) -> None:
    error = faults.explain("installing", output, "the.log", "the tail", DEBIAN)
    assert words in error.what
    assert error.code == code
    assert "the.log" in error.text()
    assert "the tail" in error.text()


def test_an_unknown_failure_still_shows_log_and_tail() -> None:
    error = faults.explain("installing", "something new", "the.log", "the tail", DEBIAN)
    assert error.what == "installing failed"
    assert "the.log" in error.text()


@pytest.mark.parametrize(
    ("which", "command"), [(DEBIAN, "apt-get install build-essential"), (FEDORA, "dnf install gcc")]
)
def test_the_command_is_this_systems(which: object, command: str) -> None:
    assert callable(which)
    error = faults.explain("x", "CMAKE_CXX_COMPILER not set", "log", "", which)
    assert command in error.text()


def test_without_a_package_manager_the_thing_itself_is_named() -> None:
    assert "C++ compiler" in advice.install("compiler", BARE, "linux")
    assert advice.install("compiler", BARE, "darwin") == "xcode-select --install"


@pytest.mark.parametrize("thing", sorted(advice.COMMANDS))
def test_every_thing_has_an_answer_everywhere(thing: str) -> None:
    for platform in ("linux", "darwin", "win32"):
        for manager in (*advice.MANAGERS, "none"):
            assert advice.install(thing, {manager: manager}.get, platform)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Collecting numpy<3,>=2.1 (from edgellama==0.1.0)", "looking up numpy"),
        (
            "  Downloading numba-0.68.1-cp311-cp311-manylinux_2_28_x86_64.whl (3.8 MB)",
            "downloading numba-0.68.1 (3.8 MB)",
        ),
        ("  Using cached llama_cpp_python-0.3.36.tar.gz (76.6 MB)", "llama_cpp_python-0.3.36 from pip's cache"),
        ("  [57/312] Building CXX object src/x.o", "compiling file 57 of 312"),
        ("  Building wheel for llama-cpp-python (pyproject.toml): started", "building llama-cpp-python"),
        ("Progress 5242880 of 78643200", "downloading, 5 of 79 MB"),
        ("Installing collected packages: a, b", "installing packages"),
        ("  Added file to sdist", ""),
        ("Progress 1 of 0", ""),
    ],
)
def test_pips_lines_become_progress(line: str, shown: str) -> None:
    assert describe(line) == shown

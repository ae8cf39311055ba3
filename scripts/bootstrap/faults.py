"""What went wrong in a pip run, read from its output: what happened, what to do, and the exit code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from bootstrap import advice
from bootstrap.errors import FAILED, NO_SPACE, OFFLINE, SetupError


@dataclass(frozen=True)
class Fault:
    """`pattern` in the output means `what`; `things` are installed by `advice`, `lines` are said as they are."""

    pattern: str
    what: str
    things: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    code: int = FAILED


# Order matters: the cause stands above its consequences (a full disk also "fails to build").
FAULTS = (
    Fault(
        r"No space left on device|Errno 28|not enough space on the disk|Disk quota exceeded|Errno 122",
        "the disk is full",
        lines=(
            "Free some space (a build needs about 3 GB, in the checkout, in pip's cache and in the temporary folder),",
            "or set EDGELLAMA_VENV and TMPDIR to folders on a larger disk. Then run the same command again.",
        ),
        code=NO_SPACE,
    ),
    Fault(
        r"Killed signal terminated program|virtual memory exhausted|cc1plus: out of memory|LLVM ERROR: out of memory"
        r"|fatal error C1060|internal compiler error: Killed",
        "the compiler ran out of memory",
        lines=("Build with fewer compilers at a time:", "    CMAKE_BUILD_PARALLEL_LEVEL=1 ./scripts/chat"),
        code=NO_SPACE,
    ),
    Fault(
        r"unsupported GNU version|unsupported clang version|unsupported Microsoft Visual Studio version",
        "this CUDA toolkit does not accept this host compiler",
        lines=(
            "Install an older g++ beside the system's one and name it:",
            "    CUDAHOSTCXX=g++-12 ./scripts/chat --backend cuda",
        ),
    ),
    Fault(
        r"Unsupported gpu architecture|nvcc fatal *: *(Unsupported|Value 'sm_)",
        "this CUDA toolkit does not know this GPU: it is too old or too new for it",
        things=("cuda toolkit",),
    ),
    Fault(
        r"Could NOT find Vulkan|glslc.*not found|SPIRV-HeadersConfig|SPIRV-Headers-config",
        "the Vulkan development files are incomplete",
        things=("vulkan",),
    ),
    Fault(
        r"package configuration file provided by \"(hip|hipblas|rocblas)\"|At least ROCM/HIP",
        "the ROCm development files are incomplete or too old",
        things=("rocm",),
    ),
    Fault(
        r"No CMAKE_CUDA_COMPILER could be found|Failed to find nvcc|CUDA Toolkit not found",
        "the CUDA compiler nvcc was not found",
        things=("cuda toolkit",),
    ),
    Fault(
        r"No CMAKE_C(XX)?_COMPILER could be found|CMAKE_C(XX)?_COMPILER not set|command 'x86_64-linux-gnu-gcc' failed"
        r"|error: command '(gcc|cc|clang)' failed: No such file|Microsoft Visual C\+\+ .* is required"
        r"|xcode-select: error|xcrun: error|is not able to compile a simple test program",
        "there is no working C++ compiler",
        things=("compiler",),
    ),
    Fault(
        r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSLError\(",
        "the package index's certificate is not trusted",
        things=("certificates",),
        lines=(
            "Behind a company proxy that opens TLS, name its certificate:",
            "    PIP_CERT=/path/to/company-ca.pem ./scripts/chat",
        ),
        code=OFFLINE,
    ),
    Fault(
        r"407 Proxy Authentication|Tunnel connection failed: 407|ProxyError",
        "the proxy refused the connection",
        lines=("Set HTTPS_PROXY=http://user:password@host:port, or NO_PROXY for hosts that need none.",),
        code=OFFLINE,
    ),
    Fault(
        r"(401|403) (Client )?Error|HTTP error (401|403)|403 Forbidden|401 Unauthorized",
        "the package index refused access",
        lines=("Check the index and its credentials: `pip config list`, PIP_INDEX_URL.",),
    ),
    Fault(
        r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known"
        r"|nodename nor servname|getaddrinfo failed|Network is unreachable|No route to host|ReadTimeoutError"
        r"|Connection refused|ConnectTimeoutError|Connection reset by peer|IncompleteRead|Connection broken"
        r"|NewConnectionError|NameResolutionError",
        "the package index cannot be reached",
        lines=(
            "Connect to the network and run the same command again: what is already here is kept.",
            "Without a network: on a machine that has one, `./scripts/chat --make-wheelhouse DIR`; carry it here, then",
            "    ./scripts/chat --wheelhouse DIR",
        ),
        code=OFFLINE,
    ),
    Fault(
        r"THESE PACKAGES DO NOT MATCH THE HASHES|Expected sha256",
        "a package arrived damaged",
        lines=("Run the same command again; if it stays so, `pip cache purge` first.",),
    ),
    Fault(
        r"requires a different Python|Cannot install on Python version|Requires-Python|only versions >=",
        "a package does not exist for this version of Python",
        things=("python",),
        lines=("then run the script with it, for example: python3.13 scripts/chat",),
    ),
    Fault(
        r"No matching distribution found|Could not find a version that satisfies",
        "a package was not found for this machine",
        lines=("Look at the lines above: which package, and from where pip looked (`pip config list`).",),
    ),
    Fault(
        r"Permission denied|Errno 13|Access is denied|Read-only file system|Errno 30",
        "a folder cannot be written",
        lines=(
            "Set EDGELLAMA_VENV to a folder you own, for example:",
            '    EDGELLAMA_VENV="$HOME/.edgellama-env" ./scripts/chat',
        ),
    ),
    Fault(
        r"CMake Error|ninja: build stopped|Failed building wheel|CMake build failed|CMake configuration failed",
        "llama.cpp did not build on this machine",
    ),
)


def diagnose(output: str) -> Fault | None:
    """The first fault of the table that the output shows."""
    return next((fault for fault in FAULTS if re.search(fault.pattern, output)), None)


def explain(step: str, output: str, log: str, tail: str, which: Callable[[str], str | None]) -> SetupError:
    """The error for a failed step: its cause in words, commands to run, the end of the log."""
    fault = diagnose(output)
    lines: list[str] = []
    if fault:
        lines += [f"    {advice.install(thing, which)}" for thing in fault.things]
        lines += fault.lines
    lines.append(f"The whole log: {log}")
    what = f"{step} failed: {fault.what}" if fault else f"{step} failed"
    return SetupError(what, lines, code=fault.code if fault else FAILED, tail=tail)

"""NVIDIA: the devices nvidia-smi names, and an nvcc that fits driver, device and host compiler, here or from PyPI."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bootstrap import advice, compilers
from bootstrap.backends import Build, Finding
from bootstrap.probe import Probe, Transcript

SMI_PLACES = ("/usr/lib/wsl/lib/nvidia-smi", r"C:\Windows\System32\nvidia-smi.exe")
NVCC_PLACES = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc", "/usr/lib/cuda/bin/nvcc")
QUERY = "--query-gpu=name,driver_version,memory.total"
FORMAT = "--format=csv,noheader"
JETSON = "/etc/nv_tegra_release"

# First release that makes code for a compute capability, and the oldest capability a major release still knows.
FIRST_RELEASE = (((12, 1), (12, 9)), ((12, 0), (12, 8)), ((11, 0), (13, 0)), ((10, 3), (12, 9)), ((10, 0), (12, 8)),
                 ((8, 9), (11, 8)), ((8, 7), (11, 4)), ((8, 6), (11, 1)))  # fmt: skip
OLDEST_CAPABILITY = {13: (7, 5), 12: (5, 0), 11: (3, 5)}

# nvcc, its headers and cuBLAS as wheels exist since CUDA 13; the wheels for 12 hold ptxas but no nvcc.
PYPI_FIRST = (13, 0)

Version = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """One device. `capability` is (0, 0) where the driver is too old to tell."""

    name: str
    memory: str
    capability: Version

    def __str__(self) -> str:
        capability = ".".join(map(str, self.capability))
        return f"{self.name} ({self.memory}{f', compute capability {capability}' if any(self.capability) else ''})"


def _version(text: str) -> Version:
    found = re.match(r"(\d+)\.(\d+)", text.strip())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _gpus(probe: Probe, smi: str) -> tuple[list[Gpu], Transcript]:
    answer = probe.run([smi, f"{QUERY},compute_cap", FORMAT])
    if not answer.ok and "not a valid field" in answer.text:
        answer = probe.run([smi, QUERY, FORMAT])
    gpus = []
    for line in answer.stdout.splitlines() if answer.ok else ():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 3:
            gpus.append(Gpu(parts[0], parts[2], _version(parts[3]) if len(parts) > 3 else (0, 0)))
    return gpus, answer


def _driver_trouble(answer: Transcript) -> str:
    if "version mismatch" in answer.text:
        return "the NVIDIA driver was updated and its old kernel module still runs: restart the machine"
    if "communicate with the NVIDIA driver" in answer.text:
        return (
            "the NVIDIA driver is installed but its kernel module is not loaded: restart; after a kernel update "
            "install the kernel's headers and reinstall the driver; with Secure Boot enrol its key"
        )
    return ""


def _usable(release: Version, driver: Version, gpus: list[Gpu]) -> str:
    """Why a toolkit of `release` cannot make code for these devices, or an empty text."""
    if any(driver) and release[0] > driver[0]:
        return f"the driver runs CUDA {_dotted(driver)}, older than this toolkit"
    for gpu in gpus:
        oldest = OLDEST_CAPABILITY.get(release[0], (0, 0))
        if any(gpu.capability) and gpu.capability < oldest:
            return f"it no longer knows {gpu.name} (compute capability {_dotted(gpu.capability)})"
        first = next((r for capability, r in FIRST_RELEASE if gpu.capability >= capability), (0, 0))
        if release < first:
            return f"{gpu.name} (compute capability {_dotted(gpu.capability)}) needs CUDA {_dotted(first)} or newer"
    return ""


def _toolkits(probe: Probe) -> list[tuple[str, Version]]:
    """Every nvcc here with its release, the one on PATH first."""
    named = [probe.environ.get("CUDACXX", ""), probe.which("nvcc") or ""]
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        root = probe.environ.get(variable, "").rstrip("/\\")
        if root:
            named.append(rf"{root}\bin\nvcc.exe" if probe.platform == "win32" else f"{root}/bin/nvcc")
    found: dict[str, Version] = {}
    for path in [*named, *NVCC_PLACES]:
        if path and path not in found and (path in named[:2] or probe.exists(path)):
            release = re.search(r"release (\d+\.\d+)", probe.run([path, "--version"]).stdout)
            if release:
                found[path] = _version(release[1])
    return list(found.items())


def _architectures(gpus: list[Gpu]) -> str:
    known = sorted({gpu.capability for gpu in gpus if any(gpu.capability)})
    # From Blackwell on the plain number lacks the instructions llama.cpp wants (120a, not 120).
    return ";".join(f"{major}{minor}{'a' if major >= 10 else ''}-real" for major, minor in known)


def _build(gpus: list[Gpu], host: compilers.Compiler, nvcc: str, *, on_path: bool, toolkit: str = "") -> Build:
    arguments = ["-DGGML_CUDA=ON"]
    architectures = _architectures(gpus)
    if architectures:
        arguments.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
    if nvcc and not on_path:
        arguments.append(f"-DCMAKE_CUDA_COMPILER={nvcc.replace(chr(92), '/')}")  # CMake reads a backslash as an escape
    if host.command not in {"c++", "g++"} and host.kind != "msvc":
        arguments.append(f"-DCMAKE_CUDA_HOST_COMPILER={host.command}")
    return Build("cuda", tuple(arguments), toolkit=toolkit)


def _from_pypi(probe: Probe, driver: Version, gpus: list[Gpu]) -> tuple[str, str]:
    """What pip installs, or why the wheels of PyPI cannot be used."""
    if probe.platform != "linux" or probe.machine not in {"x86_64", "aarch64"}:
        return "", "CUDA's wheels of PyPI are used on Linux only"
    if driver < PYPI_FIRST:
        return "", f"CUDA's wheels of PyPI need a driver for CUDA 13 (580 or newer); this one runs {_dotted(driver)}"
    trouble = _usable(PYPI_FIRST, driver, gpus)
    if trouble:
        return "", f"CUDA 13 of PyPI does not fit: {trouble}"
    return f"cuda-toolkit[nvcc,cublas,cudart,cccl]>=13.0,<{driver[0]}.{driver[1] + 1}", ""


def examine(probe: Probe) -> Finding:
    """Look for NVIDIA devices and a way to build for them."""
    smi = probe.which("nvidia-smi") or next((p for p in SMI_PLACES if probe.exists(p)), "")
    if not smi:
        return _without_smi(probe)
    gpus, answer = _gpus(probe, smi)
    if not gpus:
        trouble = _driver_trouble(answer)
        return Finding("cuda", missing=(trouble,) if trouble else ())
    stated = re.search(r"CUDA(?: UMD)? Version: *(\d+\.\d+)", probe.run([smi]).stdout)
    return _with_gpus(probe, gpus, _version(stated[1]) if stated else (0, 0))


def _without_smi(probe: Probe) -> Finding:
    if probe.exists(JETSON):
        return _with_gpus(probe, [Gpu("NVIDIA Jetson", "shared memory", (0, 0))], (0, 0))
    if probe.which("lspci") and re.search(r"(VGA|3D|Display).*NVIDIA", probe.run(["lspci"]).stdout):
        command = advice.install("nvidia driver", probe.which, probe.platform)
        return Finding("cuda", missing=(f"an NVIDIA GPU is here, but no driver:  {command}",))
    return Finding("cuda")


def _with_gpus(probe: Probe, gpus: list[Gpu], driver: Version) -> Finding:
    names = tuple(map(str, gpus))
    remarks: list[str] = []
    missing: list[str] = []
    for nvcc, release in _toolkits(probe):
        trouble = _usable(release, driver, gpus)
        if trouble:
            remarks.append(f"{nvcc} is CUDA {_dotted(release)}: {trouble}")
            continue
        host, limit = compilers.for_cuda(probe, release)
        if host is None:
            remarks.append(f"{nvcc} is CUDA {_dotted(release)} and needs a C++ compiler: GCC {limit} or older")
            missing.append(_compiler_advice(probe, limit))
            continue
        remarks.append(f"CUDA {_dotted(release)} ({nvcc}), host compiler {host.command}")
        return Finding("cuda", names, _build(gpus, host, nvcc, on_path=nvcc == probe.which("nvcc")), (), tuple(remarks))
    toolkit, trouble = _from_pypi(probe, driver, gpus)
    host, limit = compilers.for_cuda(probe, (13, 0))
    if toolkit and host:
        remarks.append(f"no CUDA toolkit here that fits: taking nvcc, runtime and cuBLAS from PyPI ({toolkit}, 1.1 GB)")
        return Finding("cuda", names, _build(gpus, host, "", on_path=True, toolkit=toolkit), (), tuple(remarks))
    if toolkit:
        missing.append(_compiler_advice(probe, limit))
    elif not missing:
        remarks.append(trouble)
        command = advice.install("cuda toolkit", probe.which, probe.platform)
        missing.append(f"a CUDA toolkit{_bound(driver, gpus)}:  {command}")
    return Finding("cuda", names, None, tuple(dict.fromkeys(missing)), tuple(remarks))


def _bound(driver: Version, gpus: list[Gpu]) -> str:
    """The newest major release that driver and devices allow, in words."""
    newest = driver[0] or max(OLDEST_CAPABILITY)
    for gpu in gpus:
        if any(gpu.capability):
            newest = min(
                newest, max((m for m, least in OLDEST_CAPABILITY.items() if gpu.capability >= least), default=11)
            )
    return f" (CUDA {newest}{' or older' if newest < max(OLDEST_CAPABILITY) else ''})"


def _compiler_advice(probe: Probe, limit: int) -> str:
    command = advice.install("compiler", probe.which, probe.platform)
    if compilers.find(probe) is not None:  # one is here, but too new: an older one goes beside it
        command = command.replace("build-essential", f"g++-{limit}").replace("gcc gcc-c++ make", f"gcc{limit}-c++")
    return f"a C++ compiler that nvcc accepts (GCC {limit} or older):  {command}"

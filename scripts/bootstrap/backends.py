"""Which of llama.cpp's backends to build here, and what is missing for the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from bootstrap.probe import Probe

NAMES = ("auto", "cpu", "cuda", "metal", "vulkan", "rocm")
DEVICE_PREFIXES = {"cuda": ("CUDA",), "metal": ("MTL", "Metal"), "vulkan": ("Vulkan",), "rocm": ("ROCm", "HIP")}
"""How llama.cpp names the devices of a backend (`CUDA0`, `Vulkan1`, …)."""


@dataclass(frozen=True)
class Build:
    """How to build llama-cpp-python for one backend."""

    backend: str
    cmake_args: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    toolkit: str = ""
    """What pip installs into the private environment before the build (CUDA's compiler from PyPI)."""


@dataclass(frozen=True)
class Finding:
    """What there is for one backend: its devices, a build if all parts are there, else what is missing.

    `worth_it` is False for a device that `auto` leaves alone; `remarks` say why.
    """

    backend: str
    devices: tuple[str, ...] = ()
    build: Build | None = None
    missing: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    worth_it: bool = True


@dataclass(frozen=True)
class Decision:
    """The build chosen (None: the backend asked for cannot be built) and lines to say about it."""

    build: Build | None
    lines: tuple[str, ...]


def _about(finding: Finding) -> list[str]:
    lines = []
    if finding.devices:
        lines.append(f"{finding.backend}: found {', '.join(finding.devices)}")
    lines += [f"{finding.backend}: {remark}" for remark in finding.remarks]
    lines += [f"{finding.backend}: missing: {part}" for part in finding.missing]
    return lines


def examine(probe: Probe, name: str) -> Finding:
    """Look for one backend's device and tool chain."""
    from bootstrap import cuda, gpus

    return {"cuda": cuda.examine, "metal": gpus.metal, "vulkan": gpus.vulkan, "rocm": gpus.rocm}[name](probe)


def decide(probe: Probe, asked: str) -> Decision:
    """Choose a build. `auto` takes the first device whose tool chain is complete, else the CPU, and says why."""
    if asked == "cpu":
        remark = ("macOS: llama-cpp-python always builds Metal in; --gpu-layers 0 keeps it unused",)
        return Decision(Build("cpu"), remark if probe.platform == "darwin" else ())
    if asked != "auto":
        finding = examine(probe, asked)
        return Decision(finding.build, tuple(_about(finding)))
    lines: list[str] = []
    for name in ("metal",) if probe.platform == "darwin" else ("cuda", "rocm", "vulkan"):
        finding = examine(probe, name)
        if not finding.devices and not finding.missing:
            continue
        lines += _about(finding)
        if finding.build and finding.worth_it:
            return Decision(finding.build, tuple(lines))
    return Decision(Build("cpu"), (*lines, "no GPU that can be used was found" if not lines else "using the CPU"))

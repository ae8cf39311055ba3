"""Apple's, Vulkan's and AMD's devices and tool chains."""

from __future__ import annotations

import re

from bootstrap import advice, compilers
from bootstrap.backends import Build, Finding
from bootstrap.probe import Probe

VULKAN_HEADERS = ("/usr/include/vulkan/vulkan.h", "/usr/local/include/vulkan/vulkan.h",
                  "/opt/homebrew/include/vulkan/vulkan.h")  # fmt: skip
SPIRV_CONFIGS = tuple(
    f"{prefix}/{folder}/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"
    for prefix in ("/usr", "/usr/local", "/opt/homebrew")
    for folder in ("share", "lib", "lib64")
)
HIPBLAS_HEADERS = ("/opt/rocm/include/hipblas/hipblas.h", "/usr/include/hipblas/hipblas.h")


def _missing(probe: Probe, thing: str, parts: list[str]) -> tuple[str, ...]:
    return (f"{', '.join(parts)}:  {advice.install(thing, probe.which, probe.platform)}",) if parts else ()


def _compiler_missing(probe: Probe) -> tuple[str, ...]:
    return () if compilers.find(probe) else _missing(probe, "compiler", ["a C++ compiler"])


def metal(probe: Probe) -> Finding:
    """Apple silicon with the command line tools. Metal's shaders are embedded and compiled at run time."""
    if probe.platform != "darwin":
        return Finding("metal", missing=("Metal exists on macOS only",))
    if probe.machine != "arm64":
        if probe.run(["sysctl", "-in", "sysctl.proc_translated"]).stdout.strip() == "1":
            return Finding(
                "metal",
                ("Apple silicon",),
                missing=(
                    "this Python is for Intel and runs under Rosetta; use a native one:  brew install python@3.13",
                ),
            )
        intel = Build("metal", ("-DGGML_METAL=ON",))
        remark = "an Intel Mac: llama.cpp is mostly faster on its CPU, use --gpu-layers 0 there"
        return Finding("metal", ("Intel Mac",), intel, _compiler_missing(probe), (remark,), worth_it=False)
    chip = probe.run(["sysctl", "-n", "machdep.cpu.brand_string"]).stdout.strip() or "Apple silicon"
    missing = _compiler_missing(probe)
    build = None if missing else Build("metal", ("-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"))
    return Finding("metal", (chip,), build, missing)


def _vulkan_devices(text: str) -> list[tuple[str, str]]:
    """(name, type) of every real device; software rasterizers are of type CPU."""
    found = []
    for block in re.split(r"^GPU\d+:", text, flags=re.MULTILINE)[1:]:
        kind = re.search(r"deviceType\s*=\s*PHYSICAL_DEVICE_TYPE_(\w+)", block)
        name = re.search(r"deviceName\s*=\s*(.+)", block)
        if kind and name and kind[1] != "CPU" and (name[1].strip(), kind[1]) not in found:
            found.append((name[1].strip(), kind[1]))
    return found


def vulkan(probe: Probe) -> Finding:
    """Any GPU with a Vulkan driver; needs headers, glslc and SPIRV-Headers to build."""
    if not probe.which("vulkaninfo"):
        has_gpu = probe.platform == "linux" and probe.exists("/dev/dri/renderD128")
        parts = ["vulkaninfo, to see whether the GPU has a Vulkan driver"] if has_gpu else []
        return Finding("vulkan", missing=_missing(probe, "vulkan", parts))
    found = _vulkan_devices(probe.run(["vulkaninfo", "--summary"]).stdout)
    if not found:
        return Finding("vulkan")
    parts = [] if probe.which("glslc") else ["glslc"]
    sdk = probe.environ.get("VULKAN_SDK", "")
    if not sdk and not any(map(probe.exists, VULKAN_HEADERS)):
        parts.append("Vulkan headers")
    if not sdk and not any(map(probe.exists, SPIRV_CONFIGS)):
        parts.append("SPIRV-Headers")
    missing = _missing(probe, "vulkan", parts) + _compiler_missing(probe)
    discrete = any(kind == "DISCRETE_GPU" for _, kind in found)
    remarks = () if discrete else ("no device of its own memory; --backend vulkan uses it all the same",)
    build = None if missing else Build("vulkan", ("-DGGML_VULKAN=ON",))
    return Finding("vulkan", tuple(name for name, _ in found), build, missing, remarks, worth_it=discrete)


def _rocm_devices(text: str) -> list[tuple[str, str]]:
    """(architecture, marketing name) of every GPU agent."""
    found = []
    for block in re.split(r"^Agent \d+", text, flags=re.MULTILINE)[1:]:
        kind = re.search(r"Device Type:\s*(\w+)", block)
        name = re.search(r"^\s*Name:\s*(gfx\w+)", block, re.MULTILINE)
        title = re.search(r"Marketing Name:\s*(.*\S)", block)
        if kind and kind[1] == "GPU" and name:
            found.append((name[1], title[1] if title else name[1]))
    return found


def _rocm_tool(probe: Probe, name: str) -> str:
    """ROCm's own folder is seldom on PATH."""
    own = f"/opt/rocm/bin/{name}"
    return name if probe.which(name) else own if probe.exists(own) else ""


def rocm(probe: Probe) -> Finding:
    """AMD GPUs that ROCm names; needs hipcc's clang, hipBLAS and rocBLAS to build."""
    rocminfo, hipconfig = _rocm_tool(probe, "rocminfo"), _rocm_tool(probe, "hipconfig")
    if not rocminfo:
        return Finding("rocm")
    answer = probe.run([rocminfo])
    if re.search(r"Permission denied|not member of", answer.text):
        return Finding(
            "rocm", missing=("access to the GPU:  sudo usermod -aG render,video $USER  (then log in again)",)
        )
    if "NOT loaded" in answer.text:
        return Finding("rocm", missing=("the kernel's amdgpu module is not loaded",))
    found = _rocm_devices(answer.stdout)
    if not found:
        return Finding("rocm")
    parts = [] if probe.run([hipconfig or "hipconfig", "--version"]).ok else ["hipcc"]
    if not any(map(probe.exists, HIPBLAS_HEADERS)):
        parts.append("hipBLAS and rocBLAS headers")
    missing = _missing(probe, "rocm", parts)
    names = tuple(f"{title} ({architecture})" for architecture, title in found)
    # ROCm calls the small GPU inside a processor "AMD Radeon Graphics"; it has too little memory bandwidth to gain.
    own = [architecture for architecture, title in found if title != "AMD Radeon Graphics"]
    targets = ";".join(sorted({*own} or {architecture for architecture, _ in found}))
    build = None
    if not missing:
        clang = probe.run([hipconfig, "-l"]).stdout.strip()
        root = probe.run([hipconfig, "-R"]).stdout.strip()
        environ = {"HIPCXX": f"{clang}/clang", "HIP_PATH": root} if clang and root else {}
        build = Build("rocm", ("-DGGML_HIP=ON", f"-DGPU_TARGETS={targets}"), environ)
    remarks = () if own else ("only a GPU inside the processor; --backend rocm uses it all the same",)
    return Finding("rocm", names, build, missing, remarks, worth_it=bool(own))

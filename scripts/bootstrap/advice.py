"""The command that installs a missing thing, by the package manager found here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

MANAGERS = ("apt-get", "dnf", "zypper", "pacman", "apk", "brew", "winget")

COMMANDS: dict[str, dict[str, str]] = {
    "compiler": {
        "apt-get": "apt-get install build-essential",
        "dnf": "dnf install gcc gcc-c++ make",
        "zypper": "zypper install gcc gcc-c++ make",
        "pacman": "pacman -S base-devel",
        "apk": "apk add build-base linux-headers",
        "brew": "xcode-select --install",
        "winget": "winget install Microsoft.VisualStudio.2022.BuildTools --override "
        '"--wait --passive --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"',
    },
    "venv": {
        "apt-get": f"apt-get install python3-venv python{sys.version_info[0]}.{sys.version_info[1]}-venv",
        "dnf": "dnf install python3 python3-pip",
        "zypper": "zypper install python3 python3-pip",
        "pacman": "pacman -S python",
        "apk": "apk add python3 py3-pip",
        "brew": "brew install python@3.13",
        "winget": "winget install Python.Python.3.13",
    },
    "python": {
        "apt-get": "apt-get install python3.13 python3.13-venv",
        "dnf": "dnf install python3.13",
        "zypper": "zypper install python313",
        "pacman": "pacman -S python",
        "apk": "apk add python3",
        "brew": "brew install python@3.13",
        "winget": "winget install Python.Python.3.13",
    },
    "cuda toolkit": {
        "apt-get": "apt-get install nvidia-cuda-toolkit",
        "dnf": "dnf install cuda-toolkit",
        "zypper": "zypper install cuda-toolkit",
        "pacman": "pacman -S cuda",
        "winget": "winget install Nvidia.CUDA",
    },
    "nvidia driver": {
        "apt-get": "apt-get install nvidia-driver",
        "dnf": "dnf install akmod-nvidia",
        "zypper": "zypper install nvidia-open-driver-G06-signed-kmp-default",
        "pacman": "pacman -S nvidia",
        "winget": "winget install Nvidia.GeForceExperience",
    },
    "vulkan": {
        "apt-get": "apt-get install libvulkan-dev glslc spirv-headers vulkan-tools",
        "dnf": "dnf install vulkan-loader-devel vulkan-headers glslc spirv-headers-devel vulkan-tools",
        "zypper": "zypper install vulkan-devel shaderc spirv-headers vulkan-tools",
        "pacman": "pacman -S vulkan-headers vulkan-icd-loader shaderc spirv-headers vulkan-tools",
        "apk": "apk add vulkan-loader-dev vulkan-headers shaderc spirv-headers vulkan-tools",
        "brew": "brew install vulkan-headers vulkan-loader molten-vk shaderc spirv-headers vulkan-tools",
        "winget": "winget install KhronosGroup.VulkanSDK",
    },
    "rocm": {
        "apt-get": "apt-get install hipcc rocminfo libhipblas-dev librocblas-dev",
        "dnf": "dnf install rocm-hip-devel rocminfo hipblas-devel rocblas-devel",
        "zypper": "zypper install rocm-hip-sdk",
        "pacman": "pacman -S rocm-hip-sdk",
        "winget": "winget install AMD.HIPSDK",
    },
    "certificates": {
        "apt-get": "apt-get install ca-certificates",
        "dnf": "dnf install ca-certificates",
        "zypper": "zypper install ca-certificates",
        "pacman": "pacman -S ca-certificates",
        "apk": "apk add ca-certificates",
    },
}
ELSEWHERE = {
    "compiler": "install a C and C++ compiler (gcc or clang)",
    "venv": "install Python's venv and ensurepip modules",
    "python": "install Python 3.13 from https://www.python.org/downloads/",
    "cuda toolkit": "install the CUDA toolkit from https://developer.nvidia.com/cuda-downloads",
    "nvidia driver": "install the driver from https://www.nvidia.com/drivers",
    "vulkan": "install the Vulkan SDK from https://vulkan.lunarg.com",
    "rocm": "install ROCm as https://rocm.docs.amd.com says",
    "certificates": "install your system's CA certificates",
}


def manager(which: Callable[[str], str | None], platform: str = sys.platform) -> str:
    """The package manager of this machine, or an empty text."""
    order = {"darwin": ("brew",), "win32": ("winget",)}.get(platform, MANAGERS[:-2])
    return next((name for name in order if which(name)), "")


def install(thing: str, which: Callable[[str], str | None], platform: str = sys.platform) -> str:
    """The command that installs `thing` (a key of COMMANDS) here, or where to get it."""
    found = manager(which, platform)
    if platform == "darwin" and thing == "compiler":
        return COMMANDS["compiler"]["brew"]  # Apple's own tool, present without Homebrew
    command = COMMANDS[thing].get(found, "")
    if not command:
        return ELSEWHERE[thing]
    needs_sudo = platform not in {"win32", "darwin"} and hasattr(os, "geteuid") and os.geteuid() != 0
    return f"sudo {command}" if needs_sudo else command

"""Make the wheels of CUDA 13 look like a toolkit that CMake finds.

They unpack to `nvidia/cu13/{bin,include,lib,nvvm}` with libraries by their full names only (`libcudart.so.13`) and no
stub of the driver's library. CMake's FindCUDAToolkit wants the plain names, and `libcuda.so` to link to.
"""

from __future__ import annotations

import ctypes.util
import re
from pathlib import Path

from bootstrap.children import Runner
from bootstrap.errors import SetupError

DRIVER_PLACES = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib",
    "/usr/lib/nvidia", "/usr/local/cuda/lib64/stubs", "/run/opengl-driver/lib",
)  # fmt: skip
NEEDED = ("bin/nvcc", "nvvm/bin/cicc", "include/cuda_runtime.h", "include/crt/host_config.h", "include/cublas_v2.h")


def prepare(python: str, runner: Runner) -> Path:
    """The toolkit's folder in the environment of `python`, with the names that CMake looks for."""
    status, output = runner.run(
        "preparing NVIDIA's compiler", [python, "-I", "-c", "import nvidia; print(*nvidia.__path__, sep='\\n')"]
    )
    folders = [Path(line) for line in output.splitlines()] if status == 0 else []
    roots = sorted(root for folder in folders for root in folder.glob("cu[0-9]*") if (root / "bin" / "nvcc").exists())
    if not roots:
        raise SetupError("NVIDIA's wheels were installed, but hold no nvcc", [f"The whole log: {runner.log}"])
    link(roots[-1], driver_library())
    return roots[-1]


def link(root: Path, driver: Path | None) -> None:
    """Add the links; what is there already stays."""
    absent = [name for name in NEEDED if not (root / name).exists()]
    if absent:
        raise SetupError(f"NVIDIA's wheels are incomplete: {', '.join(absent)} missing in {root}")
    library = root / "lib"
    for path in sorted(library.glob("lib*.so.*")):
        plain = library / re.sub(r"\.so\..*", ".so", path.name)
        if not plain.exists():
            plain.symlink_to(path.name)
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")
    stub = library / "stubs" / "libcuda.so"
    if driver and not stub.exists():
        stub.parent.mkdir(exist_ok=True)
        stub.unlink(missing_ok=True)
        stub.symlink_to(driver)


def driver_library() -> Path | None:
    """The driver's own libcuda, which programs are linked against in place of NVIDIA's stub."""
    name = ctypes.util.find_library("cuda") or "libcuda.so.1"
    for folder in DRIVER_PLACES:
        for candidate in (name, "libcuda.so.1", "libcuda.so"):
            if (Path(folder) / candidate).exists():
                return Path(folder) / candidate
    return None

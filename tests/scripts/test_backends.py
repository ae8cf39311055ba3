"""Recorded machines are replayed: what is built there, and what a person is told is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bootstrap import backends, compilers
from bootstrap.probe import RecordedMachine, ThisMachine, Transcript

FOLDER = Path(__file__).parents[1] / "data" / "transcripts"


def machine(name: str) -> RecordedMachine:
    return RecordedMachine.read(FOLDER / f"{name}.txt")


def decide(name: str, asked: str = "auto") -> tuple[backends.Build | None, str]:
    decision = backends.decide(machine(name), asked)
    return decision.build, "\n".join(decision.lines)


@pytest.mark.parametrize(
    ("name", "backend", "arguments"),
    [
        ("ubuntu22_rtx3060_cuda12.2", "cuda", ["-DCMAKE_CUDA_ARCHITECTURES=86-real", "=/usr/local/cuda/bin/nvcc"]),
        ("ubuntu24_two_cards", "cuda", ["-DCMAKE_CUDA_ARCHITECTURES=86-real;120a-real"]),
        ("wsl2_rtx4060_cuda12.4", "cuda", ["-DCMAKE_CUDA_ARCHITECTURES=89-real"]),
        ("windows11_rtx4070_cuda12.8", "cuda", ["CUDA/v12.8/bin/nvcc.exe"]),
        ("fedora42_rtx4070_cuda12.6_gcc15", "cuda", ["-DCMAKE_CUDA_HOST_COMPILER=g++-13"]),
        ("jetson_orin_jetpack6", "cuda", ["-DGGML_CUDA=ON"]),
        ("ubuntu24_rx7900_rocm6.2", "rocm", ["-DGGML_HIP=ON", "-DGPU_TARGETS=gfx1100"]),
        ("ubuntu24_rx6600_vulkan", "vulkan", ["-DGGML_VULKAN=ON"]),
        ("macos15_m2", "metal", ["-DGGML_METAL=ON"]),
    ],
)
def test_a_complete_machine_builds_for_its_device(name: str, backend: str, arguments: list[str]) -> None:
    build, _ = decide(name)
    assert build is not None
    assert build.backend == backend
    for argument in arguments:
        assert any(argument in given for given in build.cmake_args)


def test_no_machine_gets_another_cards_code() -> None:
    build, _ = decide("ubuntu24_rx7900_rocm6.2")
    assert build is not None
    assert "gfx1036" not in " ".join(build.cmake_args)
    assert build.environ["HIPCXX"].endswith("/llvm/bin/clang")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("debian11_gtx1080_driver470", ["GTX 1080", "580 or newer", "nvidia-cuda-toolkit", "CUDA 11"]),
        ("debian12_rtx4090_no_toolkit_no_compiler", ["RTX 4090", "build-essential"]),
        ("fedora42_rtx4070_cuda12.6_gcc15_alone", ["GCC 13 or older", "gcc13-c++"]),
        ("ubuntu22_gtx1060_cuda13", ["no longer knows", "CUDA 12 or older"]),
        ("ubuntu22_driver_mismatch", ["restart the machine"]),
        ("debian12_driver_not_loaded", ["kernel module"]),
        ("debian12_nvidia_no_driver", ["no driver", "nvidia-driver"]),
        ("windows11_rtx4070_no_toolkit", ["winget install Nvidia.CUDA"]),
        ("ubuntu24_rx7900_rocminfo_only", ["hipcc", "hipBLAS"]),
        ("ubuntu24_ryzen_igpu_rocm", ["inside the processor"]),
        ("ubuntu24_rocm_no_permission", ["usermod"]),
        ("debian12_rx6600_vulkan_no_glslc", ["glslc, SPIRV-Headers", "apt-get install libvulkan-dev"]),
        ("ubuntu24_intel_iris_vulkan", ["Iris", "--backend vulkan"]),
        ("raspberry_pi5", ["V3D"]),
        ("laptop_without_vulkaninfo", ["vulkaninfo"]),
        ("macos15_m2_no_tools", ["xcode-select --install"]),
        ("macos15_m1_rosetta", ["Rosetta", "brew install"]),
        ("macos13_intel", ["--gpu-layers 0"]),
        ("server_llvmpipe_only", ["no GPU"]),
        ("container_nvcc_without_gpu", ["no GPU"]),
    ],
)
def test_auto_falls_back_to_the_cpu_and_says_why(name: str, words: list[str]) -> None:
    build, said = decide(name)
    assert build == backends.Build("cpu")
    for word in words:
        assert word in said


def test_a_software_rasterizer_is_no_device() -> None:
    assert backends.examine(machine("server_llvmpipe_only"), "vulkan").devices == ()


@pytest.mark.parametrize("name", ["debian12_rtx4090_no_toolkit", "ubuntu24_rtx5090_cuda12.4_too_old"])
def test_a_driver_without_a_fitting_toolkit_takes_cuda_from_pypi(name: str) -> None:
    build, said = decide(name)
    assert build is not None
    assert re.fullmatch(
        r"cuda-toolkit\[[a-z,]*nvcc[a-z,]*\]>=13\.0,<13\.1", build.toolkit
    )  # never newer than the driver
    assert "PyPI" in said


def test_a_backend_asked_for_is_not_replaced_silently() -> None:
    build, said = decide("debian12_rx6600_vulkan_no_glslc", "vulkan")
    assert build is None
    assert "missing: glslc" in said
    build, _ = decide("ubuntu24_intel_iris_vulkan", "vulkan")
    assert build is not None
    assert build.backend == "vulkan"


def test_cpu_asks_nothing_of_the_machine() -> None:
    assert backends.decide(RecordedMachine(), "cpu").build == backends.Build("cpu")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_every_transcript_leads_to_a_build_with_a_reason(path: Path) -> None:
    decision = backends.decide(RecordedMachine.read(path), "auto")
    assert decision.build is not None
    assert decision.lines


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("container_nvcc_without_gpu", "CMake 3.25.1"),
        ("debian11_gtx1080_driver470", "CMake from PyPI (the system's 3.18.4 is too old)"),
        ("debian12_rtx4090_no_toolkit", "CMake from PyPI"),
    ],
)
def test_the_cmake_that_will_be_used_is_named(name: str, words: str) -> None:
    assert compilers.cmake(machine(name)) == words


@pytest.mark.parametrize(
    ("name", "kind", "major"),
    [
        ("ubuntu22_rtx3060_cuda12.2", "gcc", 11),
        ("fedora42_rtx4070_cuda12.6_gcc15", "gcc", 15),
        ("debian11_gtx1080_driver470", "gcc", 10),
        ("macos15_m2", "clang", 16),
        ("windows11_rtx4070_cuda12.8", "msvc", 0),
    ],
)
def test_host_compilers_are_read(name: str, kind: str, major: int) -> None:
    compiler = compilers.find(machine(name))
    assert compiler is not None
    assert (compiler.kind, compiler.major) == (kind, major)


def test_macos_stub_compiler_is_not_called_without_its_tools() -> None:
    assert compilers.find(machine("macos15_m2_no_tools")) is None


def test_a_command_that_does_not_exist_or_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe = ThisMachine()
    assert probe.run([str(tmp_path / "nothing")]) == Transcript(None)
    monkeypatch.setattr("bootstrap.probe.TIMEOUT_SECONDS", 0.1)
    assert probe.run(["sleep", "30"]) == Transcript(None)


def test_a_broken_transcript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("platform: linux\n$ nvcc --version\nno ending\n")
    with pytest.raises(ValueError, match="no \\[exit N\\] line"):
        RecordedMachine.read(path)

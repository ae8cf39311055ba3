"""CUDA's wheels, laid out as PyPI's are, become a toolkit with the names that CMake looks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bootstrap import cuda_wheels
from bootstrap.errors import SetupError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="used on Linux only")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of nvidia-cuda-nvcc, -crt, -runtime, nvidia-nvvm and nvidia-cublas 13.0 that matter."""
    folder = tmp_path / "nvidia" / "cu13"
    for name in (*cuda_wheels.NEEDED, "lib/libcudart.so.13", "lib/libcublas.so.13", "lib/libcublasLt.so.13",
                 "lib/libcudart_static.a"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_plain_names_lead_to_the_libraries(root: Path, tmp_path: Path) -> None:
    driver = tmp_path / "libcuda.so.1"
    driver.write_text("driver")
    cuda_wheels.link(root, driver)
    assert (root / "lib" / "libcudart.so").read_text() == "lib/libcudart.so.13"
    assert (root / "lib64" / "libcublasLt.so").read_text() == "lib/libcublasLt.so.13"
    assert (root / "lib" / "stubs" / "libcuda.so").read_text() == "driver"


def test_a_second_run_changes_nothing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    for _ in range(2):
        cuda_wheels.link(root, tmp_path / "libcuda.so.1")
    assert (root / "lib" / "libcublas.so").is_symlink()


def test_wheels_without_a_compiler_are_told(root: Path) -> None:
    (root / "nvvm" / "bin" / "cicc").unlink()
    with pytest.raises(SetupError, match="cicc"):
        cuda_wheels.link(root, None)

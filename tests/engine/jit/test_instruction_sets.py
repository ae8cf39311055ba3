"""The kernels for processors with fewer instructions, which this one can run as well."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

_OLD = "+cx16,+sahf,+popcnt,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2"
_SETS = {
    "avx2": ("haswell", f"{_OLD},+avx,+avx2,+bmi,+bmi2,+f16c,+fma"),
    "sse4": ("nehalem", _OLD),
}


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="instruction sets of x86-64")
@pytest.mark.parametrize("name", list(_SETS))
def test_kernels_on_older_processors(name: str) -> None:
    processor, features = _SETS[name]
    environment = os.environ | {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
    tests = Path(__file__).with_name("test_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-3000:]

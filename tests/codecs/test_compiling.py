"""The kernels' cache: none needed, and never stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgellama.codecs import compiling

_WITHOUT_CACHE = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []  # as where no folder can be written
import numpy as np
from gguf import GGMLQuantizationType as Type
from edgellama.codecs.base import codec
out = codec(Type.BF16).quantize(np.array([[1.0, -2.5]], np.float32))
assert out.view(np.uint16).tolist() == [[0x3F80, 0xC020]]
"""


def test_kernels_work_where_nothing_can_be_cached() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_CACHE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_change_in_any_file_makes_every_cached_kernel_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba itself looks at a kernel's own file only, and would keep what that file calls."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "a.py"))
    compiling._stamp.cache_clear()
    before = compiling._stamp()
    (tmp_path / "b.py").write_text("x = 2\n")
    compiling._stamp.cache_clear()
    assert compiling._stamp() != before
    monkeypatch.undo()
    compiling._stamp.cache_clear()
    from edgellama.codecs import floats

    stamps = [floats._to_f16._cache._cache_file._source_stamp, floats._to_bf16._cache._cache_file._source_stamp]  # type: ignore[attr-defined]
    assert all(stamp[1] == compiling._stamp() for stamp in stamps)

"""A run that is stopped anywhere leaves nothing, or a part file that --resume turns into the same bytes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellama.errors import DiskFullError
from edgellama.quantize import Options, pipeline, quantize_file

_CHILD = """
import sys, time
from edgellama.quantize import Options, pipeline, quantize_file
pipeline.SLAB_WEIGHTS, pipeline.FLUSH_BYTES = 1 << 14, 1 << 15
quantize_file(sys.argv[1], sys.argv[2], Options(recipe="Q4_K_M", threads=2, resume=True),
              on_progress=lambda fraction, tensor: (print(fraction, flush=True), time.sleep(0.005)))
"""


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SLAB_WEIGHTS", 1 << 14)
    monkeypatch.setattr(pipeline, "FLUSH_BYTES", 1 << 15)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize("after", [1, 30, 120])
def test_killed_and_resumed_gives_the_same_file(make_model: Callable[..., Path], tmp_path: Path, after: int) -> None:
    source, target, expected = make_model("wide", layers=9), tmp_path / "out é.gguf", tmp_path / "expected.gguf"
    quantize_file(source, expected, Options(recipe="Q4_K_M", threads=2))
    command = [sys.executable, "-c", _CHILD, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(after):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert not target.exists()
    done: list[float] = []
    quantize_file(
        source,
        target,
        Options(recipe="Q4_K_M", threads=2, resume=True),
        on_progress=lambda fraction, _tensor: done.append(fraction),
    )
    assert target.read_bytes() == expected.read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted([target, expected])


def test_an_exception_keeps_the_part_and_other_options_start_anew(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source, target = make_model("wide", layers=9), tmp_path / "out.gguf"
    calls = 0

    def stop(fraction: float, _tensor: str) -> None:
        nonlocal calls
        calls += 1
        if fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_file(source, target, Options(recipe="Q4_K_M", threads=2), on_progress=stop)
    assert not target.exists()
    assert pipeline.leftovers(target)
    whole = calls * 2
    seen: list[str] = []
    quantize_file(source, target, Options(recipe="Q5_K_M", resume=True), on_progress=lambda _f, t: seen.append(t))
    assert len(seen) > whole * 0.9
    expected = tmp_path / "expected.gguf"
    quantize_file(source, expected, Options(recipe="Q5_K_M"))
    assert target.read_bytes() == expected.read_bytes()


def test_a_full_disk_is_told_before_and_during(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_model("wide", layers=9), tmp_path / "out.gguf"
    target.write_bytes(b"the old file")
    monkeypatch.setattr(pipeline, "free_bytes", lambda _folder: 1000)
    with pytest.raises(DiskFullError, match=r"bytes are needed, 1,000 are free"):
        quantize_file(source, target, Options())
    monkeypatch.undo()

    def fail(_self: object, _offset: int, _data: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pipeline.PartFile, "_put", fail)
    with pytest.raises(DiskFullError, match="No space left"):
        quantize_file(source, target, Options())
    assert target.read_bytes() == b"the old file"


def test_memory_does_not_grow_with_a_tensor(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Slabs hold a bounded number of weights, whatever the rows, and never two experts."""
    source = make_model("experts", layers=3, keys={"llama.expert_count": 8, "llama.expert_used_count": 2})
    from edgellama.quantize.api import Job

    (output,) = Job(source, tmp_path / "out.gguf", Options()).outputs
    covered: dict[str, int] = {}
    for slab in pipeline.slabs(output):
        shape = slab.placed.source.shape
        assert slab.rows * shape[0] <= max(pipeline.SLAB_WEIGHTS, shape[0])
        if len(shape) > 2:
            assert slab.first // shape[1] == (slab.first + slab.rows - 1) // shape[1]
        assert slab.first == covered.get(slab.placed.source.name, 0)
        covered[slab.placed.source.name] = slab.first + slab.rows
    assert all(covered[p.source.name] * p.source.shape[0] == p.source.elements for p in output.tensors)

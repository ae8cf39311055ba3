"""Two set-ups at once: the second waits, and a killed one leaves no lock behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from bootstrap import lock

SCRIPTS = Path(__file__).parents[2] / "scripts"
HOLD = """
import sys, time, pathlib, subprocess
sys.path.insert(0, sys.argv[1])
from bootstrap import lock
from bootstrap.children import Runner
folder = pathlib.Path(sys.argv[2])
with lock.held(folder) as descriptor:
    (folder / "holding").touch()
    if len(sys.argv) > 3:
        Runner(folder / "log", quiet=True, lock_descriptor=descriptor).run("x", ["sleep", sys.argv[3]])
    time.sleep(60)
"""


def hold(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(SCRIPTS), str(folder), *more])
    end = time.monotonic() + 20
    while not (folder / "holding").exists() and time.monotonic() < end:
        time.sleep(0.02)
    return process


def is_free(folder: Path) -> bool:
    with (folder / lock.NAME).open("r+b") as stream:
        return lock._try_lock(stream.fileno())


def test_one_at_a_time_and_free_after_a_kill(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        assert not is_free(tmp_path)
        assert (tmp_path / lock.NAME).read_text() == str(holder.pid)
    finally:
        holder.kill()
        holder.wait()
    with lock.held(tmp_path, quiet=True):
        pass


def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    start = time.monotonic()
    killer = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(0.6); os.kill({holder.pid}, 9)"],
    )
    with lock.held(tmp_path, quiet=True):
        waited = time.monotonic() - start
    killer.wait()
    holder.wait()
    assert waited > 0.3  # it can only be had once the holder is gone


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors are inherited on POSIX only")
def test_the_lock_lives_as_long_as_an_orphaned_child(tmp_path: Path) -> None:
    holder = hold(tmp_path, "3")
    end = time.monotonic() + 20
    while not (tmp_path / "log").exists() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)
    holder.kill()
    holder.wait()
    assert not is_free(tmp_path)  # pip, say, is still writing into the environment
    with lock.held(tmp_path, quiet=True):
        pass

"""Exit codes in words, checked against real deaths where this system has them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgellama.runtime import exits


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SIGILL", "illegal instruction"),
        ("SIGSEGV", "invalid memory access"),
        ("SIGBUS", "memory page"),
        ("SIGABRT", "failed check"),
        ("SIGFPE", "arithmetic"),
        ("SIGKILL", "killed"),
        ("SIGTERM", "from outside"),
    ],
)
def test_every_real_signal_death_is_named(name: str, words: str) -> None:
    number = getattr(signal, name).value
    code = f"import os,signal,resource; resource.setrlimit(resource.RLIMIT_CORE,(0,0)); os.kill(os.getpid(),{number})"
    died = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False)
    text = exits.describe(died.returncode)
    assert died.returncode == -number
    assert words in text
    assert name in text


@pytest.mark.parametrize("code", [0xC000001D, 0xC000001D - (1 << 32)])
def test_windows_status_signed_or_not(code: int) -> None:
    assert exits.describe(code, platform="win32") == "died of an illegal instruction (0xC000001D)"


def test_windows_access_violation_abort_and_unknown_exception() -> None:
    assert "invalid memory access" in exits.describe(0xC0000005, platform="win32")
    assert "failed check" in exits.describe(3, platform="win32")
    assert exits.describe(0xC0DEC0DE, platform="win32") == "died of an exception (0xC0DEC0DE)"


def test_plain_exits() -> None:
    assert exits.describe(0) == "ended"
    assert exits.describe(5, platform="linux") == "ended with exit code 5"
    assert "internal" in exits.describe(exits.EXIT_INTERNAL)
    assert "signal 63" in exits.describe(-63, platform="linux") or "SIGRT" in exits.describe(-63, platform="linux")


def test_out_of_memory_is_told_when_known() -> None:
    assert "lack of memory" in exits.describe(-9, out_of_memory=True)


def _machine(tmp_path: Path, cgroup: str) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    groups.mkdir()
    return proc, groups


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/user.slice/app\n", "user.slice/app/memory.events", "low 0\noom 1\noom_kill {}\noom_group_kill 0\n"),
        ("0::/on/the/host\n", "memory.events", "oom_kill {}\n"),
        ("4:cpu,memory:/box\n", "memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ],
)
def test_kill_counters_of_both_cgroup_versions(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    proc, groups = _machine(tmp_path, cgroup)
    counter = groups / file
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(text.format(7))
    kills = exits.OutOfMemoryKills(proc, groups)
    assert not kills.grew()
    counter.write_text(text.format(8))
    assert kills.grew()


def test_machine_wide_counter_and_nothing_to_read(tmp_path: Path) -> None:
    proc, groups = _machine(tmp_path, "0::/\n")
    kills = exits.OutOfMemoryKills(proc, groups)
    (proc / "vmstat").write_text("oom_kill 4\n")
    assert kills.grew()
    assert not exits.OutOfMemoryKills(tmp_path / "none", tmp_path / "none").grew()

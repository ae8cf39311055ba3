"""Children: their output is kept and shown, and nothing of theirs outlives a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bootstrap import children
from bootstrap.children import Runner, Terminated

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX process groups")
SCRIPTS = Path(__file__).parents[2] / "scripts"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc").exists() else True
    )


def wait_for(condition: object, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if callable(condition) and condition():
            return True
        time.sleep(0.05)
    return False


def test_output_goes_to_the_log_and_back(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log", quiet=True)
    seen: list[str] = []

    def describe(line: str) -> str:
        seen.append(line)
        return ""

    code = "import sys; print('one'); sys.stderr.write('zwei ü\\n'); sys.exit(3)"
    status, output = runner.run("x", [sys.executable, "-X", "utf8", "-u", "-c", code], describe=describe)
    assert status == 3
    assert output.splitlines() == ["one", "zwei ü"] == seen
    assert "zwei ü" in (tmp_path / "log").read_text("utf-8")


def test_bytes_that_are_no_text_are_survived(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n')"
    status, output = Runner(tmp_path / "log", quiet=True).run("x", [sys.executable, "-c", code])
    assert status == 0
    assert output


def test_only_the_end_of_a_long_output_is_shown() -> None:
    shown = children.tail("\n".join(f"line {n}" for n in range(100)) + "\n" + "x" * 1000)
    assert "line 74" not in shown
    assert "line 99" in shown
    assert max(map(len, shown.splitlines())) < 320


@POSIX
def test_a_kill_ends_the_whole_tree(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    inner = f"sh -c 'echo $$ >> {pids}; exec sleep 60' & echo $$ >> {pids}; wait"
    program = (
        "import sys, pathlib\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from bootstrap.children import Runner, signals_end_children\n"
        "try:\n"
        "    with signals_end_children():\n"
        f"        Runner(pathlib.Path({str(tmp_path / 'log')!r}), quiet=True).run('x', ['sh', '-c', {inner!r}])\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    assert wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(alive(pid) for pid in started)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == 130
    assert wait_for(lambda: not any(alive(pid) for pid in started))


@POSIX
def test_terminated_is_an_interrupt() -> None:
    def be_killed() -> None:
        with children.signals_end_children():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        be_killed()
    assert issubclass(Terminated, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

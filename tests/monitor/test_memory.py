"""Memory limits: control groups of both versions, read from trees built here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgellama.monitor import memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=12 * GIB))
    monkeypatch.setattr(memory, "_address_space_limit", list)


class Tree:
    """A /proc and a cgroup mount in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.mount = root / "sys fs" / "cgroup"  # mountinfo writes the blank as \040
        (self.proc / "self").mkdir(parents=True)
        self.mount.mkdir(parents=True)

    def write(self, cgroup: str, *mounts: str) -> None:
        (self.proc / "self" / "cgroup").write_text(cgroup)
        (self.proc / "self" / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))

    def line(self, kind: str, root: str = "/", options: str = "rw", point: Path | None = None) -> str:
        escaped = str(point or self.mount).replace(" ", "\\040")
        return f"30 24 0:26 {root} {escaped} rw,nosuid shared:9 - {kind} {kind} {options}"

    def group(self, path: str, **files: str) -> Path:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / f"memory.{name}").write_text(content)
        return folder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert memory.available_bytes(tmp_path) == 12 * GIB
    assert memory.total_bytes(tmp_path) == 16 * GIB


def test_v2_without_inactive_file(tree: Tree) -> None:
    tree.write("0::/user/job\n", tree.line("cgroup2"))
    stat = f"anon 1\ninactive_file {GIB}\nactive_file 3\n"
    tree.group("user/job", max=f"{4 * GIB}\n", current=f"{3 * GIB}\n", stat=stat)
    assert memory.total_bytes(tree.proc) == 4 * GIB
    assert memory.available_bytes(tree.proc) == 2 * GIB


def test_v2_the_tightest_ancestor_wins(tree: Tree) -> None:
    tree.write("0::/a/b/c\n", tree.line("cgroup2"))
    tree.group("a/b/c", max="max\n", current="5\n")
    tree.group("a/b", max=f"{8 * GIB}\n", current=f"{GIB}\n")
    tree.group("a", max=f"{6 * GIB}\n", current=f"{5 * GIB}\n")
    assert memory.available_bytes(tree.proc) == GIB
    assert memory.total_bytes(tree.proc) == 6 * GIB


def test_v2_high_counts_as_a_limit(tree: Tree) -> None:
    tree.write("0::/s\n", tree.line("cgroup2"))
    tree.group("s", max="max\n", high=f"{2 * GIB}\n", current="0\n")
    assert memory.available_bytes(tree.proc) == 2 * GIB


def test_v1_unlimited_is_a_huge_number(tree: Tree) -> None:
    tree.write("4:cpu,memory:/docker/x\n0::/\n", tree.line("cgroup", options="rw,memory"))
    tree.group("docker/x", limit_in_bytes="9223372036854771712\n", usage_in_bytes="1\n")
    assert memory.available_bytes(tree.proc) == 12 * GIB


def test_v1_limit_without_inactive_file(tree: Tree) -> None:
    tree.write("4:memory:/docker/x\n", tree.line("cgroup", options="rw,memory"))
    stat = f"total_inactive_file {GIB}\ninactive_file 7\n"
    tree.group("docker/x", limit_in_bytes=f"{3 * GIB}\n", usage_in_bytes=f"{2 * GIB}\n", stat=stat)
    assert memory.available_bytes(tree.proc) == 2 * GIB


def test_inside_a_container_the_mount_shows_only_our_part(tree: Tree) -> None:
    """Without a cgroup namespace the path is the host's, and the mount's root is our group."""
    tree.write("0::/docker/abc/inner\n", tree.line("cgroup2", root="/docker/abc"))
    tree.group("inner", max=f"{5 * GIB}\n", current="0\n")
    tree.group("", max=f"{3 * GIB}\n", current=f"{GIB}\n")
    assert memory.available_bytes(tree.proc) == 2 * GIB


def test_a_group_the_namespace_does_not_show(tree: Tree) -> None:
    tree.write("0::/../../elsewhere\n", tree.line("cgroup2"))
    tree.group("", max=f"{GIB}\n", current="0\n")
    assert memory.available_bytes(tree.proc) == GIB


def test_use_above_the_limit_is_no_negative_number(tree: Tree) -> None:
    tree.write("0::/s\n", tree.line("cgroup2"))
    tree.group("s", max="100\n", current="500\n")
    assert memory.available_bytes(tree.proc) == 0


@pytest.mark.parametrize("content", ["", "garbage", "0::", "\x00\xff", "a:b:c:d\n::::\n"])
def test_garbage_is_no_limit(tree: Tree, content: str) -> None:
    tree.write(content, "garbage", "1 2 3 4 5 - x", tree.line("cgroup2"))
    tree.group("", max="many\n", current="\n")
    assert memory.available_bytes(tree.proc) == 12 * GIB


def test_resident_size_of_this_process_and_of_none() -> None:
    own = memory.resident_bytes()
    assert own is not None
    assert own > 1 << 20
    assert memory.resident_bytes(2**22 + 1) is None

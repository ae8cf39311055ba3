"""What a confined process can no longer do, tried in real processes."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from edgellama.runtime import confine
from edgellama.runtime.confine import Needs, darwin, landlock, seccomp

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")

_PREAMBLE = """
import os, socket, subprocess, sys
from pathlib import Path
from edgellama.runtime import confine
def tried(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"
"""


def _confined(code: str, *arguments: object) -> list[str]:
    program = _PREAMBLE + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _kernel_has_landlock() -> bool:
    import ctypes

    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


needs_landlock = pytest.mark.skipif(not _kernel_has_landlock(), reason="this kernel has no Landlock")


@linux_only
def test_no_network_of_any_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = _confined(
            """
            port = int(sys.argv[1])
            held = confine.apply(confine.Needs(()))
            print("no-network" in held)
            print(tried(lambda: socket.create_connection(("127.0.0.1", port))))
            for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_UNIX):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                    print(tried(lambda: socket.socket(family, kind)))
            """,
            server.getsockname()[1],
        )
    assert found == ["True", *["PermissionError"] * 13]


@linux_only
def test_with_a_gpu_only_local_sockets_are_left() -> None:
    found = _confined(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(38, 1, 0, 0, 0)
        from edgellama.runtime.confine import seccomp
        print("no-network" in seccomp.restrict(libc, local_sockets=True))
        print(tried(lambda: socket.socketpair()[0].close()))
        print(tried(lambda: socket.socket(socket.AF_INET)))
        print(tried(lambda: socket.socketpair(socket.AF_INET)))
        print(tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)))
        """
    )
    assert found == ["True", "done", "PermissionError", "PermissionError", "PermissionError"]


@linux_only
def test_no_new_privileges_no_programs_no_other_processes_no_cores() -> None:
    found = _confined(
        """
        import resource
        held = confine.apply(confine.Needs(()))
        print("no-new-privileges" in held, "no-exec" in held, "no-core-dumps" in held)
        status = dict(l.split(":\\t", 1) for l in Path("/proc/self/status").read_text().splitlines() if ":\\t" in l)
        print(status["NoNewPrivs"], status["Seccomp"])
        print(tried(lambda: subprocess.run(["/bin/true"])))
        print(tried(lambda: os.execv("/bin/true", ["true"])))
        print(tried(lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes()))
        print(resource.getrlimit(resource.RLIMIT_CORE) == (0, 0))
        """
    )
    assert found == ["True", "True", "True", "1", "2", *["PermissionError"] * 3, "True"]


@needs_landlock
def test_only_the_model_can_be_read_and_only_the_cache_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("private")
    folder = tmp_path / "models é"
    folder.mkdir()
    model, neighbour, cache = folder / "m.gguf", folder / "n.gguf", tmp_path / "cache"
    model.write_bytes(b"GGUF")
    neighbour.write_bytes(b"other")
    cache.mkdir()
    (tmp_path / "link.gguf").symlink_to(model)
    found = _confined(
        """
        secret, model, link, neighbour, cache = map(Path, sys.argv[1:])
        print("landlock" in confine.apply(confine.Needs(confine.model_files(str(link)), (cache,))))
        print(tried(secret.read_bytes), tried(neighbour.read_bytes), tried(lambda: os.listdir(secret.parent)))
        print(tried(model.read_bytes), tried(link.read_bytes), tried(lambda: model.open("r+b")))
        print(tried(lambda: secret.write_bytes(b"")), tried(model.unlink), tried(lambda: os.truncate(model, 0)))
        print(tried(lambda: (cache / "new").write_bytes(b"x")), tried((cache / "new").unlink))
        print(tried(lambda: (model.parent / "new").write_bytes(b"x")), tried(lambda: Path("/tmp/new-file").touch()))
        import sqlite3, decimal
        print(sqlite3.sqlite_version != "" and tried(lambda: os.urandom(4)))
        """,
        secret,
        model,
        tmp_path / "link.gguf",
        neighbour,
        cache,
    )
    denied = "PermissionError"
    assert found == [
        "True", denied, denied, denied, "done", "done", denied,
        denied, denied, denied, "done", "done", denied, denied, "done",
    ]  # fmt: skip
    assert secret.read_text() == "private"
    assert model.read_bytes() == b"GGUF"


@needs_landlock
def test_threads_that_start_later_are_confined_as_well(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    found = _confined(
        """
        import threading
        confine.apply(confine.Needs(()))
        thread = threading.Thread(target=lambda: print(tried(Path(sys.argv[1]).read_bytes)))
        thread.start()
        thread.join()
        """,
        secret,
    )
    assert found == ["PermissionError"]


@needs_landlock
def test_a_thread_that_ran_before_is_admitted() -> None:
    found = _confined(
        """
        import threading, time
        threading.Thread(target=lambda: time.sleep(5), daemon=True).start()
        print(next(name for name in confine.apply(confine.Needs(())) if name.startswith("landlock")).replace(" ", "_"))
        os._exit(sys.stdout.flush() or 0)
        """
    )
    assert found == ["landlock_(not_for_threads_that_ran_before)"]


# ---- what this machine cannot show


class _Kernel:
    """Stands in for libc.syscall on another kernel; remembers the calls."""

    def __init__(self, abi: int) -> None:
        self.abi = abi
        self.calls: list[tuple[Any, ...]] = []

    def syscall(self, number: int, *arguments: Any) -> int:
        self.calls.append((number, *arguments))
        if number == 444:
            return self.abi if arguments[2] == 1 else os.open(os.devnull, os.O_RDONLY)
        return 0


@pytest.mark.parametrize(("abi", "size"), [(1, 8), (2, 8), (3, 8), (4, 16), (5, 16), (6, 24), (7, 24)])
def test_older_kernels_get_only_the_rights_they_know(abi: int, size: int) -> None:
    kernel = _Kernel(abi)
    held = landlock.restrict(kernel, [(Path(os.devnull), landlock.DEVICE), (Path("/no/such/file"), landlock.READ)])
    assert held
    create = kernel.calls[1]
    ruleset = create[1]._obj
    known = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF, 6: 0xFFFF, 7: 0xFFFF}[abi]
    assert ruleset.handled_access_fs == known
    assert create[2].value == size
    rules = [call for call in kernel.calls if call[0] == 445]
    assert len(rules) == 1
    allowed = rules[0][3]._obj.allowed_access
    assert allowed & ~known == 0
    assert allowed & (1 << 3 | 0x1FF0) == 0  # rights of folders are refused for files by the kernel


def test_without_landlock_nothing_is_claimed() -> None:
    assert landlock.restrict(_Kernel(-1), []) == []
    assert landlock.restrict(_Kernel(0), []) == []


def _run_filter(code: list[tuple[int, int, int, int]], number: int, audit: int, argument: int = 0) -> int:
    """A BPF interpreter for the few instructions in use."""
    data = struct.pack("<IIQ6Q", number, audit, 0, argument, 0, 0, 0, 0, 0)
    place, value = 0, 0
    while True:
        operation, yes, no, constant = code[place]
        place += 1
        if operation == 0x20:
            value = struct.unpack_from("<I", data, constant)[0]
        elif operation in {0x15, 0x35}:
            place += yes if (value == constant if operation == 0x15 else value >= constant) else no
        elif operation == 0x06:
            return constant
        else:
            raise AssertionError(f"unknown instruction {operation:#x}")


@pytest.mark.parametrize("name", sorted(seccomp._ABIS))
@pytest.mark.parametrize("local", [False, True])
def test_the_filter_of_every_architecture(name: str, local: bool) -> None:
    abi = seccomp._ABIS[name]
    code = seccomp.program(abi, local_sockets=local)
    allowed, refused = 0x7FFF0000, 0x00050001
    for number in (abi.socket, abi.socketpair):
        assert _run_filter(code, number, abi.audit, 2) == refused
        assert _run_filter(code, number, abi.audit, 16) == refused
        assert _run_filter(code, number, abi.audit, 1) == (allowed if local else refused)
    for number in (*abi.denied, 425):
        assert _run_filter(code, number, abi.audit) == refused
    for number in (0, 1, 2, 3, 98, 400, 449):
        if number not in {*abi.denied, abi.socket, abi.socketpair}:
            assert _run_filter(code, number, abi.audit) == allowed
    assert _run_filter(code, 0, 0x12345678) == refused
    if name == "x86_64":
        assert _run_filter(code, 0x40000000 | abi.socket, abi.audit, 2) == refused
        assert _run_filter(code, 0x40000000, abi.audit) == refused


@linux_only
def test_numbers_of_this_architecture_are_the_kernels() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if os.uname().machine != "x86_64" or not header.exists():
        pytest.skip("no kernel headers for x86_64 here")
    lines = [line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR_")]
    numbers = {line[1].removeprefix("__NR_"): int(line[2]) for line in lines}
    abi = seccomp._ABIS["x86_64"]
    names = ("execve", "execveat", "ptrace", "process_vm_readv", "process_vm_writev")
    assert abi.denied == tuple(numbers[name] for name in names)
    assert (abi.seccomp, abi.socket, abi.socketpair) == (numbers["seccomp"], numbers["socket"], numbers["socketpair"])
    assert numbers["io_uring_setup"] == 425
    assert numbers["landlock_create_ruleset"] == 444


def test_the_macos_profile_quotes_paths_and_names_what_is_left() -> None:
    needs = Needs((Path('/models/a "b"\\c.gguf'),), (Path("/cache"),))
    text = darwin.profile(needs, [Path("/python")], Path("/Users/me"))
    assert text.startswith("(version 1)\n(allow default)\n(deny network*)")
    assert '(deny file-read-data (subpath "/Users/me"))' in text
    assert '(allow file-read-data (subpath "/models/a \\"b\\"\\\\c.gguf"))' in text
    assert '(allow file-read-data file-write* (subpath "/cache"))' in text
    assert text.count("(") == text.count(")")


@pytest.mark.parametrize(("result", "held"), [(0, ["no-network", "no-exec", "sandbox"]), (-1, [])])
def test_the_macos_sandbox_is_claimed_only_when_it_holds(result: int, held: list[str]) -> None:
    class System:
        def sandbox_init(self, profile: bytes, flags: object, error: object) -> int:
            assert profile.startswith(b"(version 1)")
            return result

    assert darwin.apply(Needs(()), [], System()) == held


def test_a_split_model_is_all_its_files(tmp_path: Path) -> None:
    for n in (1, 2, 3):
        (tmp_path / f"big-{n:05d}-of-00003.gguf").touch()
    (tmp_path / "adapter.gguf").touch()
    (tmp_path / "other.gguf").touch()
    found = confine.model_files(str(tmp_path / "big-00001-of-00003.gguf"), [str(tmp_path / "adapter.gguf")])
    assert {path.name for path in found} == {
        "big-00001-of-00003.gguf", "big-00002-of-00003.gguf", "big-00003-of-00003.gguf", "adapter.gguf",
    }  # fmt: skip


def test_the_folder_of_the_user_is_not_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path.home()))
    folders = confine.library_folders()
    assert tmp_path.resolve() not in folders
    assert Path.home().resolve() not in folders
    assert Path(confine.__file__).resolve().parents[2] in folders

"""Set-up: refusals before any work, the folders it will not touch, and what failures leave behind."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bootstrap import lock, native, options, setup, stamp, venv
from bootstrap.backends import Build
from bootstrap.children import Runner
from bootstrap.errors import ENGINE, NO_SPACE, OFFLINE, SetupError
from bootstrap.native import Loaded, Native
from bootstrap.pip import Pip
from bootstrap.probe import RecordedMachine, Transcript
from bootstrap.setup import Setup

SCRIPTS = Path(__file__).parents[2] / "scripts"
GCC = Transcript(0, "c++ (Debian 12.2.0-14) 12.2.0\n")
WITH_COMPILER = RecordedMachine(paths={"/usr/bin/c++", "/usr/bin/apt-get"}, commands={"c++ --version": GCC})
WITHOUT_COMPILER = RecordedMachine(paths={"/usr/bin/apt-get"})


def test_a_missing_ensurepip_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find(name))
    with pytest.raises(SetupError) as caught:
        venv.check_interpreter(WITHOUT_COMPILER)
    assert f"python{sys.version_info[0]}.{sys.version_info[1]}-venv" in caught.value.text()


def test_a_32_bit_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("struct.calcsize", lambda form: 4)
    with pytest.raises(SetupError, match="32-bit"):
        venv.check_interpreter(WITH_COMPILER)


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SetupError, match="other files"):
        venv.check_folder(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "env").touch()
    with pytest.raises(SetupError, match="not a folder"):
        venv.check_folder(tmp_path / "env")


def test_a_small_disk_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8))
    with pytest.raises(SetupError, match=r"0\.1 GB free") as caught:
        venv.check_folder(tmp_path / "a" / "b")
    assert caught.value.code == NO_SPACE


def test_someone_elses_broken_environment_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "precious").touch()
    with pytest.raises(SetupError, match="not made by this script"):
        venv.make(tmp_path, Runner(tmp_path / "log", quiet=True))
    assert (tmp_path / "precious").exists()


def test_the_remains_of_our_own_are_cleared_but_lock_and_log(tmp_path: Path) -> None:
    for name in (venv.MARKER, "pyvenv.cfg", lock.NAME, venv.LOG_NAME):
        (tmp_path / name).touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "half").touch()
    venv._clear(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {lock.NAME, venv.LOG_NAME}


@pytest.mark.parametrize("utf8", ["0", "1"])
def test_a_path_file_is_read_alike_in_any_locale(tmp_path: Path, utf8: str) -> None:
    root = tmp_path / "Möbel und 模型"
    root.mkdir()
    (root / "found_it.py").write_text("")
    site = tmp_path / "site"
    site.mkdir()
    (site / "x.pth").write_text(venv.ascii_path_file(f"# kept\nimport os\n{root}\n"), "ascii")
    code = f"import site; site.addsitedir({str(site)!r}); import found_it"
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert venv.ascii_path_file("/plain/path\n") == "/plain/path\n"


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLAMA_VENV", str(tmp_path / "env"))
    monkeypatch.delenv("EDGELLAMA_OFFLINE", raising=False)
    return tmp_path


def make(arguments: list[str], **keywords: Any) -> Setup:
    return Setup(options.parse([*arguments, "--quiet"]), {"llamacpp"}, with_model=False, **keywords)


@pytest.mark.parametrize("how", ["option", "variable"])
def test_offline_without_an_environment_says_so(prepared: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "variable":
        monkeypatch.setenv("EDGELLAMA_OFFLINE", "true")
    with pytest.raises(SetupError, match="offline") as caught:
        make(["--offline"] if how == "option" else []).make()
    assert caught.value.code == OFFLINE
    assert not (prepared / "env" / "pyvenv.cfg").exists()


def test_a_full_disk_anywhere_in_between_is_told(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/x")

    monkeypatch.setattr(Setup, "_make_packages", full)
    with pytest.raises(SetupError, match="No space left") as caught:
        make([]).make()
    assert caught.value.code == NO_SPACE


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place_is_told(prepared: Path) -> None:
    prepared.chmod(0o555)
    with pytest.raises(SetupError, match="cannot be written"):
        make([]).make()


class FakePip(Pip):
    """Answers instead of running pip; keeps what was asked."""

    def __init__(self, folder: Path, *, cached: bool = False, status: int = 0, output: str = "") -> None:
        super().__init__(sys.executable, Runner(folder / "log", quiet=True))
        self.asked: list[tuple[list[str], dict[str, str]]] = []
        self._answer = (status, output)
        self._cached = cached
        self._folder = folder

    def try_install(self, title: str, arguments: Any, environ: dict[str, str] | None = None) -> tuple[int, str]:
        self.asked.append((list(arguments), environ or {}))
        return self._answer

    def has_built(self, distribution: str, version: str) -> bool:
        return self._cached

    def cache_folder(self) -> Path:
        return self._folder / "cache"


def bring(
    pip: FakePip, build: Build, looks: list[Loaded], monkeypatch: pytest.MonkeyPatch, *, rebuild: bool = False,
    machine: RecordedMachine = WITH_COMPILER,
) -> Loaded:  # fmt: skip
    waiting = iter(looks)
    monkeypatch.setattr(native, "look", lambda python, runner: next(waiting))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    return Native(pip, pip._runner, machine, "llama-cpp-python==1.2").bring(build, rebuild=rebuild)


GOOD = Loaded("1.2", ("CPU",))
CUDA = Loaded("1.2", ("CUDA0", "CPU"))


def test_what_is_there_and_right_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tmp_path)
    assert bring(pip, Build("cpu"), [GOOD], monkeypatch) == GOOD
    assert pip.asked == []


def test_a_cpu_build_may_come_from_pips_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tmp_path, cached=True)
    assert bring(pip, Build("cpu"), [Loaded(), GOOD], monkeypatch, machine=WITHOUT_COMPILER) == GOOD
    assert pip.asked[0][0] == ["llama-cpp-python==1.2"]


def test_a_gpu_build_never_takes_a_wheel_built_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tmp_path, cached=True)
    cuda = Build("cuda", ("-DGGML_CUDA=ON", "-DX=/a path/nvcc"))
    assert bring(pip, cuda, [GOOD, CUDA], monkeypatch).has("cuda")
    arguments, environ = pip.asked[0]
    assert "--force-reinstall" in arguments
    assert "--cache-dir" in arguments
    assert environ["CMAKE_ARGS"] == '-DGGML_CUDA=ON "-DX=/a path/nvcc"'


def test_a_cached_library_that_crashes_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tmp_path, cached=True)
    crash = Loaded(crash="it ended with SIGILL")
    assert bring(pip, Build("cpu"), [Loaded(), crash, GOOD], monkeypatch) == GOOD
    assert "--no-cache-dir" in pip.asked[1][0]


def test_a_library_that_never_loads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = Loaded(crash="it ended with SIGILL")
    with pytest.raises(SetupError, match="SIGILL") as caught:
        bring(FakePip(tmp_path), Build("cpu"), [Loaded(), crash, crash], monkeypatch)
    assert caught.value.code == ENGINE


def test_without_a_compiler_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tmp_path, status=1, output="ERROR: No matching distribution found for llama-cpp-python==1.2")
    with pytest.raises(SetupError) as caught:
        bring(pip, Build("cpu"), [Loaded()], monkeypatch, machine=WITHOUT_COMPILER)
    assert "apt-get install build-essential" in caught.value.text()
    assert [arguments[:2] for arguments, _ in pip.asked] == [["--only-binary", "llama-cpp-python"]]


def test_without_a_compiler_a_prebuilt_wheel_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tmp_path)
    assert bring(pip, Build("cpu"), [Loaded(), GOOD], monkeypatch, machine=WITHOUT_COMPILER) == GOOD


def test_without_a_compiler_or_a_network_it_is_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tmp_path, status=1, output="NewConnectionError: Temporary failure in name resolution")
    with pytest.raises(SetupError) as caught:
        bring(pip, Build("cpu"), [Loaded()], monkeypatch, machine=WITHOUT_COMPILER)
    assert caught.value.code == OFFLINE


def test_a_failing_build_says_why_and_offers_the_jit_engine_once_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(tmp_path, status=1, output="c++: fatal error: Killed signal terminated program cc1plus")
    with pytest.raises(SetupError) as caught:
        bring(pip, Build("cpu"), [Loaded()], monkeypatch)
    assert "out of memory" in caught.value.what
    assert ("--engine jit" in caught.value.text()) == bool(native.without_native())


def test_auto_goes_on_with_the_cpu_when_the_gpu_build_fails(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(prepared, status=1, output="nvcc fatal   : Unsupported gpu architecture 'compute_1'")
    calls: list[str] = []

    def try_install(self: FakePip, title: str, arguments: Any, environ: Any = None) -> tuple[int, str]:
        calls.append(environ["CMAKE_ARGS"])
        return (1, "nvcc fatal   : Unsupported gpu architecture 'compute_1'") if environ["CMAKE_ARGS"] else (0, "")

    monkeypatch.setattr(FakePip, "try_install", try_install)
    looks = iter([Loaded(), Loaded(), GOOD])
    monkeypatch.setattr(native, "look", lambda python, runner: next(looks))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    chosen = Native(pip, pip._runner, WITH_COMPILER, "llama-cpp-python==1.2")
    build, loaded = make([])._bring(chosen, Build("cuda", ("-DGGML_CUDA=ON",)), "auto")
    assert (build, loaded) == (Build("cpu"), GOOD)
    assert calls == ["-DGGML_CUDA=ON", ""]


def test_a_backend_asked_for_must_really_be_there(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Loaded(), GOOD])
    monkeypatch.setattr(native, "look", lambda python, runner: next(looks))
    pip = FakePip(prepared)
    chosen = Native(pip, pip._runner, WITH_COMPILER, "llama-cpp-python==1.2")
    with pytest.raises(SetupError, match="no such device") as caught:
        make([])._bring(chosen, Build("cuda", ("-DGGML_CUDA=ON",)), "cuda")
    assert caught.value.code == ENGINE


@pytest.mark.parametrize(
    ("backend", "processors", "memory_gib", "expected"),
    [("cpu", 8, 16, 8), ("cpu", 4, 1, 1), ("cpu", 4, 0, 4), ("cuda", 16, 8, 2), ("cuda", 2, 64, 2), ("cpu", 1, 0.4, 1)],
)
def test_compilers_at_once_fit_the_memory(backend: str, processors: int, memory_gib: float, expected: int) -> None:
    assert native.jobs(backend, processors, int(memory_gib * native.GIB)) == expected


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for the interpreter")
@pytest.mark.parametrize("arguments", [["--prompt", "a b"], ["--temperature", "0"]])
def test_a_second_start_goes_straight_to_edgellama(tmp_path: Path, arguments: list[str]) -> None:
    """A copied checkout in an awkward path, a fake interpreter in a complete environment: only that one is run."""
    root = tmp_path / "a cløne ✓"
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SCRIPTS.parent / "pyproject.toml", root)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nfor word in "$@"; do printf "[%s]" "$word"; done\n')
    python.chmod(0o755)
    code = (
        f"import sys; sys.path.insert(0, {str(root / 'scripts')!r}); from bootstrap import stamp\n"
        f"stamp.write({str(python.parents[1])!r}, {{'extras': 'llamacpp', 'model': 'tiny', 'backend_asked': 'auto'}})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    environ = {key: value for key, value in os.environ.items() if key != "EDGELLAMA_VENV"}
    done = subprocess.run(
        [sys.executable, str(root / "scripts" / "chat"), *arguments],
        cwd=tmp_path, env=environ, input="", capture_output=True, text=True, check=False,
    )  # fmt: skip
    words = "".join(f"[{word}]" for word in ["-m", "edgellama", "run", *arguments])
    assert (done.returncode, done.stdout, done.stderr) == (0, words, "")


def test_ctrl_c_is_one_line_and_130(capsys: pytest.CaptureFixture[str]) -> None:
    with setup.told() as codes:
        raise KeyboardInterrupt
    assert codes == [130]  # type: ignore[unreachable]
    assert capsys.readouterr().err.count("\n") == 1


def test_the_declared_engine_is_pinned_exactly() -> None:
    assert setup.declared()[1]["llamacpp"][0].count("==") == 1
    assert Path(stamp.ROOT, "pyproject.toml").is_file()

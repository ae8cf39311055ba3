"""What is shipped: the wheel built from the sdist holds all that runs, and installs without a compiler."""

from __future__ import annotations

import email.message
import email.parser
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(source: Path, target: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    environ = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone: what the sdist lacks, the wheel lacks."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build(source, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(archive.read(name).decode())


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_sdist_holds_what_a_checkout_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "scripts/chat", "scripts/test", ".ci/run"):
        assert name in held
    assert not [name for name in held if "__pycache__" in name or name.startswith((".venv", "shared"))]


def test_the_wheel_holds_catalogue_and_types(wheel: Path) -> None:
    held = names(wheel)
    catalogue = {f"edgellama/store/catalogue/{path.name}" for path in (ROOT / "models").glob("*.toml")}
    assert catalogue
    assert catalogue <= held
    assert {"edgellama/py.typed", "edgellama_tui/py.typed", "edgellama/__main__.py"} <= held
    assert any(name.endswith("/licenses/LICENSE") for name in held)


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    for package, folder in (("edgellama", ROOT / "edgellama"), ("edgellama_tui", ROOT / "tui" / "edgellama_tui")):
        modules = {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
        assert modules == {n for n in names(wheel) if n.startswith(f"{package}/") and n.endswith(".py")}
    assert {name.partition("/")[0].partition("-")[0] for name in names(wheel)} == {"edgellama", "edgellama_tui"}


def test_the_base_needs_no_compiler(metadata: email.message.Message) -> None:
    base = [spec for spec in metadata.get_all("Requires-Dist") or [] if "extra ==" not in spec]
    assert base
    assert not [spec for spec in base if spec.lower().startswith(("llama", "fastapi", "uvicorn"))]


def test_every_requirement_is_bounded(metadata: email.message.Message) -> None:
    for spec in metadata.get_all("Requires-Dist") or []:
        requirement = spec.partition(";")[0]
        assert "==" in requirement or "<" in requirement or "hatchling" in requirement, spec


def test_the_engine_is_pinned_exactly(metadata: email.message.Message) -> None:
    (spec,) = [s for s in metadata.get_all("Requires-Dist") or [] if s.startswith("llama-cpp-python")]
    assert "==" in spec.partition(";")[0]


def test_the_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys, pathlib; site = sys.argv.pop(1); sys.path.insert(0, site)\n"
        "import edgellama.store, edgellama.__main__\n"
        "assert pathlib.Path(edgellama.__file__).is_relative_to(site), edgellama.__file__\n"
        "assert edgellama.store.default_model().sources\n"
        "sys.argv = ['edgellama', '--version']\n"
        "sys.exit(edgellama.__main__.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path / "site")], capture_output=True, text=True, check=False
    )
    version = wheel.name.split("-")[1]
    assert (done.returncode, done.stdout) == (0, f"edgellama {version}\n"), done.stderr

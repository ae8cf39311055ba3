"""Under a Python that is too old the scripts parse, find a newer one or say what to install."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bootstrap import old_python

SCRIPTS = Path(__file__).parents[2] / "scripts"
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts stand in for interpreters")


@pytest.mark.parametrize("name", ["chat", "test", "device_check", "bootstrap/__init__.py", "bootstrap/old_python.py"])
def test_the_entry_parses_on_python_3_6(name: str) -> None:
    ast.parse((SCRIPTS / name).read_text("utf-8"), feature_version=(3, 6))


@pytest.mark.parametrize("name", ["chat", "test", "device_check"])
def test_nothing_newer_is_imported_before_the_check(name: str) -> None:
    body = ast.parse((SCRIPTS / name).read_text("utf-8")).body
    before = [node for node in body[: [type(node) for node in body].index(ast.If)] if isinstance(node, ast.ImportFrom)]
    assert before == []


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def call(path: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); sys.argv = ['scripts/chat', '--plain', 'a b']\n"
        "from bootstrap.old_python import replace_or_explain; sys.exit(replace_or_explain())"
    )
    environ = {key: value for key, value in os.environ.items() if key != old_python.GUARD}
    return subprocess.run(
        [sys.executable, "-c", code], env={**environ, "PATH": path}, capture_output=True, text=True, check=False
    )


@POSIX
def test_a_newer_python_on_path_takes_over(tmp_path: Path) -> None:
    program(tmp_path, "python3.12", 'if [ "$1" = -c ]; then exit 0; fi; echo "$@"')
    done = call(str(tmp_path))
    assert (done.returncode, done.stdout.strip()) == (0, "scripts/chat --plain a b")


@POSIX
def test_a_shim_that_is_no_python_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path, "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    program(tmp_path, "apt-get", "exit 0")
    done = call(str(tmp_path))
    assert done.returncode == 1
    assert "needs Python 3.11" in done.stderr
    assert "apt-get install" in done.stderr
    assert "Traceback" not in done.stderr


@POSIX
def test_without_a_package_manager_the_website_is_named(tmp_path: Path) -> None:
    assert "python.org" in call(str(tmp_path)).stderr

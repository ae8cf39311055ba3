"""Starting is cheap: what is heavy or needs an extra is not imported before it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "numba",
    "llvmlite",
    "llama_cpp",
    "textual",
    "edgellama_tui",
    "fastapi",
    "uvicorn",
    "tokenizers",
    "gguf",
    "jinja2",
)
ENTRY = "import sys; from edgellama.__main__ import main; sys.argv = ['edgellama', *{words!r}]\n"


def loaded(code: str) -> tuple[set[str], str]:
    """Top-level modules loaded after running `code`, and what it wrote to stdout."""
    ending = "\nimport sys; sys.stderr.write('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code + ending], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split()), done.stdout


@pytest.mark.parametrize("module", ["edgellama", "edgellama.errors", "edgellama.runtime.base", "edgellama.store"])
def test_the_core_imports_nothing_heavy(module: str) -> None:
    modules, _ = loaded(f"import {module}")
    assert "edgellama" in modules
    assert not modules & set(HEAVY)


def test_help_imports_nothing_heavy() -> None:
    modules, output = loaded(ENTRY.format(words=["--help"]) + "assert main() == 0")
    assert "Commands:" in output
    assert not modules & {*HEAVY, "numpy", "httpx", "rich", "psutil"}


def test_version_is_answered_before_click() -> None:
    modules, output = loaded(ENTRY.format(words=["--version"]) + "assert main() == 0")
    assert output.startswith("edgellama ")
    assert not modules & {*HEAVY, "click", "msgspec", "platformdirs"}


def test_version_survives_a_reader_that_left() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "edgellama", "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    with child.stderr:
        assert child.stderr.read() == b""
    child.wait()

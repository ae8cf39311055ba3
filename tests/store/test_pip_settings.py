"""pip's settings are read as pip reads them: the running pip itself is the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgellama.store import pip_settings
from edgellama.store.pip_settings import PYPI, load


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults() -> None:
    assert load({}, []).indexes == (PYPI,)


def test_later_files_and_the_environment_win(tmp_path: Path) -> None:
    first = write(
        tmp_path / "1", "[global]\nindex-url = https://one/simple/\nfind-links = /a\n  /b\nproxy=http://p:1\n"
    )
    second = write(tmp_path / "2", "[download]\nindex_url = https://two/simple\n[install]\nindex-url=https://no\n")
    found = load({}, [first, second])
    assert (found.indexes, found.find_links, found.proxy) == (("https://two/simple",), ("/a", "/b"), "http://p:1")
    given = {"PIP_INDEX_URL": "https://env", "PIP_EXTRA_INDEX_URL": "https://x https://y", "PIP_CERT": "/c.pem"}
    found = load(given, [first, second])
    assert found.indexes == ("https://env", "https://x", "https://y")
    assert found.certificates == "/c.pem"


@pytest.mark.parametrize("value", ["1", "true", "yes", "on"])
def test_no_index(value: str) -> None:
    assert load({"PIP_NO_INDEX": value, "PIP_FIND_LINKS": "/w"}, []).indexes == ()


@pytest.mark.parametrize("text", ["no section", "[global\nx", "\x00\xff", "[global]\nindex-url"])
def test_broken_files_are_passed_over(tmp_path: Path, text: str) -> None:
    assert load({}, [write(tmp_path / "x", text)]).indexes == (PYPI,)


def test_config_file_may_silence_all() -> None:
    assert load({"PIP_CONFIG_FILE": os.devnull}).indexes == (PYPI,)


@pytest.mark.skipif(sys.platform == "win32", reason="a pip.ini there")
def test_files_are_those_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip config debug` lists the files it would read."""
    monkeypatch.delenv("PIP_CONFIG_FILE")
    monkeypatch.setenv("XDG_CONFIG_DIRS", f"{tmp_path / 'xdg1'}:{tmp_path / 'xdg2'}")
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=True, timeout=60
        )
    except subprocess.CalledProcessError:
        pytest.skip("no pip in this environment")
    lines = [line.strip() for line in run.stdout.splitlines()]
    listed = [line.split(", exists:")[0] for line in lines if ", exists:" in line]
    assert sorted(str(path) for path in pip_settings._files(os.environ)) == sorted(listed)  # pip lists by kind
    monkeypatch.setenv("PIP_CONFIG_FILE", str(write(tmp_path / "own", "[global]\nindex-url = https://own")))
    (tmp_path / "xdg1" / "pip").mkdir(parents=True)
    write(tmp_path / "xdg1" / "pip" / "pip.conf", "[global]\nindex-url = https://shared\nproxy = http://p:1")
    run = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    assert "global.proxy='http://p:1'" in run.stdout
    assert load().proxy == "http://p:1"
    assert load().indexes == ("https://own",)

"""`edgellama config`: what it stores, keeps, refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellama import paths, settings

Call = Callable[..., Any]


def test_set_show_unset(call: Call) -> None:
    assert call("config", "set", "top-k", "12").code == 0
    shown = json.loads(call("config", "show", "--json").out)["settings"]["top_k"]
    assert shown["value"] == 12
    assert shown["source"] == str(paths.settings_file())
    assert call("config", "unset", "top_k").code == 0
    assert json.loads(call("config", "show", "--json").out)["settings"]["top_k"]["source"] == "built-in"


def test_a_value_may_begin_with_a_minus(call: Call) -> None:
    assert call("config", "set", "repeat_last_n", "-1").code == 0
    assert settings.load().repeat_last_n == -1


@pytest.mark.parametrize(
    ("key", "value"),
    [("temprature", "1"), ("temperature", "hot"), ("kv_type", "q9_9"), ("profile", "cool"), ("threads", "")],
)
def test_what_is_wrong_is_refused_and_nothing_written(key: str, value: str, call: Call) -> None:
    result = call("config", "set", key, value)
    assert result.code == 2
    assert result.out == ""
    assert not paths.settings_file().exists()


def test_comments_and_order_stay(call: Call) -> None:
    path = paths.settings_file()
    path.parent.mkdir(parents=True)
    path.write_text("# mine\nthreads = 2  # two only\n\ntop_k = 1\n")
    assert call("config", "set", "top_k", "5").code == 0
    assert path.read_text() == "# mine\nthreads = 2  # two only\n\ntop_k = 5\n"


def test_a_wrong_value_can_be_repaired(call: Call) -> None:
    path = paths.settings_file()
    path.parent.mkdir(parents=True)
    path.write_text("temperature = 500\nold_name = 3\n")
    assert call("config", "show").code == 4
    assert call("config", "set", "temperature", "0.5").code == 4  # the other fault is still there
    assert call("config", "unset", "old_name").code == 4
    path.write_text("temperature = 500\n")
    assert call("config", "set", "temperature", "0.5").code == 0
    assert settings.load().temperature == 0.5


@pytest.mark.parametrize("content", [b"threads = ", b"\xff\xfe", b"schema_version = 7\n"])
def test_a_file_we_do_not_understand_is_left_alone(content: bytes, call: Call) -> None:
    path = paths.settings_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert call("config", "set", "threads", "2").code == 4
    assert call("config", "unset", "threads").code == 4
    assert path.read_bytes() == content
    assert call("config", "path").code == 0
    assert call("doctor").code == 1


def test_a_link_stays_a_link(call: Call, tmp_path: Path) -> None:
    target = tmp_path / "dotfiles.toml"
    target.write_text("threads = 1\n")
    path = paths.settings_file()
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    assert call("config", "set", "threads", "3").code == 0
    assert path.is_symlink()
    assert "threads = 3" in target.read_text()


def test_text_of_any_kind_survives(call: Call) -> None:
    text = 'You are "Ada".\nЯ\t😀 \\ end'
    assert call("config", "set", "system", text).code == 0
    assert settings.load().system == text


def test_parallel_writers_lose_nothing(home: Path) -> None:
    from edgellama.cli import config

    names = ["threads", "top_k", "context", "parallel"]
    jobs = [
        threading.Thread(target=lambda name=name: config._edit(lambda table: table.__setitem__(name, 7)))  # type: ignore[misc]
        for name in names
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    loaded = settings.load()
    assert [getattr(loaded, name) for name in names] == [7] * 4


def test_a_variable_that_hides_the_file_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLAMA_THREADS", "4")
    assert "goes before the file" in call("config", "set", "threads", "2").err


def test_a_mistyped_variable_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLAMA_TEMPRATURE", "1")
    monkeypatch.setenv("EDGELLAMA_XYZZY", "1")
    monkeypatch.setenv("EDGELLAMA_VENV", "/somewhere")
    assert call("config", "path").err.splitlines() == [
        "warning: the variable EDGELLAMA_TEMPRATURE has no effect; did you mean EDGELLAMA_TEMPERATURE?",
        "warning: the variable EDGELLAMA_XYZZY has no effect",
    ]


def test_paths(call: Call, home: Path) -> None:
    assert call("config", "path").out == f"{home / 'config' / 'config.toml'}\n"
    assert call("config", "path", "models").out == f"{home / 'models'}\n"
    assert json.loads(call("config", "path", "--json").out)["cache"] == {
        "path": str(home / "cache"),
        "variable": "EDGELLAMA_CACHE_DIR",
    }
    assert call("config", "path", "nowhere").code == 2
